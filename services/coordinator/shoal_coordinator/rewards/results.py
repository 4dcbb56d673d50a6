"""What of a scorer's answer becomes a reward: finite scores, as weighted by reward.weights. Anything else is an error of its sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shoal.errors import InternalError
from shoal.types import ScoreResult, ScoreSample, ScoreStatus

LARGEST = float(np.finfo(np.float32).max)
"""Rewards are float32 in the trainer."""


def checked_results(samples: Sequence[ScoreSample], results: Sequence[ScoreResult]) -> list[ScoreResult]:
    """Match results to samples; a number that is not finite, or per-token rewards of another length, make a sample an error.

    Raises: InternalError: the answer is for other samples.
    """
    if [result.sample_id for result in results] != [sample.sample_id for sample in samples]:
        raise InternalError(f"the reward server answered {len(results)} results that do not match the {len(samples)} samples in order")
    return [_checked(sample, result) for sample, result in zip(samples, results, strict=True)]


def weighted(result: ScoreResult, weights: Mapping[str, float], scorer: str) -> ScoreResult:
    """Replace the reward by the weighted sum of its components; the components stay as they are.

    Args:
        result: a checked result; one that is not scored stays as it is.
        weights: reward.weights; without any the scorer's own total counts. A component that they do not name does not count.
        scorer: name of the component of a scorer that answers a number alone.
    """
    if not weights or result.status is not ScoreStatus.SCORED:
        return result
    if result.token_values:
        return _error(result, "the scorer gave per-token rewards, which have no components for reward.weights")
    components = result.components or {scorer: result.value}
    missing = [name for name in weights if name not in components]
    if missing:
        return _error(result, f"component {missing[0]!r} of reward.weights is missing (the scorer gave {', '.join(sorted(components))})")
    total = sum(weight * components[name] for name, weight in weights.items())
    problem = _problem("the weighted sum", total)
    return replace(result, value=total) if problem is None else _error(result, problem)


def _checked(sample: ScoreSample, result: ScoreResult) -> ScoreResult:
    if result.status is not ScoreStatus.SCORED:
        return result
    if result.token_values and len(result.token_values) != sample.num_response_tokens:
        return _error(result, f"{len(result.token_values)} per-token rewards for {sample.num_response_tokens} tokens")
    numbers = {
        "the score": result.value,
        **{f"component {name!r}": value for name, value in result.components.items()},
        **{f"the reward of token {index}": value for index, value in enumerate(result.token_values)},
    }
    problems = (_problem(what, value) for what, value in numbers.items())
    problem = next(filter(None, problems), None)
    return result if problem is None else _error(result, problem)


def _problem(what: str, value: float) -> str | None:
    if not math.isfinite(value):
        return f"{what} is {value}: it should be finite"
    return None if abs(value) <= LARGEST else f"{what} is {value:g}: float32 cannot hold it"


def _error(result: ScoreResult, message: str) -> ScoreResult:
    return replace(result, status=ScoreStatus.ERROR, value=0.0, components={}, token_values=(), message=message)
