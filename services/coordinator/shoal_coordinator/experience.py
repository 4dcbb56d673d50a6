"""From prompts to queued experience: generate, score, assemble records, put them into the queue.

Groups are scored and queued as they finish, while others still generate; no tokens are kept here afterwards. Each group is pinned to the
active revision of the reward route when its prompt is issued, and scored by it whatever becomes active meanwhile.

Groups that lack scores are held back until the round ends. Are there too many by then, or surely will be, the run pauses with an alert;
once it is resumed they are scored again, as wholes, by the revision that is active then, as is everything that was not scored yet. What
is queued is never scored again. Are there few, they are queued without the samples that have no score.

Dynamic sampling: a group whose rewards are all equal is dropped before the queue. As many further prompts as groups are missing are
issued in the next round, so that no group is ever surplus: which prompts are trained depends on the order of the prompts and on the
samples alone, not on who finishes first. A batch that is still short after the last round is trained as it is.

Greedy baseline (remax): every prompt gets a greedy answer beside its samples. It is scored with them, its reward is written into
the records of the group, and it is neither queued nor counted among the samples.

Legend: T response tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from shoal.algo.steering import admission_capacity
from shoal.errors import ShoalError, StateError
from shoal.telemetry.logs import get_logger
from shoal.types import ExperienceRecord
from shoal_coordinator.alerts import Attention
from shoal_coordinator.collected import CollectedExperience
from shoal_coordinator.dispatcher import Dispatcher, GeneratedGroup, GenerationRequest
from shoal_coordinator.error_groups import first_error
from shoal_coordinator.prompts import PromptTask
from shoal_coordinator.records import assemble_records, baseline_of, has_spread, unix_ms
from shoal_coordinator.rewards.group_pins import GroupPins
from shoal_coordinator.rewards.scored import RouteSource, SampleListener, ScoredGroup, ScoredGroupListener
from shoal_coordinator.rewards.scoring import GroupScorer
from shoal_coordinator.rewards.unscored import is_whole, num_unscored, unscored_alert
from shoal_coordinator.stage_clock import Stage, StageClock

log = get_logger(__name__)

MAX_CONCURRENT_CHUNKS = 16
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
    """A prompt's samples, and its greedy answer where one was asked for; generated at created_unix_ms."""

    group: GeneratedGroup
    greedy: GeneratedGroup | None = None
    created_unix_ms: int = 0

    @property
    def group_id(self) -> str:
        """The prompt's group."""
        return self.group.task.group_id


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """The same, scored by one revision, after the round's num_pauses-th pause."""

    answered: _Answered
    group: ScoredGroup
    greedy: ScoredGroup | None
    num_pauses: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing lacks a score."""
        return is_whole(self.group) and (self.greedy is None or is_whole(self.greedy))


@dataclass(slots=True, kw_only=True)
class _Round:
    """Groups that were issued together.

    held: groups that lack scores. going: cleared while the run is paused for them. num_pauses: after the first, groups take the active
    revision when they are scored. deciding: one task at a time decides about what is held.
    """

    plan: CollectionPlan
    collected: CollectedExperience
    pins: GroupPins
    held: list[_Scored] = field(default_factory=list)
    going: asyncio.Event = field(default_factory=asyncio.Event)
    deciding: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_pauses: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        self.going.set()

    @property
    def num_unscored(self) -> int:
        """Samples of the step that have no score so far."""
        return self.collected.num_unscored + num_unscored(each.group for each in self.held)

    @property
    def num_samples(self) -> int:
        """Samples that the step asks scorers for: all that were issued while more may come, those that came once it is over."""
        if not self.is_over:
            return self.collected.num_generated_groups * self.plan.request.num_samples
        return self.collected.num_answered + sum(len(each.group.results) for each in self.held)

    @property
    def has_failed_before_the_pause(self) -> bool:
        """Whether something held was being scored when the run paused last."""
        return any(each.num_pauses < self.num_pauses for each in self.held)

    def lacks_too_many(self, max_share: float) -> bool:
        """Whether the run has to pause for what is held; also if not a single sample has a score."""
        if not num_unscored(each.group for each in self.held):
            return False
        has_none = self.is_over and self.num_unscored == self.num_samples
        return has_none or self.num_unscored > max_share * self.num_samples


class ExperienceCollector:
    """Runs the generate-score-queue part of a step; used from the event loop alone.

    Args:
        dispatcher, scorer, queue: the three stages.
        routes: by which revision new groups are scored.
        attention: pauses the run.
        clock: counts queue time (the other two count their own).
        run_id, tokenizer_hash: written into every record.
        max_unscored_share: see `RewardSection`.
        shadow, probes: look on; they are told of every group once its records are queued.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        scorer: GroupScorer,
        queue: RecordSink,
        *,
        routes: RouteSource,
        attention: Attention,
        clock: StageClock,
        run_id: str,
        tokenizer_hash: str,
        max_unscored_share: float,
        shadow: ScoredGroupListener | None = None,
        probes: SampleListener | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._scorer = scorer
        self._queue = queue
        self._routes = routes
        self._attention = attention
        self._clock = clock
        self._run_id = run_id
        self._tokenizer_hash = tokenizer_hash
        self._max_unscored_share = max_unscored_share
        self._shadow = shadow
        self._probes = probes

    async def collect(self, take_prompts: Callable[[int], Sequence[PromptTask]], plan: CollectionPlan) -> CollectedExperience:
        """Generate, score and queue one step's groups.

        Args:
            take_prompts: issues so many prompts; called once a round.
            plan: how many groups, and how to generate them.
        Returns: scalars about what was queued; `take_groups(num_groups)` gets it.
        Raises:
            StateError: nothing can be trained on; says why. What was scored before stays queued.
            StoppedWhilePausedError: the run was stopped while it was paused for unscored samples.
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
        if not collected.rewards:
            raise StateError(_nothing_left(collected, collected.num_generated_groups * plan.request.num_samples))
        _warn(plan, collected)
        return collected

    async def _collect_round(self, tasks: Sequence[PromptTask], plan: CollectionPlan, collected: CollectedExperience) -> None:
        with GroupPins(self._routes, [task.group_id for task in tasks]) as pins:
            issued = _Round(plan=plan, collected=collected, pins=pins)
            await self._generate(tasks, issued)
            issued.is_over = True
            await self._pause_for_held(issued)
            await self._queue_groups(issued.held, issued)

    async def _generate(self, tasks: Sequence[PromptTask], issued: _Round) -> None:
        plan = issued.plan
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
                        finishing.create_task(self._finish(answered, issued, slots))
        except* ShoalError as errors:
            raise first_error(errors) from None

    async def _finish(self, answered: Sequence[_Answered], issued: _Round, slots: asyncio.Semaphore) -> None:
        try:
            await issued.going.wait()
            await self._take(await self._score(answered, issued), issued)
            # Early, so that a dead scorer does not cost the rest of the step's generation.
            await self._pause_for_held(issued)
        finally:
            slots.release()

    async def _score(self, answered: Sequence[_Answered], issued: _Round) -> list[_Scored]:
        work = []
        for each in answered:
            if issued.num_pauses:
                issued.pins.renew(each.group_id)
            revision = issued.pins.revision(each.group_id)
            work += [(group, revision) for group in (each.group, each.greedy) if group is not None]
        num_pauses = issued.num_pauses
        scored = iter(await self._scorer.score(work))
        return [
            _Scored(answered=each, group=next(scored), greedy=None if each.greedy is None else next(scored), num_pauses=num_pauses)
            for each in answered
        ]

    async def _take(self, scored: Sequence[_Scored], issued: _Round) -> None:
        """Queue what has all its scores, hold the rest."""
        issued.held += [each for each in scored if not each.is_whole]
        await self._queue_groups([each for each in scored if each.is_whole], issued)

    async def _pause_for_held(self, issued: _Round) -> None:
        """Pause the run as long as too many samples have no score; whenever it is resumed, score what is held again."""
        async with issued.deciding:
            while issued.lacks_too_many(self._max_unscored_share):
                # What failed before the last pause says nothing about now.
                if not issued.has_failed_before_the_pause:
                    await self._pause(issued)
                held, issued.held = issued.held, []
                issued.collected.num_rescored_groups += len(held)
                await self._take(await self._score([each.answered for each in held], issued), issued)

    async def _pause(self, issued: _Round) -> None:
        what = (
            f"{issued.num_unscored} of {issued.num_samples} samples of the step have no score; reward.max_unscored_share is "
            f"{self._max_unscored_share:g}"
        )
        issued.going.clear()
        await self._attention.wait_for_resume(unscored_alert([each.group for each in issued.held], what))
        issued.num_pauses += 1
        issued.going.set()

    async def _queue_groups(self, scored: Sequence[_Scored], issued: _Round) -> None:
        if not scored:
            return
        kept = [self._keep(each, issued) for each in scored]
        with self._clock.measure(Stage.QUEUE):
            await self._queue.put_groups([records for records in kept if records], timeout_s=PUT_TIMEOUT_S)
        for each in scored:
            if self._shadow is not None:
                self._shadow.offer(each.group)
            if self._probes is not None:
                self._probes.note(each.group.samples)
            issued.pins.release(each.answered.group_id)

    def _keep(self, scored: _Scored, issued: _Round) -> list[ExperienceRecord]:
        """The records of a group that is trained; none if it is dropped."""
        collected = issued.collected
        collected.add_scored(scored.group)
        baseline = None if scored.greedy is None else baseline_of(scored.greedy)
        records = assemble_records(scored.group, self._run_id, self._tokenizer_hash, scored.answered.created_unix_ms, baseline)
        lacks_baseline = scored.greedy is not None and baseline is None
        if not records or lacks_baseline:
            collected.num_dropped_groups += 1
            collected.num_no_baseline += bool(records)
            return []
        if collected.num_zero_std_dropped is not None and not has_spread(records):
            collected.num_zero_std_dropped += 1
            return []
        collected.add_queued(records)
        return records


def _nothing_left(collected: CollectedExperience, num_samples: int) -> str:
    reason = collected.first_unscored_message
    text = (
        f"none of {num_samples} samples can be trained on: {collected.num_empty} had no token, {collected.num_missing} timed out, "
        f"{collected.num_unscored} were not scored{f' ({reason})' if reason else ''}"
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
    now_ms = unix_ms()
    if not with_greedy:
        return [_Answered(group=group, created_unix_ms=now_ms) for group in groups]
    whole: list[_Answered] = []
    for group in groups:
        other = halves.pop(group.task.group_id, None)
        if other is None:
            halves[group.task.group_id] = group
        else:
            sampled, greedy = (other, group) if group.task.uid.endswith(GREEDY_SUFFIX) else (group, other)
            whole.append(_Answered(group=sampled, greedy=greedy, created_unix_ms=now_ms))
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
