"""From prompts to queued experience: generate, score, assemble records, put them into the queue.

Groups are scored and queued as they finish, while others still generate; no tokens are kept here afterwards.

Legend: T response tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from shoal.errors import ShoalError, StateError
from shoal.types import Completion, ExperienceRecord, FinishReason, RewardComponent, ScoreResult, ScoreStatus
from shoal_coordinator.dispatcher import Dispatcher, GeneratedGroup, GenerationRequest
from shoal_coordinator.prompts import PromptTask
from shoal_coordinator.scoring import GroupScorer, ScoredGroup, first_error
from shoal_coordinator.stage_clock import Stage, StageClock

MAX_CONCURRENT_CHUNKS = 4
PUT_TIMEOUT_S = 600.0


class RecordSink(Protocol):
    """What collecting needs of the queue (`shoal.queue.experience.ExperienceQueue`)."""

    async def put_groups(self, groups: Sequence[Sequence[ExperienceRecord]], *, timeout_s: float) -> int:
        """Add groups of records; returns how many records are new."""


@dataclass(slots=True, kw_only=True)
class CollectedExperience:
    """Scalars about the experience of one call; rewards, lengths and stopped have one entry per queued sample.

    num_groups: groups put into the queue (with at least one scored sample). num_dropped_groups: those without any.
    num_empty, num_missing: completions without tokens, and not finished in time. num_aborted: ended early by a server and generated again;
    not in what was queued. num_unscored: not scored or error.
    num_zero_std: queued groups of several samples whose rewards are all equal.
    """

    num_groups: int = 0
    num_dropped_groups: int = 0
    num_empty: int = 0
    num_missing: int = 0
    num_aborted: int = 0
    num_unscored: int = 0
    num_zero_std: int = 0
    first_unscored_message: str = ""
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    policy_versions: set[int] = field(default_factory=set)

    @property
    def unscored_share(self) -> float:
        """Unscored samples as a part of all that had tokens."""
        num_answered = self.num_unscored + len(self.rewards)
        return self.num_unscored / num_answered if num_answered else 0.0

    def metrics(self) -> dict[str, float]:
        """Metrics of the step; means over nothing are left out."""
        metrics = {
            "num_samples": float(len(self.rewards)),
            "num_groups": float(self.num_groups),
            "num_dropped_groups": float(self.num_dropped_groups),
            "num_empty": float(self.num_empty),
            "num_missing": float(self.num_missing),
            "num_aborted": float(self.num_aborted),
            "unscored_share": self.unscored_share,
        }
        if not self.rewards:
            return metrics
        rewards, lengths, stopped = np.array(self.rewards), np.array(self.lengths), np.array(self.stopped)
        return metrics | {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "num_response_tokens": float(lengths.sum()),
            "response_length": float(lengths.mean()),
            "clipped_share": float(1 - stopped.mean()),
            "terminated_length": float(lengths[stopped].mean()) if stopped.any() else 0.0,
            "zero_std_share": self.num_zero_std / self.num_groups,
        }


class ExperienceCollector:
    """Runs the generate-score-queue part of a step; used from the event loop alone.

    Args:
        dispatcher, scorer, queue: the three stages.
        clock: counts queue time (the other two count their own).
        run_id, tokenizer_hash: written into every record.
        max_unscored_share: see `RewardSection`.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        scorer: GroupScorer,
        queue: RecordSink,
        *,
        clock: StageClock,
        run_id: str,
        tokenizer_hash: str,
        max_unscored_share: float,
        scorer_name: str,
    ) -> None:
        self._dispatcher = dispatcher
        self._scorer = scorer
        self._queue = queue
        self._clock = clock
        self._run_id = run_id
        self._tokenizer_hash = tokenizer_hash
        self._max_unscored_share = max_unscored_share
        self._scorer_name = scorer_name

    async def collect(self, tasks: Sequence[PromptTask], request: GenerationRequest) -> CollectedExperience:
        """Generate, score and queue one step's groups.

        Returns: scalars about what was queued; `take_groups(num_groups)` gets it.
        Raises:
            StateError: too many samples were not scored, or nothing is left; names the scorer and the first reason.
                What was scored before stays queued.
            ShoalError: a stage failed for good.
        """
        collected = CollectedExperience()
        num_expected = len(tasks) * request.num_samples
        slots = asyncio.Semaphore(MAX_CONCURRENT_CHUNKS)
        try:
            async with aclosing(self._dispatcher.generate(tasks, request)) as finished, asyncio.TaskGroup() as work:
                async for groups in finished:
                    await slots.acquire()
                    work.create_task(self._finish(groups, collected, num_expected, slots))
        except* ShoalError as errors:
            raise first_error(errors) from None
        self._check_share(collected, collected.num_unscored + len(collected.rewards))
        if not collected.rewards:
            reason = collected.first_unscored_message
            raise StateError(
                f"none of {num_expected} samples can be trained on: {collected.num_empty} had no token, {collected.num_missing} timed out, "
                f"scorer {self._scorer_name!r} left {collected.num_unscored} unscored{f' ({reason}): repair it' if reason else ''}"
            )
        return collected

    async def _finish(
        self, groups: Sequence[GeneratedGroup], collected: CollectedExperience, num_expected: int, slots: asyncio.Semaphore
    ) -> None:
        try:
            now_ms = _unix_ms()
            scored = await self._scorer.score(groups)
            records = [
                self._count(group, assemble_records(group, self._run_id, self._tokenizer_hash, now_ms), collected) for group in scored
            ]
            # Early, so that a dead scorer does not cost the rest of the step's generation.
            self._check_share(collected, num_expected)
            with self._clock.measure(Stage.QUEUE):
                await self._queue.put_groups([group for group in records if group], timeout_s=PUT_TIMEOUT_S)
        finally:
            slots.release()

    def _check_share(self, collected: CollectedExperience, num_samples: int) -> None:
        if collected.num_unscored > self._max_unscored_share * num_samples:
            reason = collected.first_unscored_message or "none given"
            raise StateError(
                f"scorer {self._scorer_name!r} left {collected.num_unscored} of {num_samples} samples unscored, above "
                f"reward.max_unscored_share {self._max_unscored_share:g}; first reason: {reason}: repair the scorer or raise the limit"
            )

    @staticmethod
    def _count(scored: ScoredGroup, records: list[ExperienceRecord], collected: CollectedExperience) -> list[ExperienceRecord]:
        unscored = [result for result in scored.results if result.status is not ScoreStatus.SCORED]
        if unscored and not collected.num_unscored:
            collected.first_unscored_message = unscored[0].message
        collected.num_unscored += len(unscored)
        collected.num_empty += scored.group.num_empty
        collected.num_missing += scored.group.num_missing
        collected.num_aborted += scored.group.num_aborted
        collected.num_groups += bool(records)
        collected.num_dropped_groups += not records
        rewards = [record.reward for record in records]
        collected.num_zero_std += len(rewards) > 1 and len(set(rewards)) == 1
        collected.rewards += rewards
        collected.lengths += [record.response_ids.size for record in records]
        collected.stopped += [record.finish_reason is FinishReason.STOP for record in records]
        collected.policy_versions.update(span.policy_version for record in records for span in record.policy_version_spans)
        return records


def assemble_records(scored: ScoredGroup, run_id: str, tokenizer_hash: str, created_unix_ms: int) -> list[ExperienceRecord]:
    """Build the records of a group's scored samples; unscored ones get none.

    Args:
        scored: completions and their results, in the same order.
        run_id, tokenizer_hash: written into every record.
        created_unix_ms: when generation was finished.
    """
    pairs = zip(scored.group.completions, scored.results, strict=True)
    scored_unix_ms = _unix_ms()
    return [
        _record(scored, completion, result, run_id, tokenizer_hash, created_unix_ms, scored_unix_ms)
        for completion, result in pairs
        if result.status is ScoreStatus.SCORED
    ]


def _record(
    scored: ScoredGroup,
    completion: Completion,
    result: ScoreResult,
    run_id: str,
    tokenizer_hash: str,
    created_unix_ms: int,
    scored_unix_ms: int,
) -> ExperienceRecord:
    group = scored.group
    return ExperienceRecord(
        run_id=run_id,
        uid=group.task.uid,
        group_id=group.task.group_id,
        sample_index=completion.sample_index,
        attempt=group.attempt,
        prompt_ids=group.task.prompt_ids,
        response_ids=completion.response_ids,
        response_mask=np.ones(completion.response_ids.size, np.bool_),
        rollout_logprobs=completion.rollout_logprobs,
        policy_version_spans=completion.policy_version_spans,
        sampling=group.sampling,
        finish_reason=completion.finish_reason,
        reward_status=result.status,
        reward=result.value,
        reward_components=_components(scored, result),
        token_rewards=np.array(result.token_values, np.float32) if result.token_values else None,
        tokenizer_hash=tokenizer_hash,
        engine_id=completion.engine_id,
        created_unix_ms=created_unix_ms,
        scored_unix_ms=scored_unix_ms,
    )


def _components(scored: ScoredGroup, result: ScoreResult) -> tuple[RewardComponent, ...]:
    """The scorer's named parts, or the score itself under the scorer's name."""
    return tuple(
        RewardComponent(
            name=name,
            service=scored.service,
            service_version=scored.service_version,
            value=value,
            status=result.status,
            latency_ms=result.latency_ms,
        )
        for name, value in (result.components or {scored.scorer: result.value}).items()
    )


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
