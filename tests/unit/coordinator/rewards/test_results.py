"""What becomes a reward: finite, of the right length, weighted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from shoal_coordinator.rewards.results import MAX_MESSAGE_CHARS, checked_results, parts_total

from shoal.errors import InternalError
from shoal.types import FinishReason, ScoreResult, ScoreSample, ScoreStatus

SCORED = ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=3.0, components={"correct": 1.0, "format": 2.0})


def make_sample(num_response_tokens: int = 2) -> ScoreSample:
    return ScoreSample(
        sample_id="s", prompt="p", response="r", row={}, finish_reason=FinishReason.STOP, num_response_tokens=num_response_tokens
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
@pytest.mark.parametrize("where", ["value", "component", "token"])
def test_number_that_float32_cannot_hold_is_an_error(value: float, where: str) -> None:
    results = {
        "value": replace(SCORED, value=value),
        "component": replace(SCORED, components={"correct": 1.0, "format": value}),
        "token": replace(SCORED, components={}, token_values=(1.0, value)),
    }
    (result,) = checked_results([make_sample()], [results[where]])
    assert (result.status, result.value, result.components, result.token_values) == (ScoreStatus.ERROR, 0.0, {}, ())
    named = {"value": "the score", "component": "component 'format'", "token": "the reward of token 1"}
    assert result.message.startswith(f"{named[where]} is {value:g}")


def test_per_token_rewards_of_another_length_are_an_error() -> None:
    good = ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=1.0, token_values=(0.5, 0.5))
    assert checked_results([make_sample(2)], [good]) == [good]
    (bad,) = checked_results([make_sample(3)], [good])
    assert (bad.status, bad.message) == (ScoreStatus.ERROR, "2 per-token rewards for 3 tokens")


def sample_of(sample_id: str) -> ScoreSample:
    return replace(make_sample(), sample_id=sample_id)


def result_of(sample_id: str, value: float = 1.0) -> ScoreResult:
    return ScoreResult(sample_id=sample_id, status=ScoreStatus.SCORED, value=value)


def test_results_in_another_order_are_matched_by_their_ids() -> None:
    first, second = checked_results([sample_of("a"), sample_of("b")], [result_of("b", 2.0), result_of("a", 1.0)])
    assert (first.sample_id, first.value, second.sample_id, second.value) == ("a", 1.0, "b", 2.0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([result_of("a")], "the server answered 0 results for this sample: it should be one"),
        ([result_of("a"), result_of("b"), result_of("b")], "the server answered 2 results for this sample: it should be one"),
        ([result_of("a"), result_of("c")], "the server answered 0 results for this sample: it should be one"),
    ],
    ids=["too few", "one twice", "another id"],
)
def test_sample_that_was_not_answered_once_is_an_error_and_the_others_keep_their_scores(answer: list[ScoreResult], message: str) -> None:
    first, second = checked_results([sample_of("a"), sample_of("b")], answer)
    assert (first.status, first.value) == (ScoreStatus.SCORED, 1.0)
    assert (second.sample_id, second.status, second.message) == ("b", ScoreStatus.ERROR, message)


@pytest.mark.parametrize("answer", [[], [result_of("")] * 2, [result_of("x")]], ids=["none", "no ids", "other ids"])
def test_results_that_cannot_be_told_apart_are_refused(answer: list[ScoreResult]) -> None:
    with pytest.raises(InternalError, match=rf"{len(answer)} results, none of which is for one of the 2 samples"):
        checked_results([sample_of("a"), sample_of("b")], answer)


@pytest.mark.parametrize("latency_ms", [math.nan, math.inf, -1.0])
def test_latency_that_is_none_counts_as_not_told(latency_ms: float) -> None:
    (result,) = checked_results([make_sample()], [replace(SCORED, latency_ms=latency_ms)])
    assert (result.latency_ms, result.status) == (0.0, ScoreStatus.SCORED)


def test_long_message_of_a_server_is_cut() -> None:
    (result,) = checked_results([make_sample()], [ScoreResult(sample_id="s", status=ScoreStatus.ERROR, message="x" * 10**6)])
    assert len(result.message) == MAX_MESSAGE_CHARS + 1


def test_total_of_the_scorer_counts_without_weights() -> None:
    assert parts_total(SCORED, {}, "sum") is SCORED


def test_weights_leave_components_alone_and_take_those_they_name() -> None:
    assert parts_total(SCORED, {"format": 0.5}, "sum") == replace(SCORED, value=1.0)
    assert parts_total(SCORED, {"format": 0.5, "correct": -2.0}, "sum") == replace(SCORED, value=-1.0)


def test_number_of_a_scorer_is_a_component_under_its_name() -> None:
    number = replace(SCORED, components={})
    assert parts_total(number, {"sum": 2.0}, "sum") == replace(number, value=6.0)
    result = parts_total(number, {"other": 2.0}, "sum")
    assert (result.status, result.message) == (
        ScoreStatus.ERROR,
        "part 'other' of the route (reward.weights) is missing; the scorer gave sum",
    )


@pytest.mark.parametrize("status", [ScoreStatus.NOT_SCORED, ScoreStatus.ERROR])
def test_weights_do_not_touch_what_is_not_scored(status: ScoreStatus) -> None:
    result = ScoreResult(sample_id="s", status=status, message="why")
    assert parts_total(result, {"correct": 1.0}, "sum") is result


def test_weighted_sum_that_overflows_is_an_error() -> None:
    result = parts_total(SCORED, {"correct": 1e308, "format": 1e308}, "sum")
    assert (result.status, result.value) == (ScoreStatus.ERROR, 0.0)
    assert result.message == "the weighted sum is inf: it should be finite"


def test_per_token_rewards_cannot_be_parts_total() -> None:
    result = parts_total(replace(SCORED, components={}, token_values=(1.0, 2.0)), {"sum": 1.0}, "sum")
    assert (result.status, result.message) == (
        ScoreStatus.ERROR,
        "the scorer gave per-token rewards, which have no parts to weigh (reward.weights)",
    )
