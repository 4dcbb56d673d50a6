"""From the engine's answers to completions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from shoal_rollout.completions import is_dropped, to_completion, version_spans
from shoal_rollout.engine import EngineSample

from shoal.errors import InternalError
from shoal.types import FinishReason, PolicyVersionSpan


def _sample(logprobs: Sequence[float], versions: Sequence[tuple[str, int, int]] | None = None, reason: str = "stop") -> EngineSample:
    count = len(logprobs)
    return EngineSample(
        token_ids=list(range(count)),
        logprobs=logprobs,
        finish_reason=reason,
        versions=[("3", 0, count)] if versions is None else versions,
    )


def test_completion_keeps_tokens_and_versions() -> None:
    sample = _sample([-1.0, -2.0, -0.5], [("3", 0, 1), ("4", 1, 3)], "length")
    completion = to_completion(sample, sample_index=7, latency_ms=2.0, engine_id="rollout-0")
    assert completion.response_ids.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(completion.rollout_logprobs, np.array([-1.0, -2.0, -0.5], dtype=np.float32))
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.policy_version_spans == (
        PolicyVersionSpan(policy_version=3, start=0, end=1),
        PolicyVersionSpan(policy_version=4, start=1, end=3),
    )
    assert not is_dropped(sample, completion)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_completion_with_a_token_without_a_finite_logprob_has_no_tokens(bad: float) -> None:
    sample = _sample([-1.0, -2.0, bad, -0.5], [("3", 0, 1), ("4", 1, 4)])
    completion = to_completion(sample, sample_index=3, latency_ms=0.0, engine_id="e")
    assert (completion.sample_index, completion.response_ids.size, completion.rollout_logprobs.size) == (3, 0, 0)
    assert completion.policy_version_spans == ()
    assert completion.finish_reason is FinishReason.LENGTH, "an aborted one would be asked for again, for ever"
    assert is_dropped(sample, completion)


def test_completion_of_an_aborted_sample_may_be_empty() -> None:
    completion = to_completion(_sample([], [], "abort"), sample_index=0, latency_ms=0.0, engine_id="e")
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.policy_version_spans == ()


@pytest.mark.parametrize(
    "versions",
    [None, [], [("3", 0, 2)], [("3", 1, 3)], [("3", 0, 1), ("4", 2, 3)], [("default", 0, 3)]],
    ids=["unsaid", "empty", "short", "late", "gap", "not a number"],
)
def test_version_spans_refuse_what_does_not_cover_the_tokens(versions: list[tuple[str, int, int]] | None) -> None:
    with pytest.raises(InternalError, match="do not cover 3 tokens"):
        version_spans(versions, 3)


def test_completion_refuses_lengths_that_differ_and_unknown_reasons() -> None:
    sample = EngineSample(token_ids=[1, 2], logprobs=[-1.0], finish_reason="stop", versions=None)
    with pytest.raises(InternalError, match="2 tokens and 1 log-prob"):
        to_completion(sample, sample_index=0, latency_ms=0.0, engine_id="e")
    with pytest.raises(InternalError, match="unknown reason 'repetition'"):
        to_completion(_sample([-1.0], reason="repetition"), sample_index=0, latency_ms=0.0, engine_id="e")
