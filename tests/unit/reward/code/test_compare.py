"""Comparing what an answer gave with what was expected."""

from __future__ import annotations

import pytest
from shoal_reward.code.compare import outputs_agree, values_agree
from shoal_reward.code.inside.wire import encode

NAN, INFINITY = float("nan"), float("inf")


class AlwaysEqual:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("given", "expected", "agree"),
    [
        ((1, [2, (3,)]), [1, [2, [3]]], True),
        (1 << 100, 1 << 100, True),
        ({1 << 100: 1}, {str(1 << 100): 1}, True),
        ([1, 2], [1, 2, 3], False),
        ({True: "c"}, {"true": "c"}, True),
        ({1: "a", None: "b"}, {"1": "a", "null": "b"}, True),
        ({1: "a", "1": "b"}, {"1": "a"}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        (3.0, 3, True),
        (10**9 + 1, 10**9, False),
        (1e300 * 10, 1e301, True),
        (10**400, 1.5, False),
        (NAN, NAN, False),
        (INFINITY, INFINITY, True),
        (1.0, 1.001, False),
        (True, True, True),
        (None, None, True),
        (None, 0, False),
        ("1", 1, False),
        (b"a", "a", False),
        ({1, 2}, [1, 2], False),
        (AlwaysEqual(), 1, False),
        ([AlwaysEqual()], [1], False),
        (AlwaysEqual(), 1.5, False),
    ],
)
def test_values(given: object, expected: object, agree: bool) -> None:
    assert values_agree(encode(given, lambda value: {"handle": 0}), expected, 1e-9) is agree


@pytest.mark.parametrize("forged", [{}, {"handle": 0}, {"written": ["decimal", "Decimal", "1"]}, {"dict": 1}, {"tuple": 1}, {"set": [1]}])
@pytest.mark.parametrize("expected", [1, [1], {}, None, [], {"handle": 0}])
def test_what_no_value_is_written_as_agrees_with_nothing(forged: object, expected: object) -> None:
    assert not values_agree(forged, expected, 1e-9)


@pytest.mark.parametrize(
    ("given", "expected", "agree"),
    [
        ("1\n2\n", "1\n2", True),
        ("1  \r\n2\n\n\n", "1\n2", True),
        ("\n1", "1", False),
        ("1 2", "1\n2", False),
        ("0.30000000000000004", "0.3", True),
        ("x = 0.30000000000000004", "x = 0.3", True),
        ("1000000001", "1000000000", False),
        ("1.0", "1", False),
        ("1", "1.0", True),
        ("nan", "nan.", False),
        ("0.31", "0.3", False),
        ("hello", "Hello", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_outputs(given: str, expected: str, agree: bool) -> None:
    assert outputs_agree(given, expected, 1e-9) is agree


def test_no_tolerance_asks_for_equality() -> None:
    assert not values_agree(0.1 + 0.2, 0.3, 0.0)
    assert not outputs_agree("0.30000000000000004", "0.3", 0.0)
