"""The scorers that ship with the service."""

from __future__ import annotations

import subprocess
import sys

import pytest
from shoal_reward.builtin import VERIFIERS, arithmetic, exact, reasoning_gym
from shoal_reward.kinds import find_kind

from shoal.errors import DataError
from shoal.reward import REGISTRY, Row

ROW_OF_FIVE: Row = {
    "answer": "5",
    "pattern": "^5$",
    "json_schema": {"const": 5},
    "dataset": "chain_sum",
    "entry": {"question": "4 + 1 =", "answer": "5", "metadata": {}},
}
NAMES_THAT_JUDGE_ANSWERS = ("arithmetic", "exact", "math", "choice", "regex", "json_schema", "reasoning_gym")


@pytest.mark.parametrize(
    ("response", "expected"),
    [("46", 1.0), (" 46\n", 1.0), (r"\boxed{46}", 1.0), ("47", 0.0), ("", 0.0), ("046", 0.0), ("46 46", 0.0), (r"\boxed{46", 0.0)],
)
def test_arithmetic_compares_the_stripped_response(response: str, expected: float) -> None:
    assert arithmetic("12+34=", response, {"answer": "46"}) == expected


@pytest.mark.parametrize(("response", "expected"), [("46", 1.0), (r"\boxed{46}", 1.0), (" 46", 0.0), (r"\boxed{4 6}", 0.0)])
def test_exact_compares_every_character(response: str, expected: float) -> None:
    assert exact("", response, {"answer": "46"}) == expected


@pytest.mark.parametrize("score", [arithmetic, exact])
def test_no_box_is_no_empty_answer(score: object) -> None:
    assert callable(score)
    assert score("", "no box", {"answer": ""}) == 0.0
    assert score("", "", {"answer": ""}) == 1.0


@pytest.mark.parametrize("row", [{}, {"answer": 46}, {"answer": None}])
def test_arithmetic_without_a_text_answer_is_an_error(row: Row) -> None:
    with pytest.raises(DataError, match="'answer'"):
        arithmetic("", "46", row)


def test_reasoning_gym_uses_the_data_sets_own_scorer() -> None:
    assert reasoning_gym("", "5", ROW_OF_FIVE) == 1.0
    assert reasoning_gym("", "I think <answer> 5 </answer>", ROW_OF_FIVE) == 1.0
    partly = reasoning_gym("", "The answer is 5", ROW_OF_FIVE)
    assert isinstance(partly, float)
    assert 0.0 < partly < 0.5
    assert reasoning_gym("", "6", ROW_OF_FIVE) == 0.0


def test_reasoning_gym_names_what_the_row_lacks() -> None:
    with pytest.raises(DataError, match="'entry'"):
        reasoning_gym("", "5", {"dataset": "chain_sum"})
    with pytest.raises(DataError, match="'dataset'"):
        reasoning_gym("", "5", {"entry": {}})
    with pytest.raises(ValueError, match="no_such_task"):
        reasoning_gym("", "5", {"dataset": "no_such_task", "entry": {}})


@pytest.mark.parametrize("response", ["5", r"\boxed{5}", r"\boxed{ 5 }", r"\boxed{\text{5}}"])
@pytest.mark.parametrize("name", NAMES_THAT_JUDGE_ANSWERS)
def test_a_boxed_five_is_a_five_under_every_name(name: str, response: str) -> None:
    score = REGISTRY.get(name).function("", response, ROW_OF_FIVE)
    assert (sum(score.values()) if isinstance(score, dict) else score) == 1.0


@pytest.mark.parametrize("name", NAMES_THAT_JUDGE_ANSWERS)
def test_a_boxed_six_is_no_five_under_any_name(name: str) -> None:
    score = REGISTRY.get(name).function("", r"5, no: \boxed{6}", ROW_OF_FIVE)
    assert (sum(score.values()) if isinstance(score, dict) else score) == 0.0


def test_every_rule_kind_is_a_scorer_by_its_own_name() -> None:
    assert {"arithmetic", "exact", *VERIFIERS} <= {scorer.name for scorer in REGISTRY.all()}
    for name in VERIFIERS:
        scorer = REGISTRY.get(name)
        assert scorer.version == "1"
        assert scorer.fingerprint
        assert scorer.description == find_kind(name, name).description


def test_importing_the_scorers_imports_no_heavy_library() -> None:
    heavy = ("sympy", "math_verify", "latex2sympy2_extended", "jsonschema", "reasoning_gym", "torch")
    code = f"import sys, shoal_reward.builtin; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "library"), [("math", "math_verify"), ("json_schema", "jsonschema"), ("reasoning_gym", "reasoning_gym")])
def test_getting_ready_imports_what_a_sample_needs(name: str, library: str) -> None:
    code = f"""
import sys
from shoal_reward.builtin import REGISTRY
scorer = REGISTRY.get({name!r})
scorer.prepare()
print({library!r} in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True"
