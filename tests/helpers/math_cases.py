"""Numeric cases with inputs and expected values, read from tests/cases."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FOLDER = Path(__file__).parents[1] / "cases"
_SPECIAL = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@cache
def read_json(name: str) -> dict[str, Any]:
    """Return the parsed file; the strings nan, inf and -inf stand for numbers wherever a number is expected."""
    content: dict[str, Any] = json.loads((_FOLDER / name).read_text())
    return content


def math_cases(family: str) -> list[dict[str, Any]]:
    """Return the cases of a family, at least one."""
    cases = [case for case in read_json("math-cases.json")["cases"] if case["family"] == family]
    if not cases:
        raise LookupError(f"no case of family {family!r}")
    return cases


def math_case(case_id: str) -> dict[str, Any]:
    """Return one case by id."""
    return next(case for case in read_json("math-cases.json")["cases"] if case["id"] == case_id)


def numbers(value: object, dtype: torch.dtype = torch.float64) -> Tensor:
    """Nested lists of numbers and nan/inf strings as a tensor."""
    return torch.tensor(_decoded(value), dtype=dtype)


def mask_of(value: list[Any]) -> Tensor:
    """Nested lists of 0 and 1 as a bool tensor."""
    return torch.tensor(value, dtype=torch.bool)


def assert_close(actual: Tensor, expected: object, *, rtol: float = 1e-9, atol: float = 1e-12, equal_nan: bool = False) -> None:
    """Compare with the case file's float64 tolerance."""
    torch.testing.assert_close(actual, numbers(expected, actual.dtype), rtol=rtol, atol=atol, equal_nan=equal_nan)


def _decoded(value: object) -> object:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return _SPECIAL[value] if isinstance(value, str) else value
