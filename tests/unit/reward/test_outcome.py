"""Return values of scorers: a score, no score, or an error of that sample; never a silent 0."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from shoal_reward.outcome import MAX_MESSAGE_CHARS, failure, outcome, raised

from shoal.reward import NotScoredError
from shoal.types import ScoreStatus
from tests.helpers.scoring import make_sample


@pytest.mark.parametrize("returned", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), Fraction(1)])
def test_outcome_takes_every_kind_of_number(returned: object) -> None:
    result = outcome(make_sample(), returned, 2.5)
    assert (result.status, result.value, result.latency_ms) == (ScoreStatus.SCORED, 1.0, 2.5)
    assert type(result.value) is float


def test_outcome_none_is_not_scored() -> None:
    result = outcome(make_sample(), None, 0.0)
    assert result.status is ScoreStatus.NOT_SCORED
    assert result.message


def test_outcome_sums_components() -> None:
    result = outcome(make_sample(), {"right": 1.0, "length": -0.25}, 0.0)
    assert (result.status, result.value) == (ScoreStatus.SCORED, 0.75)
    assert result.components == {"right": 1.0, "length": -0.25}


@pytest.mark.parametrize("returned", [[0.0, 0.5, 1.0], (0.0, 0.5, 1.0), np.array([0.0, 0.5, 1.0])])
def test_outcome_uses_token_rewards_as_given(returned: object) -> None:
    result = outcome(make_sample(num_response_tokens=3), returned, 0.0)
    assert (result.status, result.value) == (ScoreStatus.SCORED, 1.5)
    assert result.token_values == (0.0, 0.5, 1.0)


@pytest.mark.parametrize("returned", [[0.0, 1.0], [0.0] * 4, []])
def test_outcome_refuses_token_rewards_of_another_length(returned: list[float]) -> None:
    result = outcome(make_sample(num_response_tokens=3), returned, 0.0)
    assert result.status is ScoreStatus.ERROR
    assert f"{len(returned)} token rewards for 3 response tokens" in result.message


@pytest.mark.parametrize("returned", [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400])
def test_outcome_refuses_what_is_not_finite(returned: object) -> None:
    for wrapped in (returned, {"right": returned}, [returned, 0.0, 0.0]):
        result = outcome(make_sample(num_response_tokens=3), wrapped, 0.0)
        assert result.status is ScoreStatus.ERROR
        assert "not a finite number" in result.message


def test_outcome_refuses_sums_and_token_rewards_that_overflow() -> None:
    assert outcome(make_sample(), {"a": 1e308, "b": 1e308}, 0.0).status is ScoreStatus.ERROR
    assert outcome(make_sample(num_response_tokens=1), [1e39], 0.0).status is ScoreStatus.ERROR


@pytest.mark.parametrize(
    "returned",
    ["1.0", b"1", 1j, object(), {"right": None}, {"right": "1"}, {}, {1: 1.0}, {"": 1.0}, {"a\x00": 1.0}, ["1", 0, 0], np.zeros((3, 1))],
)
def test_outcome_refuses_what_is_not_a_score(returned: object) -> None:
    result = outcome(make_sample(num_response_tokens=3), returned, 0.0)
    assert result.status is ScoreStatus.ERROR
    assert result.message


def test_raised_names_the_exception() -> None:
    result = raised(make_sample(4), KeyError("answer"), 1.0)
    assert (result.sample_id, result.status, result.message) == ("uid/4/0", ScoreStatus.ERROR, "KeyError: 'answer'")


def test_failure_cuts_long_messages_and_survives_lone_surrogates() -> None:
    assert len(failure("x", "a" * 10_000, 0.0).message) == MAX_MESSAGE_CHARS
    assert failure("x", "bad \udc80 text", 0.0).message == "bad ? text"


def test_a_reason_for_no_score_is_no_error() -> None:
    result = raised(make_sample(), NotScoredError("the row has no answer"), 1.0)
    assert (result.status, result.message) == (ScoreStatus.NOT_SCORED, "the row has no answer")
