"""What makes a case fail, and what the line says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.cases.document import CASE_KEYS, DEFAULT_TOLERANCES, Case
from shoal.cases.families import FAMILIES
from shoal.cases.running import run_case
from tests.helpers.math_cases import math_case


def run(case: dict[str, Any]) -> tuple[str, ...]:
    return run_case(Case(case_id=case["id"], fields=case), DEFAULT_TOLERANCES).problems


def changed(case_id: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A given case with some keys of its inputs and expectations replaced; None drops a key."""
    case: dict[str, Any] = json.loads(json.dumps(math_case(case_id)))
    for section, values in sections.items():
        case[section] = {key: value for key, value in (case[section] | values).items() if value is not None}
    return case


def problem(case_id: str, **sections: dict[str, Any]) -> str:
    (line,) = run(changed(case_id, **sections))
    return line


def test_unknown_family_names_the_known_ones() -> None:
    line = run(math_case("M-GAE-01") | {"family": "gea"})[0]
    assert line.startswith("family 'gea' is unknown; known are gae, token_rewards")
    assert all(name in line for name in FAMILIES)


@pytest.mark.parametrize("section", ["inputs", "expected"])
@pytest.mark.parametrize("case_id", ["M-GAE-01", "M-WHI-01", "M-WHI-02", "M-KL-01", "M-KL-03", "M-AGG-01", "M-LRS-01", "M-ENT-01"])
def test_unknown_key_fails_by_name(case_id: str, section: str) -> None:
    assert f"{section.removesuffix('s')} key 'surprise' is unknown; known are " in problem(case_id, **{section: {"surprise": 1.0}})


@pytest.mark.parametrize(
    ("case_id", "inputs", "message"),
    [
        ("M-AGG-01", {"ranks": [[{"loss": [[1]], "mask": [[1]], "weight": 1}]]}, "inputs.ranks[0][0]: input key 'weight' is unknown"),
        ("M-KL-05", {"steps": [{"current": 1}]}, "inputs.steps[0]: input key 'n' is missing"),
        ("M-STA-01", {"states": [{"running": 1}]}, "inputs.states[0]: input key 'max_concurrent' is missing"),
        ("M-GAE-01", {"rewards": None}, "input key 'rewards' is missing"),
        ("M-GAE-01", {"dtype": "float63"}, "inputs.dtype is 'float63'; use one of float64, float32"),
        ("M-GAE-01", {"dtype": "float16"}, "there is no tolerance for float16; give the case one"),
    ],
)
def test_input_that_cannot_be_used_fails_by_name(case_id: str, inputs: dict[str, Any], message: str) -> None:
    assert any(message in line for line in run(changed(case_id, inputs=inputs)))


@pytest.mark.parametrize(
    ("case_id", "inputs", "message"),
    [
        ("M-GAE-01", {"mask": [[1, 1, 1]]}, "tensor of shape (1, 4) does not fit mask of shape (1, 3)"),
        ("M-GAE-01", {"rewards": [[1, 0], [1]]}, "inputs.rewards is ragged"),
        ("M-GAE-01", {"rewards": [[1, 0, 0, "none"]]}, "inputs.rewards[0][3] is 'none'; it must be a number, 'nan', 'inf' or '-inf'"),
        ("M-GAE-01", {"mask": [[1, 1, 2, 1]]}, "inputs.mask holds other numbers than 0 and 1"),
        ("M-GAE-01", {"ended": ["finished"]}, "inputs.ended is ['finished']; it must be 'terminated' or 'truncated'"),
        ("M-GAE-03", {"bootstrap_value": [0.6, 0.1]}, "inputs.bootstrap_value has shape [2]; it needs one number for each of the 1 rows"),
        ("M-REW-01", {"response_length": [3, 6]}, "it needs one length in [0, 5] for each of 2 rows"),
        ("M-REW-01", {"score": [1.0]}, "inputs.score has shape [1]"),
        ("M-PPO-01", {"log_ratio": [0.0]}, "inputs must hold either ratio or log_ratio"),
        ("M-TIS-01", {"low": 0.5, "high": 2.0}, "inputs must hold either cap, or low and high"),
        ("M-TIS-02", {"high": None}, "inputs.high is missing"),
        ("M-GRP-01", {"uid": ["a"]}, "inputs.rewards has shape [4]; it needs one number for each of the 1 rows"),
        ("M-TMP-01", {"token": 3}, "inputs.token is 3; it needs an id in [0, 3) for logits of shape [3]"),
        ("M-TMP-01", {"token": [1, 2]}, "inputs.token is [1, 2]; it needs an id in [0, 3) for logits of shape [3]"),
        ("M-TMP-01", {"temperature": 0}, "ValueError: temperature is 0.0"),
        ("M-AGG-01", {"norm_length": None}, "norm_length is None"),
        ("M-LRS-01", {"checkpoint_after_updates": None}, "inputs.checkpoint_after_updates is missing"),
    ],
)
def test_value_that_cannot_be_used_fails_by_name(case_id: str, inputs: dict[str, Any], message: str) -> None:
    assert any(message in line for line in run(changed(case_id, inputs=inputs)))


@pytest.mark.parametrize(
    ("case_id", "expected", "message"),
    [
        ("M-AGG-01", {"token_mean": 1.6}, "expected.token_mean is 1.6, found 1.5; this is the known fault mean_of_rank_token_means"),
        ("M-GAE-01", {"returns": [[0.0, 0.9269999999999999, 0.96, 2.0]]}, "expected.returns[0][0] is 0.0, found 0.90065 (and 1 more"),
        ("M-GAE-01", {"returns": [[1.0]]}, "expected.returns[0] is [1.0], found [0.90065"),
        ("M-GAE-03", {"bootstrap_on_truncation_true": {"advantage": []}}, "key 'advantage' is unknown; known are advantages, returns"),
        ("M-KL-01", {"k1": ["nan", -0.4, 0.0, 3.99]}, "expected.k1[0] is 'nan', found 0.19"),
        ("M-LRS-01", {"lr_used_for_update_index": {"2": 0.1}}, "expected.lr_used_for_update_index.2 is 0.1, found 0.0005"),
        ("M-LRS-01", {"lr_used_for_update_index": {"two": 0.1}}, "update index 'two' is not a whole number"),
        ("M-GRP-02", {"any_ddof": [0.0] * 8 + [1.0]}, "expected.any_ddof (ddof0)[8] is 1.0, found 0.0 (and 1 more"),
        ("M-GAE-01", {"returns": "right"}, "expected.returns is 'right', found [[0.9"),
        ("M-KL-03", {"E_k1": "small"}, "expected.E_k1 is 'small'; it must be a number"),
    ],
)
def test_wrong_expectation_says_what_was_found(case_id: str, expected: dict[str, Any], message: str) -> None:
    assert message in problem(case_id, expected=expected)


def test_known_fault_of_a_whole_list_is_named() -> None:
    case = changed("M-TIS-01")
    case["expected"]["weights"] = case["common_wrong_values"].pop("weights_with_ratio_upside_down")
    case["common_wrong_values"]["some_fault"] = math_case("M-TIS-01")["expected"]["weights"]
    assert run(case)[0].endswith("; this is the known fault some_fault")


@pytest.mark.parametrize(
    ("case_id", "inputs", "message"),
    [
        ("M-GAE-01", {"bootstrap_value": ["abc"]}, "inputs.bootstrap_value[0] is 'abc'; it must be a number"),
        ("M-GAE-01", {"bootstrap_value": [0.0, 0.0]}, "inputs.bootstrap_value has shape [2]"),
        ("M-GAE-01", {"ended": [{}]}, "inputs.ended is [{}]; it must be 'terminated' or 'truncated'"),
        ("M-GAE-01", {"gamma": True}, "inputs.gamma is True; it must be a number"),
        ("M-GAE-01", {"gamma": 10**400}, "inputs.gamma is a whole number of 401 digits; it must fit float64"),
        ("M-REW-01", {"eos_token_id": "abc"}, "inputs.eos_token_id is 'abc'; it must be a number"),
        ("M-REW-01", {"pad_token_id": 1.5}, "inputs.pad_token_id is 1.5; it must be a whole number"),
        ("M-REW-01", {"response_ids": [[5, 7, 2, 2, 1.5], [4, 4, 6, 8, 9]]}, "inputs.response_ids holds something else than whole numbers"),
        ("M-REW-03", {"length": ["inf", 16, 17, 18, 20, 21]}, "inputs.length holds something else than whole numbers"),
        ("M-REW-03", {"length": [-1, 16, 17, 18, 20, 21]}, "they count tokens"),
        ("M-REW-03", {"max_len": "nan"}, "inputs.max_len is 'nan'; it must be a whole number"),
        ("M-WHI-02", {"c": {"foo": 1}}, "inputs.c is used by nothing that is expected"),
        ("M-WHI-02", {"c": {"values": [[1]], "mask": [[1]]}}, "inputs.c is used by nothing that is expected"),
        ("M-WHI-01", {"epsilon": {"x": 1}}, "inputs.epsilon is used by nothing that is expected"),
        ("M-TIS-01", {"per_token_policy_loss": [[1, 1, 1]]}, "inputs.per_token_policy_loss has shape [1, 3]; it needs that of the mask"),
        ("M-TIS-02", {"per_token_policy_loss": "abc"}, "inputs.per_token_policy_loss is 'abc'; it must be a number"),
        ("M-KL-03", {"policy": [0.5, 0.3, 0.2, "nan"], "ref": [0.4, 0.4, 0.2, 0.1]}, "hold other numbers than probabilities"),
        ("M-KL-03", {"policy": [0.5, 0.3, 0.2, -1], "ref": [0.4, 0.4, 0.2, 0.1]}, "hold other numbers than probabilities"),
        ("M-GRP-02", {"uid": [True] * 9}, "it must be a list of texts or whole numbers"),
    ],
)
def test_value_without_effect_on_what_is_expected_must_still_be_right(case_id: str, inputs: dict[str, Any], message: str) -> None:
    assert run(math_case(case_id)) == ()
    assert any(message in line for line in run(changed(case_id, inputs=inputs)))


def test_masks_may_be_flags_and_numbers_may_not() -> None:
    flags = [[True, True, True, False, False], [True] * 5]
    assert run(changed("M-REW-01", expected={"mask": flags})) == ()
    assert run(changed("M-GAE-01", inputs={"mask": [[True] * 4]})) == ()
    wrong = [[True, True, True, False, True], [True] * 5]
    assert "expected.mask[0][4] is True, found False" in problem("M-REW-01", expected={"mask": wrong})
    assert "expected.clipfrac is False; it must be a number" in problem("M-PPO-04", expected={"clipfrac": False})


def test_plain_list_is_one_row() -> None:
    case = changed("M-GAE-01")
    case["inputs"] |= {key: case["inputs"][key][0] for key in ("rewards", "values", "mask")}
    case["expected"] = {key: rows[0] for key, rows in case["expected"].items()}
    assert run(case) == ()


def test_sentence_about_gradients_is_really_checked() -> None:
    assert run(changed("M-AGG-04")) == ()
    assert "'all exactly 0.5' is no known sentence" in problem("M-AGG-04", expected={"gradients": "all exactly 0.5"})
    filled = [[{"loss": [[1.0, 2.0]], "mask": [[0, 1]]}]]
    lines = run(changed("M-AGG-04", inputs={"ranks": filled}))
    assert "expected.gradients is 'all exactly 0', found 'a gradient of size 1'" in lines
    assert any(line.startswith("expected.optimizer_step is 'skipped, ") and line.endswith("found 'applied'") for line in lines)


def test_sentence_about_a_bound_is_really_checked() -> None:
    line = problem("M-GRP-05", expected={"bound_when_normalised": "abs(advantage) <= 2.5 for every sample"})
    assert line.startswith("expected.bound_when_normalised is 'abs(advantage) <= 2.5 for every sample', found 'a largest size of 3.02")


@pytest.mark.parametrize(
    ("case_id", "key", "sentence"),
    [
        ("M-GRP-05", "bound_when_normalised", "small enough"),
        ("M-AGG-04", "gradients", "almost 0"),
        ("M-AGG-04", "optimizer_step", "as documented"),
    ],
)
def test_unknown_sentence_is_an_error(case_id: str, key: str, sentence: str) -> None:
    assert f"expected.{key} cannot be checked: {sentence!r} is no known sentence" in problem(case_id, expected={key: sentence})
    assert "it must be a sentence" in problem(case_id, expected={key: 0.0})


def test_own_tolerance_replaces_the_default() -> None:
    case = changed("M-GAE-01", expected={"returns": [[0.9, 0.927, 0.96, 1.0]]})
    assert len(run(case)) == 1
    assert run(case | {"tolerance": {"rtol": 0.0, "atol": 1e-2}}) == ()
    assert run(case | {"tolerance": {"rtol": 0.0}})[0].startswith("tolerance is {'rtol': 0.0}; give rtol and atol")
    assert "numbers of at least 0" in run(case | {"tolerance": {"rtol": 0.0, "atol": -1}})[0]


def test_case_that_expects_nothing_or_has_unknown_keys_fails() -> None:
    assert run(math_case("M-GAE-01") | {"expected": {}})[0].startswith("expected is {}; it must be an object with at least one key")
    assert run(math_case("M-GAE-01") | {"inputs": [1]})[0].startswith("inputs is [1]; it must be an object")
    assert (
        run(math_case("M-GAE-01") | {"dtype": "float32"})[0] == f"case key 'dtype' is unknown; known are id, family, {', '.join(CASE_KEYS)}"
    )
    without = {key: value for key, value in math_case("M-GAE-01").items() if key != "family"}
    assert run(without) == ("case key 'family' is missing",)


@pytest.mark.parametrize(("bound", "holds"), [("<= 3.03", True), ("< 3.03", True), ("<= 3", False), ("< 3", False)])
def test_sentence_about_a_bound_may_name_any_number(bound: str, holds: bool) -> None:
    found = run(changed("M-GRP-05", expected={"bound_when_normalised": f"abs(advantage) {bound} for every sample"}))
    assert (found == ()) is holds


def test_gradient_that_is_not_finite_skips_the_step() -> None:
    case = changed("M-GRD-01", inputs={"shards": [[3.0], ["nan"]]})
    case["expected"] = {"global_norm": "nan", "optimizer_step": "skipped on both ranks"}
    assert run(case) == ()
    case["inputs"]["shards"] = [[3.0], [4.0]]
    assert [line.rpartition("found ")[2] for line in run(case)] == ["5.0", "'applied'"]


def test_logits_may_be_nested_to_any_depth() -> None:
    row, grad = [2.0, 1.0, 0.0], math_case("M-ENT-01")["expected"]["grad_logits"][2]
    for wrap in (lambda x: x, lambda x: [x], lambda x: [[x], [x, x]]):
        case = changed("M-ENT-01", inputs={"logits": wrap(row)}, expected={"entropy": wrap(0.8323955818399389), "grad_logits": wrap(grad)})
        assert run(case) == ()
    case = changed("M-TMP-01", inputs={"logits": [[row, row]], "token": [[1, 1]]})
    case["expected"] = {"logprob": [[-2.1429316284998996] * 2], "ratio_trainer_over_rollout": [[1.0, 1.0]]}
    assert run(case) == ()


def test_null_is_the_same_as_not_given() -> None:
    case = changed("M-PPO-01")
    case["inputs"]["dual_clip_c"] = None
    assert run(case) == ()
