"""From what a scorer returned or raised to a score, no score, or an error.

Legend: T response tokens of the sample.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shoal.reward import NotScoredError
from shoal.types import ScoreResult, ScoreSample, ScoreStatus

MAX_MESSAGE_CHARS = 500
DEADLINE_MESSAGE = "deadline: the scorer had not finished when the request's time was up"
OUT_OF_MEMORY = "MemoryError: the scorer reached the memory limit of its process on this sample"
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class BadScoreError(Exception):
    """A scorer returned something that is not a score."""


def outcome(sample: ScoreSample, returned: object, latency_ms: float) -> ScoreResult:
    """Turn a return value into a result; what is not a finite score becomes an error of this sample, as does an exception in its place."""
    if isinstance(returned, Exception):
        return raised(sample, returned, latency_ms)
    try:
        return _result(sample, returned, latency_ms)
    except BadScoreError as error:
        return failure(sample.sample_id, str(error), latency_ms)


def raised(sample: ScoreSample, error: BaseException, latency_ms: float) -> ScoreResult:
    """Turn an exception of a scorer into an error of this sample, or into no score if that is what it says."""
    if isinstance(error, NotScoredError):
        return _without_score(sample.sample_id, ScoreStatus.NOT_SCORED, str(error), latency_ms)
    message = OUT_OF_MEMORY if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
    return failure(sample.sample_id, message, latency_ms)


def failure(sample_id: str, message: str, latency_ms: float) -> ScoreResult:
    """An error of one sample."""
    return _without_score(sample_id, ScoreStatus.ERROR, message, latency_ms)


def _without_score(sample_id: str, status: ScoreStatus, message: str, latency_ms: float) -> ScoreResult:
    """Long messages are cut, and what UTF-8 cannot carry becomes `?`."""
    text = message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…"
    text = text.encode("utf-8", "replace").decode("utf-8")
    return ScoreResult(sample_id=sample_id, status=status, message=text, latency_ms=latency_ms)


def _result(sample: ScoreSample, returned: object, latency_ms: float) -> ScoreResult:
    if returned is None:
        return ScoreResult(
            sample_id=sample.sample_id, status=ScoreStatus.NOT_SCORED, message="the scorer returned None", latency_ms=latency_ms
        )
    value, components, token_values = _read(sample, returned)
    return ScoreResult(
        sample_id=sample.sample_id,
        status=ScoreStatus.SCORED,
        value=value,
        components=components,
        token_values=token_values,
        latency_ms=latency_ms,
    )


def _read(sample: ScoreSample, returned: object) -> tuple[float, dict[str, float], tuple[float, ...]]:
    if isinstance(returned, Mapping):
        components = _components(returned)
        return _finite_sum(components.values()), components, ()
    if isinstance(returned, (Sequence, np.ndarray)) and not isinstance(returned, (str, bytes)):
        token_values = _token_values(returned, sample.num_response_tokens)
        return _finite_sum(token_values), {}, token_values
    return _finite(returned, "the score"), {}, ()


def _components(returned: Mapping[object, object]) -> dict[str, float]:
    if not returned:
        raise BadScoreError("the scorer returned an empty dict: return None for a sample without a score")
    for name in returned:
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise BadScoreError(f"component name {name!r} is not a non-empty, printable string")
    return {str(name): _finite(value, f"component {name!r}") for name, value in returned.items()}


def _token_values(returned: Sequence[object] | np.ndarray[tuple[int, ...], np.dtype[np.generic]], num_tokens: int) -> tuple[float, ...]:
    if isinstance(returned, np.ndarray) and returned.ndim != 1:
        raise BadScoreError(f"the scorer returned an array of shape {returned.shape}: token rewards have one axis")
    if len(returned) != num_tokens:
        raise BadScoreError(f"the scorer returned {len(returned)} token rewards for {num_tokens} response tokens: return one per token")
    return tuple(_finite(value, f"the reward of token {index}", _FLOAT32_MAX) for index, value in enumerate(returned))


def _finite(value: object, what: str, largest: float = math.inf) -> float:
    if not isinstance(value, (numbers.Real, np.bool_)):
        raise BadScoreError(f"{what} is {type(value).__name__}, not a number: return float, dict[str, float], list[float] or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > largest:
        raise BadScoreError(f"{what} is {number}, which is not a finite number: return None for a sample without a score")
    return number


def _finite_sum(values: Iterable[float]) -> float:
    return _finite(sum(values), "the sum of the scores")
