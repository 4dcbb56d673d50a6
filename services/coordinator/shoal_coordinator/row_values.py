"""What a row may hold: what JSON can carry to a scorer. Dates, decimals and missing numbers of tables are converted.

| in the file | in the row |
|---|---|
| text, integers, booleans, finite numbers, null, lists, objects (structs, maps) | the same |
| NaN | null: it is how tables mark a missing number |
| date, time, timestamp | ISO 8601 text |
| decimal | its digits as text, so that nothing is rounded |
| bytes, durations, infinite numbers, text that is no Unicode, anything else | refused |
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Mapping

from shoal.errors import DataError


def plain_row(row: Mapping[str, object]) -> dict[str, object]:
    """Convert the columns of a row.

    Raises: DataError: names the column and what it holds.
    """
    plain: dict[str, object] = {}
    for column, value in row.items():
        try:
            plain[_text(column)] = plain_value(value)
        except DataError as error:
            raise DataError(f"column {column!r} holds {error}: remove the column or convert it") from error
    return plain


def plain_value(value: object) -> object:
    """Convert one value; see the table above.

    Raises: DataError: says what it is.
    """
    convert = _CONVERSIONS.get(type(value))
    if convert is not None:
        return convert(value)
    # Subclasses, such as the timestamps of pandas.
    for kind, convert in _CONVERSIONS.items():
        if isinstance(value, kind):
            return convert(value)
    raise DataError(f"a value of type {type(value).__name__}, which JSON cannot carry to a scorer")


def _same(value: object) -> object:
    return value


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"text with a lone surrogate at character {error.start}") from error
    return value


def _number(value: float) -> float | None:
    if math.isinf(value):
        raise DataError(f"the number {value}")
    return None if math.isnan(value) else value


def _list(value: list[object]) -> list[object]:
    return [plain_value(item) for item in value]


def _object(value: dict[object, object]) -> dict[str, object]:
    for key in value:
        if not isinstance(key, str):
            raise DataError(f"an object with a key of type {type(key).__name__}")
    return {_text(str(key)): plain_value(item) for key, item in value.items()}


def _iso(value: datetime.date | datetime.time) -> str:
    return value.isoformat()


def _digits(value: decimal.Decimal) -> str:
    return format(value, "f")


_CONVERSIONS: dict[type, Callable[..., object]] = {
    type(None): _same,
    bool: _same,
    str: _text,
    int: _same,
    float: _number,
    list: _list,
    tuple: _list,
    dict: _object,
    datetime.datetime: _iso,
    datetime.date: _iso,
    datetime.time: _iso,
    decimal.Decimal: _digits,
}
