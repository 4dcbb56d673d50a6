"""The scorers that ship with the service."""

from __future__ import annotations

import pytest
from shoal_reward.builtin import arithmetic, exact, extract_answer, reasoning_gym

from shoal.errors import DataError


@pytest.mark.parametrize(("response", "expected"), [("46", 1.0), (" 46\n", 1.0), ("47", 0.0), ("", 0.0), ("046", 0.0), ("46 46", 0.0)])
def test_arithmetic_compares_the_stripped_response(response: str, expected: float) -> None:
    assert arithmetic("12+34=", response, {"answer": "46"}) == expected


@pytest.mark.parametrize(("response", "expected"), [("46", 1.0), (" 46", 0.0)])
def test_exact_compares_every_character(response: str, expected: float) -> None:
    assert exact("", response, {"answer": "46"}) == expected


@pytest.mark.parametrize("row", [{}, {"answer": 46}, {"answer": None}])
def test_arithmetic_without_a_text_answer_is_an_error(row: dict[str, object]) -> None:
    with pytest.raises(DataError, match="'answer'"):
        arithmetic("", "46", row)


def test_reasoning_gym_uses_the_data_sets_own_scorer() -> None:
    entry = {"question": "4 + 1 =", "answer": "5", "metadata": {}}
    row: dict[str, object] = {"dataset": "chain_sum", "entry": entry}
    assert reasoning_gym("", "5", row) == 1.0
    assert reasoning_gym("", "I think <answer> 5 </answer>", row) == 1.0
    assert 0.0 < reasoning_gym("", "The answer is 5", row) < 0.5
    assert reasoning_gym("", "6", row) == 0.0


def test_reasoning_gym_names_what_the_row_lacks() -> None:
    with pytest.raises(DataError, match="'entry'"):
        reasoning_gym("", "5", {"dataset": "chain_sum"})
    with pytest.raises(DataError, match="'dataset'"):
        reasoning_gym("", "5", {"entry": {}})
    with pytest.raises(ValueError, match="no_such_task"):
        reasoning_gym("", "5", {"dataset": "no_such_task", "entry": {}})


def test_extract_answer_takes_the_first_tag_else_all() -> None:
    assert extract_answer("<answer>1</answer><answer>2</answer>") == "1"
    assert extract_answer(" 5\n") == "5"
