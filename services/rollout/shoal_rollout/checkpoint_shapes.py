"""Names, shapes and dtypes of a checkpoint's tensors, read from its safetensors headers without loading any data."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError

_MAX_HEADER_BYTES = 100 << 20
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

    Raises: ConfigError: no safetensors file, a damaged one, or a dtype that a push cannot carry.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        msg = f"model folder {folder} has no .safetensors file; a weight push needs one, save the model with safe_serialization=True"
        raise ConfigError(msg)
    return {name: tensor for path in paths for name, tensor in _meta_tensors(path)}


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
