"""Whether results fit their samples, and how far two results of one sample are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shoal.clients.reward import RULES_BROKEN
from shoal.conformance.report import Problem
from shoal.types import ScoreResult, ScoreSample, ScoreStatus

SUM_TOLERANCE = 1e-6
"""How far the sum of components may be from the value, relative to the larger of 1 and the value."""


def result_problem(samples: Sequence[ScoreSample], results: Sequence[ScoreResult]) -> Problem | None:
    """The first thing that is wrong with the results of a call; None if nothing is."""
    if len(results) != len(samples):
        return Problem(what=f"{len(results)} results for {len(samples)} samples", fix="answer one result per sample, failed ones included")
    wanted, found = [sample.sample_id for sample in samples], [result.sample_id for result in results]
    if wanted != found:
        index = next(i for i, pair in enumerate(zip(wanted, found, strict=True)) if pair[0] != pair[1])
        what = f"result {index} has sample_id {found[index]!r}, the sample {wanted[index]!r}"
        return Problem(what=what, fix="echo each sample's sample_id, and answer in the order of the samples")
    problems = (_problem_of(sample, result) for sample, result in zip(samples, results, strict=True))
    return next((problem for problem in problems if problem is not None), None)


def _problem_of(sample: ScoreSample, result: ScoreResult) -> Problem | None:
    if not isinstance(result.status, ScoreStatus):
        return Problem(what=f"sample {sample.sample_id} has status {result.status!r}", fix="set the status: scored, not scored or error")
    if result.message.startswith(RULES_BROKEN):
        # The endpoint is one that goes on in spite of it, as in a run.
        return Problem(what=result.message, fix="answer with a status, and with a finite value if it is scored")
    if result.status is not ScoreStatus.SCORED:
        return None
    values = {"value": result.value, **result.components} | {f"token {i}": value for i, value in enumerate(result.token_values)}
    if (bad := next((name for name, value in values.items() if not math.isfinite(value)), None)) is not None:
        what = f"sample {sample.sample_id} is scored with {bad} {values[bad]}"
        return Problem(what=what, fix="answer status error for a sample whose score is not finite")
    return _problem_of_parts(sample, result)


def _problem_of_parts(sample: ScoreSample, result: ScoreResult) -> Problem | None:
    if result.components and abs(sum(result.components.values()) - result.value) > SUM_TOLERANCE * max(1.0, abs(result.value)):
        what = f"sample {sample.sample_id} has value {result.value:g}, its components add up to {sum(result.components.values()):g}"
        return Problem(what=what, fix="make value the sum of the components")
    if result.token_values and len(result.token_values) != sample.num_response_tokens:
        what = f"sample {sample.sample_id} has {len(result.token_values)} token_values for {sample.num_response_tokens} response tokens"
        return Problem(what=what, fix="give one token value per response token (num_response_tokens), or none")
    return None


def difference(one: ScoreResult, other: ScoreResult) -> float:
    """How far two results are apart: the largest difference of a number relative to the larger of 1 and its size.

    Returns: infinity if their statuses, or the parts that they have, differ.
    """
    if one.status is not other.status:
        return math.inf
    if one.status is not ScoreStatus.SCORED:
        return 0.0
    if one.components.keys() != other.components.keys() or len(one.token_values) != len(other.token_values):
        return math.inf
    pairs = [(one.value, other.value), *zip(one.token_values, other.token_values, strict=True)]
    pairs += [(one.components[name], other.components[name]) for name in one.components]
    return max(abs(a - b) / max(1.0, abs(a), abs(b)) for a, b in pairs)


def furthest(pairs: Iterable[tuple[ScoreResult, ScoreResult]]) -> tuple[float, str]:
    """The largest difference over pairs, and the two results in words; 0 and "" for equal ones."""
    largest, words = 0.0, ""
    for one, other in pairs:
        if (apart := difference(one, other)) > largest:
            largest, words = apart, f"sample {one.sample_id}: {_words(one)} and {_words(other)}"
    return largest, words


def count_words(results: Sequence[ScoreResult]) -> str:
    """How many results have which status, such as `3 scored, 1 error`."""
    counts = [(sum(result.status is status for result in results), status.value.replace("_", " ")) for status in ScoreStatus]
    return ", ".join(f"{number} {status}" for number, status in counts if number) or "none"


def _words(result: ScoreResult) -> str:
    if result.status is ScoreStatus.SCORED:
        parts = f" {dict(result.components)}" if result.components else ""
        return f"{result.value:.9g}{parts}"
    return f"{result.status.value.replace('_', ' ')} ({result.message[:80]})" if result.message else result.status.value.replace("_", " ")
