"""What a model's folder tells without loading it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from shoal.errors import ConfigError

MAX_HEADER_BYTES = 100 << 20
_END_BYTES = 1 << 16
_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def check_folder(folder: Path) -> dict[str, Any]:
    """Read config.json, and see that there are weights that can be loaded.

    Raises: ConfigError: no configuration, or no safetensors.
    """
    config = read_json(folder / "config.json")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} has no *.safetensors: only these are loaded; save the model with save_pretrained")
    return config


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises: ConfigError: it is none.
    """
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({type(error).__name__}: {error}): name the folder of a Hugging Face model") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds {type(content).__name__}, not a JSON object: restore the model's file")
    return content


def label_place(config: Mapping[str, Any], label: int | str | None) -> int:
    """Place of the output that is the score.

    Args:
        config: config.json; without id2label and num_labels a model has two outputs, as transformers has it.
        label: place or name; None if there is one output.
    Raises: ConfigError: it does not exist, or there are several and none is chosen.
    """
    names = _label_names(config)
    if label is None and len(names) == 1:
        return 0
    if isinstance(label, int) and 0 <= label < len(names):
        return label
    if isinstance(label, str) and names.count(label) == 1:
        return names.index(label)
    asked = "label is not set" if label is None else f"label is {label!r}"
    listed = ", ".join(f"{place} {name!r}" for place, name in enumerate(names))
    raise ConfigError(f"the model has {len(names)} outputs ({listed}) and {asked}: set label to one of them")


def digest_folder(folder: Path) -> str:
    """Digest of a model: its text files, and of each tensor dtype, shape and the first and last 64 KiB.

    Reading all of a large model would take minutes for each process that builds a scorer; another training changes every tensor everywhere.
    """
    digest = xxhash.xxh3_128()
    for file in sorted(path for pattern in _TEXT_FILES for path in folder.glob(pattern)):
        digest.update(file.name.encode() + b"\0" + xxhash.xxh3_128_digest(file.read_bytes()))
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            for piece in _pieces(stream, file):
                digest.update(piece)
    return digest.hexdigest()


def _label_names(config: Mapping[str, Any]) -> list[str]:
    id2label = config.get("id2label")
    if isinstance(id2label, dict) and id2label:
        # The places are texts in the file and numbers in a loaded configuration.
        names = {str(place): str(name) for place, name in id2label.items()}
        return [names.get(str(place), f"LABEL_{place}") for place in range(len(names))]
    num_labels = config.get("num_labels", 2)
    return [f"LABEL_{place}" for place in range(num_labels if isinstance(num_labels, int) else 2)]


def _pieces(stream: BinaryIO, file: Path) -> Iterator[bytes]:
    header, start = _header(stream, file)
    yield header
    for name, tensor in sorted(json.loads(header).items()):
        if name == "__metadata__":
            continue
        first, last = tensor["data_offsets"]
        stream.seek(start + first)
        yield stream.read(min(_END_BYTES, last - first))
        stream.seek(start + max(first, last - _END_BYTES))
        yield stream.read(min(_END_BYTES, last - first))


def _header(stream: BinaryIO, file: Path) -> tuple[bytes, int]:
    prefix = stream.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
    header = stream.read(length) if length <= MAX_HEADER_BYTES else b""
    if len(header) != length:
        raise ConfigError(f"{file} is cut off or no safetensors file: copy the model again")
    return header, 8 + length
