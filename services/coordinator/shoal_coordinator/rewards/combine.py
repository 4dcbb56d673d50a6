"""From what the components of a revision say of a prompt's samples to one reward per sample.

Legend: T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shoal.types import ScoreResult, ScoreSample, ScoreStatus
from shoal_coordinator.rewards.results import LARGEST, number_problem, parts_total
from shoal_coordinator.rewards.scored import ComponentResult


def with_parts(result: ComponentResult) -> ComponentResult:
    """Take the component's parts: its value becomes their weighted sum, or the sample an error of the component."""
    component = result.component
    if not component.parts:
        return result
    return replace(result, result=parts_total(result.result, component.parts, component.scorer))


def combine(samples: Sequence[ScoreSample], components: Sequence[Sequence[ComponentResult]]) -> list[ScoreResult]:
    """Combine the components' results of all samples of a prompt, whose rewards will be compared with each other.

    A sample is scored if every required component has scored it; else it is an error if one of these is, else it is not scored. An
    optional component counts only if it has scored every sample. Per-token rewards add up token by token; where there are any, the
    rewards of whole responses are added to the last token.

    Args:
        samples: of one prompt.
        components: by sample, the result of each component that applies, in the order of the revision; after `with_parts`.
    """
    num_components = min(map(len, components), default=0)
    counts = [
        all(own[place].component.is_required or own[place].result.status is ScoreStatus.SCORED for own in components)
        for place in range(num_components)
    ]
    return [
        _combine_sample(sample, own, [result for result, does_count in zip(own, counts, strict=True) if does_count])
        for sample, own in zip(samples, components, strict=True)
    ]


def _combine_sample(sample: ScoreSample, every: Sequence[ComponentResult], counted: Sequence[ComponentResult]) -> ScoreResult:
    latency_ms = max((each.result.latency_ms for each in every), default=0.0)
    if not counted:
        why = "no component of the route scores its source" if not every else "no optional component has scored every sample of the prompt"
        return _unscored(sample, ScoreStatus.NOT_SCORED, why, latency_ms)
    missing = [each for each in counted if each.result.status is not ScoreStatus.SCORED]
    if missing:
        worst = next((each for each in missing if each.result.status is ScoreStatus.ERROR), missing[0])
        return _unscored(sample, worst.result.status, _reason(worst), latency_ms)
    value, token_values, problem = _sum(counted, sample.num_response_tokens)
    if problem is not None:
        return _unscored(sample, ScoreStatus.ERROR, problem, latency_ms)
    return ScoreResult(
        sample_id=sample.sample_id,
        status=ScoreStatus.SCORED,
        value=value,
        components=_parts(counted),
        token_values=token_values,
        latency_ms=latency_ms,
    )


def _unscored(sample: ScoreSample, status: ScoreStatus, message: str, latency_ms: float) -> ScoreResult:
    return ScoreResult(sample_id=sample.sample_id, status=status, message=message, latency_ms=latency_ms)


def name_of(result: ComponentResult) -> str:
    """scorer@version, for messages."""
    component = result.component
    return f"{component.scorer}@{component.version}" if component.version else component.scorer


def _reason(result: ComponentResult) -> str:
    message = result.result.message or "no reason given"
    # A call that failed has said it already.
    return message if message.startswith(name_of(result)) else f"{name_of(result)}: {message}"


def _sum(counted: Sequence[ComponentResult], num_tokens: int) -> tuple[float, tuple[float, ...], str | None]:
    """The weighted sum, its per-token rewards if there are any, and why it cannot be a reward, if it cannot."""
    if not any(each.result.token_values for each in counted):
        value = sum(each.component.weight * each.result.value for each in counted)
        return value, (), number_problem("the weighted sum", value)
    rewards = np.zeros(num_tokens, np.float64)
    for each in counted:
        if each.result.token_values:
            rewards += each.component.weight * np.asarray(each.result.token_values, np.float64)
        else:
            rewards[-1] += each.component.weight * each.result.value
    value, largest = float(rewards.sum()), float(np.abs(rewards).max())
    return value, tuple(rewards.tolist()), number_problem("the weighted sum", value if largest <= LARGEST else largest)


def _parts(counted: Sequence[ComponentResult]) -> dict[str, float]:
    """Parts by name, unweighted; a name that several components give is that of the first."""
    parts: dict[str, float] = {}
    for each in counted:
        for name, value in (each.result.components or {each.component.scorer: each.result.value}).items():
            parts.setdefault(name, value)
    return parts
