"""Numbers, lists and texts side by side."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.cases.comparing import Claim, Each, differences, is_close
from shoal.cases.document import Tolerance
from shoal.cases.losses import exact_log
from shoal.errors import DataError

TOLERANCE = Tolerance(rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("found", "expected", "close"),
    [
        (1.0009, 1.0, True),
        (1.0012, 1.0, False),
        (1e-6, 0.0, True),
        (2e-6, 0.0, False),
        (math.nan, math.nan, True),
        (math.nan, 0.0, False),
        (0.0, math.nan, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (math.inf, 1.0, False),
        (1e300, math.inf, False),
    ],
)
def test_is_close_within_both_tolerances(found: float, expected: float, close: bool) -> None:
    assert is_close(found, expected, TOLERANCE) is close


def paths(found: object, expected: object) -> list[str]:
    return [difference.path for difference in differences(found, expected, TOLERANCE, "x")]


def test_differences_name_the_place() -> None:
    assert paths(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [[1, 2], [3, 5]]) == ["x[1][1]"]
    assert paths(torch.tensor([True, False]), [1, 0]) == []
    assert paths([[1.0], [2.0, 3.0]], [[1.0], [2.0, "nan"]]) == ["x[1][1]"]
    assert paths({"a": 1.0, "b": [2.0]}, {"b": [3.0]}) == ["x.b[0]"]
    assert paths(Each({"one": 1.0, "two": 2.0}), 1.0) == ["x (two)"]


def test_differences_of_shape_are_differences() -> None:
    assert paths([1.0], 1.0) == ["x"]
    assert paths(1.0, [1.0]) == ["x"]
    assert paths([1.0, 2.0], [1.0]) == ["x"]
    assert paths(torch.zeros(2, 0), []) == ["x"]
    assert paths([], []) == []


@pytest.mark.parametrize(
    ("found", "expected"), [(1.0, None), (1.0, "one"), ({"a": 1.0}, {}), ({"a": 1.0}, 1.0), (Claim(lambda _: None), 1.0)]
)
def test_expectation_that_cannot_be_compared_is_an_error(found: object, expected: object) -> None:
    with pytest.raises(DataError):
        paths(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_log_gives_back_the_ratio_of_a_clip_border(dtype: torch.dtype) -> None:
    borders = torch.tensor([0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.28, 1.5], dtype=dtype)
    assert torch.equal(exact_log(borders).exp(), borders)
    assert exact_log(torch.tensor([torch.nan, 2.0], dtype=dtype)).isnan().tolist() == [True, False]
