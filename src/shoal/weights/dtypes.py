"""Sizes of the dtypes that a push carries, and which it converts."""

from __future__ import annotations

from shoal.errors import TransportError

FLOATING_ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
"""Any of these is cast to any other while it is written."""
INTEGER_ITEM_BYTES = {"int32": 4, "int64": 8, "uint8": 1, "bool": 1}
"""These are copied as they are."""
ITEM_BYTES = FLOATING_ITEM_BYTES | INTEGER_ITEM_BYTES


def item_bytes(dtype: str, name: str) -> int:
    """Bytes of one element.

    Raises: TransportError: a dtype that a push cannot carry; names the tensor.
    """
    if dtype not in ITEM_BYTES:
        msg = f"{name} has dtype {dtype!r}; a push carries {', '.join(ITEM_BYTES)}"
        raise TransportError(msg)
    return ITEM_BYTES[dtype]


def is_castable(source: str, target: str) -> bool:
    """Whether a push may write elements of one dtype as another."""
    return source == target or (source in FLOATING_ITEM_BYTES and target in FLOATING_ITEM_BYTES)
