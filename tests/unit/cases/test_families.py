"""Every family on random inputs against NumPy, and every expected key with a wrong value."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shoal.cases.document import DEFAULT_TOLERANCES, Case
from shoal.cases.families import FAMILIES
from shoal.cases.running import run_case
from tests.helpers.case_makers import MAKERS
from tests.helpers.case_numbers import encoded
from tests.helpers.math_cases import read_json

NUM_CASES = 20
_MAKERS = [(family, maker) for family, makers in MAKERS.items() for maker in makers]
_IDS = [maker.__name__ for _, maker in _MAKERS]
_FAR_OFF = {"abs(advantage) <= 10 for every sample": "abs(advantage) <= -1 for every sample", "applied": "skipped"}


def problems(family: str, inputs: object, expected: object, **fields: object) -> tuple[str, ...]:
    """Run a case as a file would hold it."""
    case = {"id": "X-1", "family": family, "inputs": inputs, "expected": expected} | fields
    return run_case(Case(case_id="X-1", fields=json.loads(json.dumps(case))), DEFAULT_TOLERANCES).problems


def made(family: str, number: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for maker in MAKERS[family]:
        inputs, expected = maker(np.random.default_rng(number))
        yield encoded(inputs), encoded(expected)


@pytest.mark.parametrize(("family", "maker"), _MAKERS, ids=_IDS)
def test_family_finds_what_numpy_finds(family: str, maker: Any) -> None:  # noqa: ANN401 - one of the table
    for number in range(NUM_CASES):
        inputs, expected = maker(np.random.default_rng(number))
        assert problems(family, encoded(inputs), encoded(expected)) == (), f"seed {number}"


@pytest.mark.parametrize(("family", "maker"), _MAKERS, ids=_IDS)
def test_family_in_float32_is_within_its_tolerance(family: str, maker: Any) -> None:  # noqa: ANN401 - as above
    for number in range(NUM_CASES):
        inputs, expected = maker(np.random.default_rng(number))
        tolerance = {"rtol": 2e-5, "atol": 1e-5}
        assert problems(family, encoded(inputs) | {"dtype": "float32"}, encoded(expected), tolerance=tolerance) == (), f"seed {number}"


@pytest.mark.parametrize("family", MAKERS)
def test_every_expected_key_with_a_wrong_value_fails(family: str) -> None:
    tried: set[str] = set()
    for number in range(8):
        for inputs, expected in made(family, number):
            for key, value in expected.items():
                wrong = _perturbed(value, np.random.default_rng(number))
                if wrong is None:
                    continue
                tried.add(key)
                found = problems(family, inputs, expected | {key: wrong})
                assert len(found) == 1, (key, found)
                assert found[0].startswith(f"expected.{key}"), found
    given = {key for case in read_json("math-cases.json")["cases"] if case["family"] == family for key in case["expected"]}
    # An empty batch has no other gradient: `test_sentence_about_gradients_is_really_checked`.
    assert given - {"gradients"} <= tried


def test_makers_cover_every_family_and_every_key_of_the_given_file() -> None:
    assert list(MAKERS) == list(FAMILIES)
    for case in read_json("math-cases.json")["cases"]:
        makes = [pair for number in range(20) for pair in made(case["family"], number)]
        inputs, expected = ({key for pair in makes for key in pair[side]} for side in (0, 1))
        assert set(case["inputs"]) - {"dtype"} <= inputs, case["id"]
        assert set(case["expected"]) <= expected, case["id"]


def _perturbed(value: object, rng: np.random.Generator) -> object:
    """The value with one number moved, or the sentence turned round; None where there is nothing to change."""
    if isinstance(value, str):
        first = value.partition(",")[0]
        return {"all exactly 0": None, "skipped": "applied"}.get(first, _FAR_OFF.get(value))
    holder = [copy.deepcopy(value)]
    places = list(_numbers(holder))
    if not places:
        return None
    container, key = places[int(rng.integers(len(places)))]
    number = container[key]
    container[key] = number + 1e-3 * (1 + abs(number))
    return holder[0]


def _numbers(container: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - nested lists and objects
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        if isinstance(value, dict | list):
            yield from _numbers(value)
        elif not isinstance(value, str):
            yield container, key
