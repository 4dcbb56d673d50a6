"""Messages between processes: four bytes of length, then JSON; plain Python values keep their types on the way.

Nothing that arrives is executed: what is no plain value travels as a number, by which its owner finds it again.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable

# Importing typing takes longer than all of this: no sandboxed process does.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    Message: TypeAlias = dict[str, Any]
    Value: TypeAlias = Any
    """Whatever a Python program can have."""

HEADER_BYTES = 4

_SMALL = 1 << 62
_CONTAINERS = (("tuple", tuple), ("set", set), ("frozenset", frozenset))
_MAKERS = {"tuple": tuple, "set": set, "frozenset": frozenset}
# Type -> its text form and what reads it; imported only where such a value occurs.
_WRITTEN: dict[tuple[str, str], tuple[Callable[[Value], str], str]] = {
    ("decimal", "Decimal"): (str, ""),
    ("fractions", "Fraction"): (str, ""),
    ("datetime", "date"): (lambda value: value.isoformat(), "fromisoformat"),
    ("datetime", "datetime"): (lambda value: value.isoformat(), "fromisoformat"),
    ("datetime", "time"): (lambda value: value.isoformat(), "fromisoformat"),
}
_LIBRARY = ("builtins", "collections")


class TooLongError(Exception):
    """A message is longer than its reader allows."""


def pack(message: Message) -> bytes:
    """Write a message with its length before it."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def send(fd: int, message: Message) -> None:
    """Write a message into a pipe, waiting as long as it takes."""
    view = memoryview(pack(message))
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int, max_bytes: int) -> Message:
    """Read a message, waiting as long as it takes.

    Raises: EOFError: the other side is gone. TooLongError: it is longer than max_bytes.
    """
    size = int.from_bytes(_read(fd, HEADER_BYTES), "little")
    if size > max_bytes:
        raise TooLongError(f"a message of {size} bytes, at most {max_bytes} are read")
    return unpack(_read(fd, size))


def unpack(body: bytes) -> Message:
    """Read the JSON of a message.

    Raises: ValueError: it is none.
    """
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"a message is {type(message).__name__}, not an object")
    return message


def _read(fd: int, size: int) -> bytes:
    read = bytearray()
    while len(read) < size:
        if not (part := os.read(fd, min(size - len(read), 1 << 20))):
            raise EOFError("the other side of the pipe is gone")
        read += part
    return bytes(read)


def encode(value: object, refer: Callable[[object], Message]) -> object:
    """Write a value as JSON that `decode` reads.

    Args:
        value: plain values are copied, those of other types are left to refer.
        refer: gives an object of one key that stands for a value that is not plain.
    Raises: RecursionError: the value contains itself, or is too deep.
    """
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if isinstance(value, int) and kind is int:
        return value if -_SMALL < value < _SMALL else {"int": hex(value)}
    if kind is list:
        return [encode(each, refer) for each in value]  # type: ignore[attr-defined]
    if isinstance(value, (bytes, bytearray)) and kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    return _encode_container(value, kind, refer)


def _encode_container(value: Value, kind: type, refer: Callable[[object], Message]) -> object:
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, dict) and kind.__module__ in _LIBRARY:
        return {"dict": [[encode(key, refer), encode(each, refer)] for key, each in dict.items(value)]}
    for name, base in _CONTAINERS:
        if kind is base or (base is tuple and isinstance(value, tuple) and hasattr(kind, "_fields")):
            return {name: [encode(each, refer) for each in base.__iter__(value)]}
    if (written := _WRITTEN.get((kind.__module__, kind.__qualname__))) is not None:
        return {"written": [kind.__module__, kind.__qualname__, written[0](value)]}
    if (kind.__module__, kind.__qualname__) == ("collections", "deque"):
        return {"deque": [encode(each, refer) for each in value]}
    return refer(value)


def decode(value: object, find: Callable[[Message], object]) -> Value:
    """Read what `encode` wrote.

    Args:
        value: JSON.
        find: gives the value for which refer's object stands.
    Raises: ValueError, TypeError: it is not what encode writes.
    """
    if isinstance(value, list):
        return [decode(each, find) for each in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name in _MAKERS:
        return _MAKERS[name]([decode(each, find) for each in content])
    if name == "dict":
        return {decode(key, find): decode(each, find) for key, each in content}
    return _decode_rare(name, content, find)


def _decode_rare(name: str, content: Value, find: Callable[[Message], object]) -> object:
    if name == "int":
        return int(content, 16)
    if name in ("bytes", "bytearray"):
        return (bytes if name == "bytes" else bytearray).fromhex(content)
    if name == "complex":
        return complex(*content)
    if name == "deque":
        return importlib.import_module("collections").deque(decode(each, find) for each in content)
    if name == "written":
        module, kind, text = content
        reader = _WRITTEN[(module, kind)][1]
        made = getattr(importlib.import_module(module), kind)
        return (getattr(made, reader) if reader else made)(text)
    return find({name: content})
