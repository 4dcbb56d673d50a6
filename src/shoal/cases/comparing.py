"""Found against expected values, number by number."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from shoal.cases.document import Tolerance
from shoal.cases.inputs import to_number
from shoal.errors import DataError


@dataclass(frozen=True, slots=True)
class Claim:
    """A found value whose expected side is a sentence: `check` returns None where the sentence holds, else what is so instead.

    check raises DataError for a sentence that it does not know.
    """

    check: Callable[[str], str | None]


def step_claim(*, is_skipped: bool) -> Claim:
    """What an optimizer does with a step: the sentence begins with `skipped` or `applied`."""
    words = {"skipped": True, "applied": False}

    def check(sentence: str) -> str | None:
        first = re.split(r"[^a-z]", sentence.strip().lower(), maxsplit=1)[0]
        if first not in words:
            raise DataError(f"{sentence!r} is no known sentence; it must begin with {' or '.join(words)}")
        return None if words[first] == is_skipped else ("skipped" if is_skipped else "applied")

    return Claim(check)


@dataclass(frozen=True, slots=True)
class Each:
    """Several found values, by name, that must all equal the expected one."""

    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ByKey:
    """A found value for each key that is expected."""

    compute: Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What differs: where, the expected and the found value, both as text or numbers."""

    path: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.path} is {self.expected!r}, found {self.found!r}"


def differences(found: object, expected: object, tolerance: Tolerance, path: str) -> Iterator[Difference]:
    """Yield every difference.

    Args:
        found: number, tensor, nested lists, mapping, or one of the classes above.
        expected: as the file holds it.
        path: name of the expected key.
    Raises: DataError: the expected value is something that cannot be compared.
    """
    if isinstance(found, Claim):
        yield from _claimed(found, expected, path)
    elif isinstance(found, Each):
        for name, value in found.values.items():
            yield from differences(value, expected, tolerance, f"{path} ({name})")
    elif isinstance(found, ByKey | dict):
        yield from _by_key(found, expected, tolerance, path)
    elif isinstance(found, Tensor):
        yield from differences(found.tolist(), expected, tolerance, path)
    elif isinstance(found, list) or isinstance(expected, list):
        yield from _listed(found, expected, tolerance, path)
    elif isinstance(found, bool):
        # A mask may be given as true and false, or as 1 and 0.
        if found != (expected if isinstance(expected, bool) else to_number(expected, path)):
            yield Difference(path=path, expected=expected, found=found)
    elif not is_close(to_number(found, path), to_number(expected, path), tolerance):
        yield Difference(path=path, expected=expected, found=found)


def is_close(found: float, expected: float, tolerance: Tolerance) -> bool:
    """Whether a number is right; NaN equals NaN, and an infinity only itself."""
    if math.isnan(expected) or math.isinf(expected):
        return found == expected or (math.isnan(found) and math.isnan(expected))
    return abs(found - expected) <= tolerance.atol + tolerance.rtol * abs(expected)


def _claimed(found: Claim, expected: object, path: str) -> Iterator[Difference]:
    if not isinstance(expected, str):
        raise DataError(f"{path} is {expected!r}; it must be a sentence")
    instead = found.check(expected)
    if instead is not None:
        yield Difference(path=path, expected=expected, found=instead)


def _by_key(found: ByKey | dict[str, object], expected: object, tolerance: Tolerance, path: str) -> Iterator[Difference]:
    if not isinstance(expected, dict) or not expected:
        raise DataError(f"{path} is {expected!r}; it must be an object with at least one key")
    for key, value in expected.items():
        if isinstance(found, dict) and key not in found:
            raise DataError(f"{path}: key {key!r} is unknown; known are {', '.join(found)}")
        own = found.compute(key) if isinstance(found, ByKey) else found[key]
        yield from differences(own, value, tolerance, f"{path}.{key}")


def _listed(found: object, expected: object, tolerance: Tolerance, path: str) -> Iterator[Difference]:
    if not isinstance(found, list) or not isinstance(expected, list) or len(found) != len(expected):
        yield Difference(path=path, expected=expected, found=found)
        return
    for number, (own, value) in enumerate(zip(found, expected, strict=True)):
        yield from differences(own, value, tolerance, f"{path}[{number}]")
