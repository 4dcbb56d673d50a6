"""The kinds of verifier, each built from settings as a service builds it."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_reward.kinds import KINDS, build_scorer
from shoal_reward.verifiers import choice, exact, extraction, json_schema, math, reasoning_gym, regex
from shoal_reward.verifiers.gold import shared_code
from shoal_reward.verifiers.length import LengthSettings, length_reward

from shoal.algo.rewards import overlong_penalty
from shoal.config.reward_service import ScorerDefinition
from shoal.errors import ConfigError, DataError
from shoal.reward import Isolation, Row, Scorer

RULE_KINDS = tuple(kind for kind, module in KINDS.items() if module.startswith("shoal_reward.verifiers."))
ROW: Row = {
    "answer": "5",
    "pattern": "5",
    "json_schema": {"const": 5},
    "dataset": "chain_sum",
    "entry": {"question": "4 + 1 =", "answer": "5", "metadata": {}},
}
HOSTILE = [
    "",
    "\0",
    "\ud800\udfff",
    "{" * 1_000_000,
    "[" * 1_000_000,
    '"\\"' * 300_000,
    "<answer>" * 100_000,
    "```json\n" * 100_000,
    "```" + " " * 1_000_000,
    "\\boxed{" * 100_000,
    "a" * 10_000_000,
]


def build(kind: str, **settings: object) -> Scorer:
    return build_scorer("mine", ScorerDefinition(kind=kind, settings=settings))


def value(scorer: Scorer, response: str, row: Row) -> float | None:
    result: Any = scorer.function("", response, row)
    return sum(result.values()) if isinstance(result, dict) else result


@pytest.mark.parametrize("kind", RULE_KINDS)
def test_every_kind_is_built_with_default_settings(kind: str) -> None:
    scorer = build(kind)
    assert scorer.isolation is Isolation.PROCESS
    assert (scorer.is_batch, scorer.is_async, scorer.needs_token_ids) == (False, False, False)
    assert scorer.description
    inspect.signature(scorer.function).bind("prompt", "response", {})
    if scorer.prepare is not None:
        scorer.prepare()


@pytest.mark.parametrize("kind", RULE_KINDS)
def test_settings_that_are_no_settings_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="colour is not a known key"):
        build(kind, colour="red")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("math", {"percent": "ignored"}, "percent is 'ignored'"),
        ("math", {"extract": []}, "extract is"),
        ("math", {"extract": ["somewhere"]}, "somewhere"),
        ("math", {"max_expression_chars": 0}, "max_expression_chars is 0"),
        ("exact", {"column": ""}, "column is ''"),
        ("choice", {"options_column": 3}, "options_column is 3"),
        ("regex", {"pattern": "("}, "no regular expression"),
        ("regex", {"match": "maybe"}, "match is 'maybe'"),
        ("json_schema", {"json_schema": {"type": "colour"}}, "no JSON schema"),
        ("json_schema", {"json_schema": {"properties": 3}}, "no JSON schema"),
        ("json_schema", {"max_depth": 0}, "max_depth is 0"),
        ("format", {"tags": ["<think>"]}, "write think, not <think>"),
        ("format", {"tags": ["a", "a"]}, "named twice"),
        ("format", {"tags": []}, "asks for no form"),
        ("format", {"pattern": "["}, "no regular expression"),
        ("format", {"penalty": -1}, "penalty is -1"),
        ("length", {"limit": None}, "neither a limit nor a target"),
        ("length", {"limit": 10, "buffer": 20}, "buffer 20 is above limit 10"),
        ("length", {"unit": "words"}, "unit is 'words'"),
        ("length", {"penalty": float("nan")}, "penalty"),
        ("reasoning_gym", {"dataset": ""}, "dataset is ''"),
    ],
)
def test_wrong_settings_are_refused_by_name(kind: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(kind, **settings)
    assert message in str(error.value)
    assert "'mine'" in str(error.value) or "json_schema" in str(error.value)


@pytest.mark.parametrize("kind", RULE_KINDS)
def test_hostile_responses_get_a_score_soon(kind: str) -> None:
    scorer = build(kind)
    for response in HOSTILE:
        start = time.process_time()
        assert isinstance(value(scorer, response, ROW), float)
        assert time.process_time() - start < 2


@pytest.mark.parametrize("kind", RULE_KINDS)
@given(
    st.text(max_size=80)
    | st.lists(st.sampled_from([*"{}[]()\\\"'`5A.:,\n ", "\\boxed{", "<answer>", "</answer>"]), max_size=20).map("".join)
)
@settings(max_examples=60, deadline=None)
def test_any_text_gets_a_score(kind: str, response: str) -> None:
    assert isinstance(value(_built(kind), response, ROW), float)


_scorers: dict[str, Scorer] = {}


def _built(kind: str) -> Scorer:
    return _scorers.setdefault(kind, build(kind))


@pytest.mark.parametrize("module", [choice, exact, json_schema, math, reasoning_gym, regex])
def test_kinds_that_judge_an_answer_find_it_by_one_function(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vars(module)["find_answer"] is extraction.find_answer
    asked: list[str] = []

    def note(response: str, rules: object = ()) -> str:
        asked.append(response)
        return "5"

    monkeypatch.setattr(module, "find_answer", note)
    assert value(build(str(vars(module)["__name__"]).rpartition(".")[2]), "nothing of the sort", ROW) == 1.0
    assert "nothing of the sort" in asked


@pytest.mark.parametrize("kind", RULE_KINDS)
async def test_a_worker_thread_gives_the_same_score(kind: str) -> None:
    scorer = build(kind)
    response = r"\boxed{\frac{10}{2}}"
    assert await asyncio.to_thread(value, scorer, response, ROW) == value(scorer, response, ROW)


def test_the_fingerprint_tells_code_and_settings_apart() -> None:
    assert build("math").fingerprint == build("math").fingerprint
    assert build("math").fingerprint != build("math", percent="hundredth").fingerprint
    assert len({build(kind).fingerprint for kind in RULE_KINDS}) == len(RULE_KINDS)
    assert shared_code() != shared_code("math_text")
    assert shared_code(libraries=("sympy",)) != shared_code(libraries=("no-such-library",))


@pytest.mark.parametrize(
    ("settings", "answer", "response", "expected"),
    [
        ({}, "Paris", "Paris", 1.0),
        ({}, "Paris", r"\boxed{\text{Paris}}", 1.0),
        ({}, "Paris", "<answer>Paris</answer>", 1.0),
        ({}, "Paris", "paris", 0.0),
        ({"ignore_case": True}, "Paris", "paris", 1.0),
        ({}, "a b", "a  \n b", 1.0),
        ({"collapse_blanks": False}, "a b", "a  b", 0.0),
        ({}, "dog", "", 0.0),
        ({}, "dog", "hotdog", 0.0),
        ({}, "", "", None),
        ({}, ["dog", "cat"], "cat", 1.0),
        ({}, 5, "5", 1.0),
        ({"extract": ["box"]}, "5", "5", 0.0),
    ],
)
def test_exact(settings: dict[str, object], answer: object, response: str, expected: float | None) -> None:
    assert value(build("exact", **settings), response, {"answer": answer}) == expected


@pytest.mark.parametrize(
    ("settings", "row", "response", "expected"),
    [
        ({"pattern": r"\d+"}, {}, "room 12", 1.0),
        ({"pattern": r"\d+", "match": "full"}, {}, "room 12", 0.0),
        ({"pattern": "yes"}, {}, "YES", 0.0),
        ({"pattern": "yes", "ignore_case": True}, {}, "YES", 1.0),
        ({}, {"pattern": "^5$"}, r"it is \boxed{5}", 1.0),
        ({"whole_response": True}, {"pattern": "^5$"}, r"it is \boxed{5}", 0.0),
        ({}, {"pattern": ""}, "5", None),
        ({"column": "wanted"}, {"wanted": "5"}, "5", 1.0),
    ],
)
def test_regex(settings: dict[str, object], row: Row, response: str, expected: float | None) -> None:
    assert value(build("regex", **settings), response, row) == expected


@pytest.mark.parametrize("kind", ["math", "exact", "choice"])
@pytest.mark.parametrize("answer", [float("nan"), float("inf"), None, True, {}, ["5", float("nan")]])
def test_right_answer_that_is_none_is_an_error_and_not_a_word(kind: str, answer: object) -> None:
    for response in ("nan", "inf", "None", "5"):
        with pytest.raises(DataError, match="give each row its right answer there"):
            value(build(kind), response, {"answer": answer})


@pytest.mark.parametrize(("pattern", "message"), [("(", "no regular expression"), (None, "'pattern'"), (3, "'pattern'")])
def test_regex_names_a_rows_bad_pattern(pattern: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        value(build("regex"), "5", {"pattern": pattern})


OPTIONS = ["4", "7", "a dog", "12 km", "All of the above"]


@pytest.mark.parametrize(
    ("answer", "options", "response", "expected"),
    [
        ("E", None, r"\boxed{\text{E}}", 1.0),
        ("E", None, "E", 1.0),
        ("E", None, "(E)", 1.0),
        ("E", None, "e.", 1.0),
        ("(E)", None, "E)", 1.0),
        ("B", None, "Answer: B", 1.0),
        ("B", None, "The answer is (B).", 1.0),
        ("B", None, "**Answer:** option B", 1.0),
        ("B", None, r"\boxed{\textbf{(B)}\ 7}", 0.0),
        ("B", None, r"\boxed{B) 7}", 1.0),
        ("B", OPTIONS, r"\boxed{B) 7}", 1.0),
        ("B", OPTIONS, r"\boxed{B) 4}", 0.0),
        ("B", OPTIONS, "7", 1.0),
        ("7", OPTIONS, "B", 1.0),
        ("C", OPTIONS, "a  Dog", 1.0),
        ("C", OPTIONS, "dog", 0.0),
        ("C", OPTIONS, "", 0.0),
        ("C", OPTIONS, r"\boxed{}", 0.0),
        ("D", OPTIONS, "12 km", 1.0),
        ("E", OPTIONS, "all of the above.", 1.0),
        ("A", {"a": "x", "b": "y"}, "x", 1.0),
        ("B", OPTIONS, "A or B", 0.0),
        ("B", OPTIONS, "Because A is wrong, B", 0.0),
        ("B", OPTIONS, "B" * 3, 0.0),
        ("dog", None, "", 0.0),
        ("dog", None, "do", 0.0),
        ("dog", None, "Dog", 1.0),
        ("5", None, r"\boxed{5}", 1.0),
        ("", OPTIONS, "A", None),
    ],
)
def test_choice(answer: str, options: object, response: str, expected: float | None) -> None:
    row: Row = {"answer": answer} if options is None else {"answer": answer, "options": options}
    assert value(build("choice"), response, row) == expected


def test_choice_refuses_options_that_are_none() -> None:
    with pytest.raises(DataError, match="'options'"):
        value(build("choice"), "A", {"answer": "A", "options": "A or B"})


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("settings", "response", "expected"),
    [
        ({}, '{"age": 3}', {"correct": 1.0}),
        ({}, '{"age": "3"}', {"correct": 0.0}),
        ({}, '{"age": 3', {"correct": 0.0}),
        ({}, "", {"correct": 0.0}),
        ({}, 'Here:\n```json\n{"age": 3}\n```\nDone.', {"correct": 1.0}),
        ({}, '```\n{"age": "x"}\n```\n```json\n{"age": 3}\n```', {"correct": 1.0}),
        ({"fence": "required"}, '{"age": 3}', {"correct": 0.0}),
        ({"fence": "required"}, '```json\n{"age": 3}\n```', {"correct": 1.0}),
        ({"fence": "forbidden"}, '```json\n{"age": 3}\n```', {"correct": 0.0}),
        ({}, '<answer>{"age": 3}</answer>', {"correct": 1.0}),
        ({"valid_json_reward": 0.5}, '{"age": "3"}', {"correct": 0.0, "format": 0.5}),
        ({"valid_json_reward": 0.5}, "{", {"correct": 0.0, "format": 0.0}),
        ({}, '{"age": NaN}', {"correct": 0.0}),
    ],
)
def test_json_schema(settings: dict[str, object], response: str, expected: dict[str, float]) -> None:
    assert build("json_schema", json_schema=SCHEMA, **settings).function("", response, {}) == expected


def test_json_schema_guards_nesting_but_not_brackets_in_texts() -> None:
    scorer = build("json_schema", json_schema=True, max_depth=3)
    assert value(scorer, "[[[1]]]", {}) == 1.0
    assert value(scorer, "[[[[1]]]]", {}) == 0.0
    assert value(scorer, '["[[[[", "\\"[[[["]', {}) == 1.0


@pytest.mark.parametrize("schema", [{"const": 5}, '{"const": 5}', True])
def test_json_schema_takes_the_rows_schema(schema: object) -> None:
    assert value(build("json_schema"), "5", {"json_schema": schema}) == 1.0


@pytest.mark.parametrize("schema", [None, 3, "{", '{"type": "colour"}', "[]"])
def test_json_schema_names_a_rows_bad_schema(schema: object) -> None:
    with pytest.raises(DataError, match="schema"):
        value(build("json_schema"), "5", {"json_schema": schema})


def test_json_schema_without_a_schema_is_not_scored_and_fetches_nothing() -> None:
    assert value(build("json_schema"), "5", {"json_schema": ""}) is None
    with pytest.raises(DataError, match=r"refers to another document.*example\.org"):
        value(build("json_schema", json_schema={"$ref": "https://example.org/schema.json"}), "5", {})


@pytest.mark.parametrize(
    ("settings", "response", "expected"),
    [
        ({}, "<think>a</think>\n<answer>5</answer>", 1.0),
        ({}, " <think></think><answer></answer>\n", 1.0),
        ({}, "<answer>5</answer><think>a</think>", 0.0),
        ({}, "<think>a</think><think>b</think><answer>5</answer>", 0.0),
        ({}, "<think>a<answer>5</answer></think>", 0.0),
        ({}, "<think>a</think><answer>5", 0.0),
        ({}, "so <think>a</think><answer>5</answer>", 0.0),
        ({}, "<think>a</think> so <answer>5</answer>", 0.0),
        ({}, "<think>a</think><answer>5</answer> so", 0.0),
        ({"allow_text_outside": True}, "so <think>a</think> so <answer>5</answer> so", 1.0),
        ({}, "", 0.0),
        ({"penalty": 0.5}, "5", -0.5),
        ({"reward": 0.2}, "<think>a</think><answer>5</answer>", 0.2),
        ({"tags": [], "pattern": "a.*b"}, "a\nb", 1.0),
        ({"tags": [], "pattern": "a.*b"}, "a\nb c", 0.0),
        ({"tags": [], "boxed": True}, r"\boxed{5}", 1.0),
        ({"tags": [], "boxed": True}, r"\boxed{}", 0.0),
        ({"tags": [], "boxed": True}, r"\boxed{5", 0.0),
        ({"tags": ["answer"]}, "<answer>5</answer>", 1.0),
    ],
)
def test_format(settings: dict[str, object], response: str, expected: float) -> None:
    assert build("format", **settings).function("", response, {}) == {"format": expected}


@pytest.mark.parametrize(
    ("settings", "length", "expected"),
    [
        ({"limit": 100, "buffer": 20}, 0, 0.0),
        ({"limit": 100, "buffer": 20}, 80, 0.0),
        ({"limit": 100, "buffer": 20}, 90, -0.5),
        ({"limit": 100, "buffer": 20}, 100, -1.0),
        ({"limit": 100, "buffer": 20}, 1000, -1.0),
        ({"limit": 100, "buffer": 20, "penalty": 2.0}, 90, -1.0),
        ({"limit": None, "target": 50, "ramp": 10}, 50, 0.0),
        ({"limit": None, "target": 50, "ramp": 10}, 45, -0.5),
        ({"limit": None, "target": 50, "ramp": 10}, 55, -0.5),
        ({"limit": None, "target": 50, "ramp": 10}, 90, -1.0),
        ({"limit": None, "target": 50, "tolerance": 5, "ramp": 10}, 55, 0.0),
        ({"limit": 100, "buffer": 20, "target": 80, "ramp": 20}, 90, -1.0),
    ],
)
def test_length(settings: dict[str, object], length: int, expected: float) -> None:
    assert build("length", **settings).function("", "x" * length, {}) == {"length": expected}


def test_length_has_the_shape_of_the_overlong_penalty() -> None:
    settings = LengthSettings(limit=50, buffer=17)
    lengths = torch.arange(0, 80)
    wanted = overlong_penalty(lengths, max_length=50, buffer=17).tolist()
    assert [length_reward(int(length), settings) for length in lengths] == pytest.approx(wanted, abs=1e-12)


def test_length_counts_the_policys_tokens() -> None:
    scorer = build("length", unit="tokens", limit=4, buffer=4)
    assert scorer.needs_token_ids
    assert scorer.function("", "a long text of characters", {"response_ids": [1, 2]}) == {"length": -0.5}
    with pytest.raises(DataError, match="response_ids"):
        scorer.function("", "text", {})


def test_reasoning_gym_takes_its_task_from_the_settings() -> None:
    row: Row = {"item": ROW["entry"]}
    assert value(build("reasoning_gym", dataset="chain_sum", entry_column="item"), r"\boxed{5}", row) == 1.0
