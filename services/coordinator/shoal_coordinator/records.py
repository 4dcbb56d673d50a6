"""From a scored group to the records of its samples.

Legend: T response tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from shoal.types import ExperienceRecord, RewardComponent, ScoreStatus
from shoal_coordinator.rewards.scored import ComponentResult, ScoredGroup


def assemble_records(
    scored: ScoredGroup, run_id: str, tokenizer_hash: str, created_unix_ms: int, baseline_reward: float | None = None
) -> list[ExperienceRecord]:
    """Build the records of a group's scored samples; unscored ones get none.

    Args:
        scored: completions and their results, in the same order.
        run_id, tokenizer_hash, baseline_reward: written into every record.
        created_unix_ms: when generation was finished.
    """
    samples = zip(scored.group.completions, scored.results, scored.components, strict=True)
    scored_unix_ms = unix_ms()
    return [
        ExperienceRecord(
            run_id=run_id,
            uid=scored.group.task.uid,
            group_id=scored.group.task.group_id,
            sample_index=completion.sample_index,
            attempt=scored.group.attempt,
            prompt_ids=scored.group.task.prompt_ids,
            response_ids=completion.response_ids,
            response_mask=np.ones(completion.response_ids.size, np.bool_),
            rollout_logprobs=completion.rollout_logprobs,
            policy_version_spans=completion.policy_version_spans,
            sampling=scored.group.sampling,
            finish_reason=completion.finish_reason,
            reward_status=result.status,
            reward=result.value,
            reward_components=tuple(part for component in components for part in _parts(component)),
            token_rewards=np.array(result.token_values, np.float32) if result.token_values else None,
            baseline_reward=baseline_reward,
            route_revision=scored.revision,
            tokenizer_hash=tokenizer_hash,
            engine_id=completion.engine_id,
            created_unix_ms=created_unix_ms,
            scored_unix_ms=scored_unix_ms,
        )
        for completion, result, components in samples
        if result.status is ScoreStatus.SCORED
    ]


def outcome(record: ExperienceRecord) -> float:
    """What a response is worth in all: its reward, or the sum of its per-token rewards."""
    return record.reward if record.token_rewards is None else float(record.token_rewards.sum(dtype=np.float64))


def baseline_of(scored: ScoredGroup) -> float | None:
    """The reward of a prompt's greedy answer; None if it has none: no answer, no token, no score."""
    scored_results = [result for result in scored.results if result.status is ScoreStatus.SCORED]
    if not scored_results:
        return None
    result = scored_results[0]
    return float(np.sum(result.token_values, dtype=np.float64)) if result.token_values else result.value


def has_spread(records: Sequence[ExperienceRecord]) -> bool:
    """Whether two samples of a group differ in what they are worth; without it a group's advantages are all 0."""
    return len(set(map(outcome, records))) > 1


def unix_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def _parts(component: ComponentResult) -> list[RewardComponent]:
    """The scorer's named parts, or the score itself under the scorer's name, as the scorer gave them; without a score its status alone."""
    result, scorer = component.result, component.component.scorer
    return [
        RewardComponent(
            name=name,
            service=component.service,
            service_version=component.component.version,
            value=value,
            status=result.status,
            latency_ms=result.latency_ms,
            scorer=scorer,
        )
        for name, value in (result.components or {scorer: result.value}).items()
    ]
