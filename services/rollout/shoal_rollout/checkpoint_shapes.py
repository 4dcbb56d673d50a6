"""Names, shapes and dtypes of a checkpoint's tensors, read from its safetensors headers without loading any data."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from shoal.errors import ConfigError

_MAX_HEADER_BYTES = 100 << 20
_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def meta_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Make a meta tensor for every tensor of a checkpoint folder.

    Raises: ConfigError: no safetensors file, a damaged one, a tensor in two files, or a dtype that a push cannot carry.
    """
    tensors: dict[str, Tensor] = {}
    for path in _files(folder):
        for name, tensor in _meta_tensors(path):
            if name in tensors:
                msg = f"tensor {name} is in {path} and in another file of the folder; keep the files of one checkpoint, or write {_INDEX}"
                raise ConfigError(msg)
            tensors[name] = tensor
    return tensors


class CheckpointReader:
    """Reads tensors, or parts of them, of a checkpoint folder; use it as a context."""

    def __init__(self, folder: Path) -> None:
        self._paths = _files(folder)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for path in self._paths:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._files.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor. Raises: KeyError: there is no such tensor."""
        tensor: Tensor = self._files[name].get_slice(name)[part] if part else self._files[name].get_tensor(name)
        return tensor


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Read a checkpoint folder tensor by tensor."""
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)


def _files(folder: Path) -> list[Path]:
    """The files that vLLM loads: those that the index names, if there is one."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        msg = f"model folder {folder} has no .safetensors file; a weight push needs one, save the model with safe_serialization=True"
        raise ConfigError(msg)
    index = folder / _INDEX
    if not index.exists():
        return paths
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        msg = f"cannot read {index}: {error!r}; it must map tensors to files under weight_map"
        raise ConfigError(msg) from error
    missing = named - {path.name for path in paths}
    if missing:
        msg = f"model folder {folder} lacks {sorted(missing)[0]}, which {_INDEX} names"
        raise ConfigError(msg)
    return [path for path in paths if path.name in named]


def _meta_tensors(path: Path) -> list[tuple[str, Tensor]]:
    header = _read_header(path)
    header.pop("__metadata__", None)
    return [(name, torch.empty(entry["shape"], dtype=_dtype(path, name, entry["dtype"]), device="meta")) for name, entry in header.items()]


def _dtype(path: Path, name: str, text: str) -> torch.dtype:
    if text not in _DTYPES:
        msg = f"tensor {name} of {path} has dtype {text}; a weight push carries {', '.join(_DTYPES)}"
        raise ConfigError(msg)
    return _DTYPES[text]


def _read_header(path: Path) -> dict[str, dict[str, Any]]:
    # https://huggingface.co/docs/safetensors: 8 bytes little-endian length, then JSON.
    try:
        with path.open("rb") as file:
            (num_bytes,) = struct.unpack("<Q", file.read(8))
            if num_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {num_bytes} bytes")
            header: dict[str, dict[str, Any]] = json.loads(file.read(num_bytes))
    except (OSError, ValueError, struct.error) as error:
        msg = f"cannot read the safetensors header of {path}: {error}; is the file complete?"
        raise ConfigError(msg) from error
    return header
