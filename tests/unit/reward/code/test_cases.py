"""Reading the tests of a row: what cannot be used is an error before anything runs."""

from __future__ import annotations

import json

import pytest
from shoal_reward.code.cases import CallCase, ProgramCase, ScriptCase, cases_of
from shoal_reward.code.settings import CodeSettings

from shoal.errors import DataError

SETTINGS = CodeSettings()
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n"


def test_programs_calls_and_scripts_are_told_apart() -> None:
    assert cases_of({"tests": [{"input": "1", "output": "2"}]}, SETTINGS) == [ProgramCase(input="1", output="2")]
    call = {"function": "Solution.f", "args": [1], "output": None}
    assert cases_of({"tests": [call]}, SETTINGS) == [CallCase(function="Solution.f", args=[1], kwargs={}, output=None)]
    assert cases_of({"tests": "assert f(1) == 2"}, SETTINGS) == [ScriptCase(source="\nassert f(1) == 2", entry_point=None)]


def test_lists_may_come_as_json() -> None:
    tests = [{"input": "1", "output": "2"}, {"input": "", "output": ""}]
    assert cases_of({"tests": json.dumps(tests)}, SETTINGS) == cases_of({"tests": tests}, SETTINGS)


def test_a_script_that_starts_with_a_bracket_is_a_script() -> None:
    assert isinstance(cases_of({"tests": "[f(x) for x in (1, 2)]"}, SETTINGS)[0], ScriptCase)


def test_setup_comes_before_each_script() -> None:
    (case,) = cases_of({"tests": ["assert f(ONE)"], "test_setup": "ONE = 1"}, SETTINGS)
    assert isinstance(case, ScriptCase)
    assert case.source == "ONE = 1\nassert f(ONE)"


def test_a_check_is_called_with_the_entry_point() -> None:
    (case,) = cases_of({"tests": CHECK, "entry_point": "f"}, SETTINGS)
    assert isinstance(case, ScriptCase)
    assert case.source.endswith("\ncheck(f)\n")
    (called,) = cases_of({"tests": CHECK + "check(f)", "entry_point": "f"}, SETTINGS)
    assert isinstance(called, ScriptCase)
    assert called.source.count("check(f)") == 1


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, "no tests"),
        ({"tests": []}, "no tests"),
        ({"tests": None}, "no tests"),
        ({"tests": {"input": "", "output": ""}}, "no tests"),
        ({"tests": [1]}, r"tests\[0\] is int"),
        ({"tests": ["assert f(1) =="]}, "no Python code"),
        ({"tests": ["assert f(1)\0"]}, "no Python code"),
        ({"tests": ["return 1"]}, "no Python code"),
        ({"tests": "(" * 5000}, "no Python code"),
        ({"tests": ["assert f(1)", {"input": "", "output": ""}]}, "mixes"),
        ({"tests": [{"input": "1"}]}, "fields"),
        ({"tests": [{"input": 1, "output": "2"}]}, "no text"),
        ({"tests": [{"function": "f(", "output": 1}]}, "give a name"),
        ({"tests": [{"function": "f", "args": [1]}]}, "output"),
        ({"tests": [{"function": "f", "args": 1, "output": 1}]}, "give a list"),
        ({"tests": [{"function": "f", "kwargs": {}, "expected": 1, "output": 1}]}, "expected"),
        ({"tests": ""}, "tests nothing"),
        ({"tests": ["# assert f(1)"]}, "tests nothing"),
        ({"tests": "import math\ndef test_f():\n    assert f(1)\n"}, "tests nothing"),
        ({"tests": CHECK}, "'entry_point'"),
        ({"tests": "assert f(1)", "entry_point": "f()"}, "name of a function"),
        ({"tests": "assert f(1)", "test_setup": ["x"]}, "test_setup"),
        ({"tests": "assert f(1)", "test_setup": "x ="}, "no Python code"),
    ],
)
def test_tests_that_cannot_be_used_are_an_error(row: dict[str, object], told: str) -> None:
    with pytest.raises(DataError, match=told):
        cases_of(row, SETTINGS)
