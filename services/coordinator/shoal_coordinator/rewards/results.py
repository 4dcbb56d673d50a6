"""What of a scorer's answer can be part of a reward: finite scores that match their samples. Anything else is an error of its sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shoal.errors import InternalError
from shoal.types import ScoreResult, ScoreSample, ScoreStatus

LARGEST = float(np.finfo(np.float32).max)
"""Rewards are float32 in the trainer."""
MAX_MESSAGE_CHARS = 2000


def checked_results(samples: Sequence[ScoreSample], results: Sequence[ScoreResult]) -> list[ScoreResult]:
    """Match results to samples; a number that is not finite, or per-token rewards of another length, make a sample an error.

    Results in another order are matched by their ids; a sample without a result, or with several, is an error, the others keep theirs.

    Raises: InternalError: no result can be told to be of any of the samples.
    """
    if [result.sample_id for result in results] == [sample.sample_id for sample in samples]:
        return [_checked(sample, result) for sample, result in zip(samples, results, strict=True)]
    by_id: dict[str, list[ScoreResult]] = {}
    for result in results:
        by_id.setdefault(result.sample_id, []).append(result)
    if samples and not any(sample.sample_id in by_id for sample in samples):
        raise InternalError(f"it answered {len(results)} results, none of which is for one of the {len(samples)} samples")
    return [_the_one(sample, by_id.get(sample.sample_id, ())) for sample in samples]


def parts_total(result: ScoreResult, parts: Mapping[str, float], scorer: str) -> ScoreResult:
    """Replace the value by the weighted sum of the parts that a route names; the parts stay as they are.

    Args:
        result: a checked result; one that is not scored stays as it is.
        parts: part -> factor; without any the scorer's own total counts. A part that they do not name does not count.
        scorer: name of the part of a scorer that answers a number alone.
    """
    if not parts or result.status is not ScoreStatus.SCORED:
        return result
    if result.token_values:
        return as_error(result, "the scorer gave per-token rewards, which have no parts to weigh (reward.weights)")
    given = result.components or {scorer: result.value}
    missing = [name for name in parts if name not in given]
    if missing:
        return as_error(result, f"part {missing[0]!r} of the route (reward.weights) is missing; the scorer gave {', '.join(sorted(given))}")
    total = sum(weight * given[name] for name, weight in parts.items())
    problem = number_problem("the weighted sum", total)
    return replace(result, value=total) if problem is None else as_error(result, problem)


def number_problem(what: str, value: float) -> str | None:
    """Why a number cannot be a reward; None if it can."""
    if not math.isfinite(value):
        return f"{what} is {value}: it should be finite"
    return None if abs(value) <= LARGEST else f"{what} is {value:g}: float32 cannot hold it"


def as_error(result: ScoreResult, message: str) -> ScoreResult:
    """The same sample without a score."""
    return replace(result, status=ScoreStatus.ERROR, value=0.0, components={}, token_values=(), message=message)


def _the_one(sample: ScoreSample, results: Sequence[ScoreResult]) -> ScoreResult:
    if len(results) == 1:
        return _checked(sample, results[0])
    message = f"the server answered {len(results)} results for this sample: it should be one"
    return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message=message)


def _checked(sample: ScoreSample, result: ScoreResult) -> ScoreResult:
    if len(result.message) > MAX_MESSAGE_CHARS:
        result = replace(result, message=f"{result.message[:MAX_MESSAGE_CHARS]}…")
    if not 0 <= result.latency_ms < math.inf:
        result = replace(result, latency_ms=0.0)
    if result.status is not ScoreStatus.SCORED:
        # What a server says beside that means nothing.
        return replace(result, value=0.0, components={}, token_values=())
    if result.token_values and len(result.token_values) != sample.num_response_tokens:
        return as_error(result, f"{len(result.token_values)} per-token rewards for {sample.num_response_tokens} tokens")
    problem = number_problem("the score", result.value)
    for name, value in result.components.items():
        problem = problem or number_problem(f"component {name!r}", value)
    if result.token_values:
        problem = problem or _token_problem(result.token_values)
    return result if problem is None else as_error(result, problem)


def _token_problem(values: Sequence[float]) -> str | None:
    # In one go: a result may have ten thousand of them.
    array = np.asarray(values, np.float64)
    bad = np.flatnonzero(~(np.abs(array) <= LARGEST))
    return None if not bad.size else number_problem(f"the reward of token {bad[0]}", float(array[bad[0]]))
