"""What an answer gave beside what was expected: JSON and texts, never objects with an `__eq__` of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping

_DECIMAL_MARKS = (".", "e", "E")


def values_agree(given: object, expected: object, relative_tolerance: float) -> bool:
    """Compare an encoded value with a JSON value: a tuple counts as a list, keys that are no text by their JSON text.

    The value of the answer is not decoded: its hashes, or a fraction to reduce, could keep the grader busy past every limit.

    Args:
        given: of the answer, as `wire.encode` writes it. expected: of the row.
        relative_tolerance: of numbers where the expected one is a float.
    """
    if isinstance(given, dict):
        return _tagged_agrees(given, expected, relative_tolerance)
    if isinstance(given, list):
        return (
            isinstance(expected, (list, tuple))
            and len(given) == len(expected)
            and all(values_agree(a, b, relative_tolerance) for a, b in zip(given, expected, strict=True))
        )
    if isinstance(expected, float) and isinstance(given, (int, float)):
        return _is_close(given, expected, relative_tolerance)
    return bool(given == expected)


def _tagged_agrees(given: Mapping[str, object], expected: object, relative_tolerance: float) -> bool:
    tag, content = next(iter(given.items()), ("", None))
    if tag == "tuple" and isinstance(content, list):
        return values_agree(content, expected, relative_tolerance)
    if tag == "int" and isinstance(content, str):
        return values_agree(int(content, 16), expected, relative_tolerance)
    if tag != "dict" or not isinstance(content, list) or not isinstance(expected, Mapping):
        return False
    named = {_key(key): value for key, value in content}
    wanted = {_key(key): value for key, value in expected.items()}
    return (
        len(named) == len(content)
        and named.keys() == wanted.keys()
        and all(values_agree(named[key], wanted[key], relative_tolerance) for key in wanted)
    )


def outputs_agree(given: str, expected: str, relative_tolerance: float) -> bool:
    """Compare printed texts: blanks at the ends of lines and empty lines at the end do not count.

    Args:
        given: of the answer. expected: of the row.
        relative_tolerance: of words that are numbers, where the expected one has a decimal point or an exponent.
    """
    ours, theirs = _lines(given), _lines(expected)
    return len(ours) == len(theirs) and all(a == b or _words_agree(a, b, relative_tolerance) for a, b in zip(ours, theirs, strict=True))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _words_agree(given: str, expected: str, relative_tolerance: float) -> bool:
    ours, theirs = given.split(), expected.split()
    return len(ours) == len(theirs) and all(a == b or _numbers_agree(a, b, relative_tolerance) for a, b in zip(ours, theirs, strict=True))


def _numbers_agree(given: str, expected: str, relative_tolerance: float) -> bool:
    if not any(mark in expected for mark in _DECIMAL_MARKS):
        return False
    try:
        return _is_close(float(given), float(expected), relative_tolerance)
    except ValueError:
        return False


def _is_close(given: float, expected: float, relative_tolerance: float) -> bool:
    try:
        return bool(given == expected) or math.isclose(given, expected, rel_tol=relative_tolerance)
    except OverflowError:
        return False


def _key(key: object) -> str:
    if isinstance(key, Mapping):
        return str(int(key["int"], 16))
    if isinstance(key, bool):
        return "true" if key else "false"
    return "null" if key is None else str(key)
