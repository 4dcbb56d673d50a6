"""From prompts to queued experience: generate, score, assemble records, put them into the queue.

Groups are scored and queued as they finish, while others still generate; no tokens are kept here afterwards.

Dynamic sampling: a group whose rewards are all equal is dropped before the queue. As many further prompts as groups are missing are
issued in the next round, so that no group is ever surplus: which prompts are trained depends on the order of the prompts and on the
samples alone, not on who finishes first. A batch that is still short after the last round is trained as it is.

Greedy baseline (remax): every prompt gets a greedy answer beside its samples. It is scored in the same call, its reward is written into
the records of the group, and it is neither queued nor counted among the samples.

Legend: T response tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from shoal.algo.steering import admission_capacity
from shoal.errors import ShoalError, StateError
from shoal.telemetry.logs import get_logger
from shoal.types import ExperienceRecord
from shoal_coordinator.collected import CollectedExperience
from shoal_coordinator.dispatcher import Dispatcher, GeneratedGroup, GenerationRequest
from shoal_coordinator.prompts import PromptTask
from shoal_coordinator.records import assemble_records, baseline_of, has_spread, unix_ms
from shoal_coordinator.rewards.scoring import GroupScorer, ScoredGroup, first_error
from shoal_coordinator.stage_clock import Stage, StageClock

log = get_logger(__name__)

MAX_CONCURRENT_CHUNKS = 4
PUT_TIMEOUT_S = 600.0
GREEDY_SUFFIX = "-greedy"


class RecordSink(Protocol):
    """What collecting needs of the queue (`shoal.queue.experience.ExperienceQueue`)."""

    async def put_groups(self, groups: Sequence[Sequence[ExperienceRecord]], *, timeout_s: float) -> int:
        """Add groups of records; returns how many records are new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionPlan:
    """What a step needs.

    num_groups: groups to queue. request: how to sample. greedy: how to generate the baseline; None: there is none.
    max_refills: rounds of dynamic sampling after the first; None: dynamic sampling is off.
    """

    num_groups: int
    request: GenerationRequest
    greedy: GenerationRequest | None = None
    max_refills: int | None = None

    @property
    def num_rounds(self) -> int:
        """Rounds at most."""
        return 1 if self.max_refills is None else 1 + self.max_refills


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    """A prompt's samples, and its greedy answer where one was asked for."""

    group: GeneratedGroup
    greedy: GeneratedGroup | None = None


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

    async def collect(self, take_prompts: Callable[[int], Sequence[PromptTask]], plan: CollectionPlan) -> CollectedExperience:
        """Generate, score and queue one step's groups.

        Args:
            take_prompts: issues so many prompts; called once a round.
            plan: how many groups, and how to generate them.
        Returns: scalars about what was queued; `take_groups(num_groups)` gets it.
        Raises:
            StateError: too many samples were not scored, or nothing is left; names the scorer and the first reason.
                What was scored before stays queued.
            ShoalError: a stage failed for good.
        """
        collected = CollectedExperience(num_zero_std_dropped=None if plan.max_refills is None else 0)
        for number in range(plan.num_rounds):
            num_missing = _num_missing(plan, collected)
            if num_missing == 0:
                break
            collected.num_refills = number
            collected.num_generated_groups += num_missing
            await self._collect_round(take_prompts(num_missing), plan, collected)
        self._check_share(collected, collected.num_answered)
        if not collected.rewards:
            raise StateError(self._nothing_left(collected, collected.num_generated_groups * plan.request.num_samples))
        _warn(plan, collected)
        return collected

    async def _collect_round(self, tasks: Sequence[PromptTask], plan: CollectionPlan, collected: CollectedExperience) -> None:
        work = [(task, plan.request) for task in tasks]
        if plan.greedy is not None:
            work += [(_greedy_task(task), plan.greedy) for task in tasks]
        halves: dict[str, GeneratedGroup] = {}
        slots = asyncio.Semaphore(MAX_CONCURRENT_CHUNKS)
        try:
            async with aclosing(self._dispatcher.generate_each(work)) as finished, asyncio.TaskGroup() as finishing:
                async for groups in finished:
                    if answered := _pair(groups, halves, with_greedy=plan.greedy is not None):
                        await slots.acquire()
                        finishing.create_task(self._finish(answered, plan, collected, slots))
        except* ShoalError as errors:
            raise first_error(errors) from None

    async def _finish(
        self, answered: Sequence[_Answered], plan: CollectionPlan, collected: CollectedExperience, slots: asyncio.Semaphore
    ) -> None:
        try:
            now_ms = unix_ms()
            greedy = [pair.greedy for pair in answered if pair.greedy is not None]
            scored = await self._scorer.score([*(pair.group for pair in answered), *greedy])
            baselines = {group.group.task.group_id: baseline_of(group) for group in scored[len(answered) :]}
            kept = [self._keep(group, baselines, plan, collected, now_ms) for group in scored[: len(answered)]]
            # Early, so that a dead scorer does not cost the rest of the step's generation.
            self._check_share(collected, collected.num_generated_groups * plan.request.num_samples)
            with self._clock.measure(Stage.QUEUE):
                await self._queue.put_groups([records for records in kept if records], timeout_s=PUT_TIMEOUT_S)
        finally:
            slots.release()

    def _keep(
        self,
        scored: ScoredGroup,
        baselines: dict[str, float | None],
        plan: CollectionPlan,
        collected: CollectedExperience,
        created_unix_ms: int,
    ) -> list[ExperienceRecord]:
        """The records of a group that is trained; none if it is dropped."""
        collected.add_scored(scored)
        baseline = baselines.get(scored.group.task.group_id)
        records = assemble_records(scored, self._run_id, self._tokenizer_hash, created_unix_ms, baseline)
        lacks_baseline = plan.greedy is not None and baseline is None
        if not records or lacks_baseline:
            collected.num_dropped_groups += 1
            collected.num_no_baseline += bool(records)
            return []
        if collected.num_zero_std_dropped is not None and not has_spread(records):
            collected.num_zero_std_dropped += 1
            return []
        collected.add_queued(records)
        return records

    def _check_share(self, collected: CollectedExperience, num_samples: int) -> None:
        if collected.num_unscored > self._max_unscored_share * num_samples:
            reason = collected.first_unscored_message or "the scorer gave no reason"
            raise StateError(
                f"scorer {self._scorer_name!r} left {collected.num_unscored} of {num_samples} samples unscored, above "
                f"reward.max_unscored_share {self._max_unscored_share:g}; first reason: {reason}: repair the scorer or raise the limit"
            )

    def _nothing_left(self, collected: CollectedExperience, num_samples: int) -> str:
        reason = collected.first_unscored_message
        text = (
            f"none of {num_samples} samples can be trained on: {collected.num_empty} had no token, {collected.num_missing} timed out, "
            f"scorer {self._scorer_name!r} left {collected.num_unscored} unscored{f' ({reason}): repair it' if reason else ''}"
        )
        if num_invalid := collected.num_outside_vocab + collected.num_not_finite:
            text += f"; {num_invalid} had an id that cannot be sampled or a log-probability that is not finite: look at the servers' logs"
        if collected.num_no_baseline:
            text += f"; {collected.num_no_baseline} groups had no scored greedy answer"
        if collected.num_zero_std_dropped:
            text += (
                f"; rollout.dynamic_sampling dropped {collected.num_zero_std_dropped} groups whose rewards were all equal in "
                f"{1 + collected.num_refills} rounds: the task is too hard or too easy for the policy, or raise rollout.max_refills"
            )
        return text


def _num_missing(plan: CollectionPlan, collected: CollectedExperience) -> int:
    """Groups that may start now: exactly those that the batch lacks, since nothing runs between two rounds."""
    return admission_capacity(
        max_concurrent=plan.num_groups,
        running=0,
        max_staleness=0,
        policy_version=0,
        batch_size=plan.num_groups,
        accepted=collected.num_groups,
    )


def _greedy_task(task: PromptTask) -> PromptTask:
    """The same prompt under a uid of its own, in the same group."""
    return replace(task, uid=f"{task.uid}{GREEDY_SUFFIX}")


def _pair(groups: Sequence[GeneratedGroup], halves: dict[str, GeneratedGroup], *, with_greedy: bool) -> list[_Answered]:
    """The prompts that are complete with these groups; the first of a prompt's two stays in halves until the other is there."""
    if not with_greedy:
        return [_Answered(group=group) for group in groups]
    whole: list[_Answered] = []
    for group in groups:
        other = halves.pop(group.task.group_id, None)
        if other is None:
            halves[group.task.group_id] = group
        else:
            sampled, greedy = (other, group) if group.task.uid.endswith(GREEDY_SUFFIX) else (group, other)
            whole.append(_Answered(group=sampled, greedy=greedy))
    return whole


def _warn(plan: CollectionPlan, collected: CollectedExperience) -> None:
    """Say what trains little or nothing although nothing failed."""
    num_samples = len(collected.rewards)
    if collected.num_groups < plan.num_groups and plan.max_refills is not None:
        log.warning("batch_is_short", num_groups=collected.num_groups, num_wanted=plan.num_groups, num_refills=collected.num_refills)
    if not any(collected.stopped):
        log.warning("every_response_was_cut", num_samples=num_samples, max_new_tokens=plan.request.sampling.max_new_tokens)
    if plan.request.num_samples > 1 and collected.num_zero_std == collected.num_groups:
        log.warning("no_group_has_spread", num_groups=collected.num_groups, reward=collected.rewards[0])
