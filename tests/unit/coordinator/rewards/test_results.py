"""What becomes a reward: finite, of the right length, weighted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from shoal_coordinator.rewards.results import checked_results, weighted

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


def test_results_of_other_samples_are_refused() -> None:
    result = ScoreResult(sample_id="s", status=ScoreStatus.SCORED)
    with pytest.raises(InternalError, match="2 results"):
        checked_results([make_sample()], [result, result])
    with pytest.raises(InternalError, match="do not match"):
        checked_results([make_sample()], [replace(result, sample_id="t")])


def test_total_of_the_scorer_counts_without_weights() -> None:
    assert weighted(SCORED, {}, "sum") is SCORED


def test_weights_leave_components_alone_and_take_those_they_name() -> None:
    assert weighted(SCORED, {"format": 0.5}, "sum") == replace(SCORED, value=1.0)
    assert weighted(SCORED, {"format": 0.5, "correct": -2.0}, "sum") == replace(SCORED, value=-1.0)


def test_number_of_a_scorer_is_a_component_under_its_name() -> None:
    number = replace(SCORED, components={})
    assert weighted(number, {"sum": 2.0}, "sum") == replace(number, value=6.0)
    result = weighted(number, {"other": 2.0}, "sum")
    assert (result.status, result.message) == (ScoreStatus.ERROR, "component 'other' of reward.weights is missing (the scorer gave sum)")


@pytest.mark.parametrize("status", [ScoreStatus.NOT_SCORED, ScoreStatus.ERROR])
def test_weights_do_not_touch_what_is_not_scored(status: ScoreStatus) -> None:
    result = ScoreResult(sample_id="s", status=status, message="why")
    assert weighted(result, {"correct": 1.0}, "sum") is result


def test_weighted_sum_that_overflows_is_an_error() -> None:
    result = weighted(SCORED, {"correct": 1e308, "format": 1e308}, "sum")
    assert (result.status, result.value) == (ScoreStatus.ERROR, 0.0)
    assert result.message == "the weighted sum is inf: it should be finite"


def test_per_token_rewards_cannot_be_weighted() -> None:
    result = weighted(replace(SCORED, components={}, token_values=(1.0, 2.0)), {"sum": 1.0}, "sum")
    assert (result.status, result.message) == (
        ScoreStatus.ERROR,
        "the scorer gave per-token rewards, which have no components for reward.weights",
    )
