"""Scores a share of the live groups by revisions in shadow, beside the active one; nothing of it reaches a reward.

Invariants:
- `offer` neither waits nor raises. A lane (one revision) has a bounded queue; a group that does not fit is dropped and counted, so a
  slow, hanging or dead shadow costs its own comparison and nothing else.
- A revision has at most MAX_OPEN_GROUPS groups at its servers, so one that hangs does not keep another from being compared. The calls
  are not those of live groups: they share servers, but neither turns nor breakers.
- A comparison is with one active revision: when another becomes active it starts again, and groups that are still pinned to the
  earlier one are left out. It is kept in memory alone: a coordinator that starts again compares from the beginning.

Used from the event loop alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from shoal.errors import ShoalError
from shoal.telemetry.logs import get_logger
from shoal.types import ScoreResult, ScoreSample, ScoreStatus
from shoal_coordinator.rewards.combine import combine, with_parts
from shoal_coordinator.rewards.comparison import Comparison, ComparisonTally, Verdict, compare_group, verdicts_of
from shoal_coordinator.rewards.route import RouteComponent, RouteRevision
from shoal_coordinator.rewards.scored import ComponentResult, ScoredGroup
from shoal_coordinator.rewards.scoring import source_of

log = get_logger(__name__)

MAX_OPEN_GROUPS = 4
MAX_QUEUED_GROUPS = 64
MAX_QUEUED_BYTES = 64 << 20
"""Of texts and token ids in memory; a queue of a few huge answers is full before it has MAX_QUEUED_GROUPS."""
BYTES_PER_ID = 36
"""A Python integer and its place in a tuple."""
MAX_LANES = 8
"""Comparisons that are kept; the oldest of revisions that no longer shadow are forgotten first."""


class ShadowRoutes(Protocol):
    """What shadowing needs of the routes (`shoal_coordinator.rewards.book.RouteBook`)."""

    @property
    def active_number(self) -> int:
        """Number of the active revision; 0 before there is one."""
        ...

    def shadows(self) -> Sequence[tuple[RouteRevision, float]]:
        """Revisions in shadow, each with its share of the groups."""
        ...


class ShadowCalls(Protocol):
    """How shadowing reaches reward servers (`shoal_coordinator.rewards.calls.ScorerCalls`)."""

    async def score(self, component: RouteComponent, samples: Sequence[ScoreSample], num_groups: int) -> tuple[str, list[ScoreResult]]:
        """Score samples within the component's deadline; a failing service gives error results."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A group for one revision. active: what the active revision said. num_bytes: of its texts and ids."""

    revision: RouteRevision
    tally: ComparisonTally
    source: str
    samples: tuple[ScoreSample, ...]
    active: tuple[Verdict, ...]
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class _Lane:
    """What one revision has to do. queue: groups that wait; num_open: groups at the servers."""

    tally: ComparisonTally
    queue: deque[_Work] = field(default_factory=deque)
    queued_bytes: int = 0
    num_open: int = 0

    def put(self, work: _Work) -> None:
        """Queue a group, or count it as dropped; a group alone always fits."""
        is_full = len(self.queue) >= MAX_QUEUED_GROUPS or self.queued_bytes + work.num_bytes > MAX_QUEUED_BYTES
        if self.queue and is_full:
            self.tally.num_dropped += 1
            return
        self.queue.append(work)
        self.queued_bytes += work.num_bytes

    def take(self) -> _Work | None:
        """The next group that may go to the servers now."""
        if not self.queue or self.num_open >= MAX_OPEN_GROUPS:
            return None
        work = self.queue.popleft()
        self.queued_bytes -= work.num_bytes
        self.num_open += 1
        return work

    def restart(self, tally: ComparisonTally) -> None:
        """Compare from the beginning; groups that wait are of the earlier comparison."""
        self.tally = tally
        self.queue.clear()
        self.queued_bytes = 0


class ShadowRunner:
    """Scores live groups by the revisions in shadow and keeps the comparisons.

    Args:
        routes: which revision is active, and which are in shadow.
        calls: the way to the servers; not that of live groups, which must not wait for its turns.
        source_key: column that names a row's source.
    """

    def __init__(self, routes: ShadowRoutes, calls: ShadowCalls, *, source_key: str = "data_source") -> None:
        self._routes = routes
        self._calls = calls
        self._source_key = source_key
        self._lanes: dict[int, _Lane] = {}
        self._wake = asyncio.Event()

    def offer(self, scored: ScoredGroup) -> None:
        """Queue a group that the active revision has scored, for each revision in shadow whose share it belongs to."""
        try:
            self._offer(scored)
        except Exception:  # whatever it is, the groups that are trained must not feel it
            log.exception("shadow_offer_failed", group_id=scored.group.task.group_id)

    async def run(self) -> None:
        """Score what is offered, until cancelled."""
        async with asyncio.TaskGroup() as scoring:
            while True:
                self._wake.clear()
                for lane in self._lanes.values():
                    while (work := lane.take()) is not None:
                        scoring.create_task(self._score(lane, work))
                await self._wake.wait()

    def comparison(self, number: int) -> Comparison:
        """How a revision compares with the active one; without samples if it has not been in shadow since the coordinator started."""
        lane = self._lanes.get(number)
        return Comparison(number=number, active=self._routes.active_number) if lane is None else lane.tally.comparison()

    def forget(self, number: int) -> None:
        """Drop a revision's comparison and the groups that wait for it."""
        self._lanes.pop(number, None)

    def _offer(self, scored: ScoredGroup) -> None:
        active = self._routes.active_number
        if scored.revision != active or not scored.samples:
            return
        group_id = scored.group.task.group_id
        for revision, share in self._routes.shadows():
            if is_chosen(group_id, revision.number, share):
                lane = self._lane(revision.number, active)
                lane.put(self._work(scored, revision, lane.tally))
                self._wake.set()

    def _lane(self, number: int, active: int) -> _Lane:
        lane = self._lanes.get(number)
        if lane is None:
            self._forget_oldest()
            lane = self._lanes[number] = _Lane(tally=ComparisonTally(number, active))
        elif lane.tally.active != active:
            lane.restart(ComparisonTally(number, active))
        return lane

    def _forget_oldest(self) -> None:
        shadows = {revision.number for revision, _ in self._routes.shadows()}
        over = [number for number in self._lanes if number not in shadows]
        for number in over[: max(0, len(self._lanes) - MAX_LANES + 1)]:
            self.forget(number)

    def _work(self, scored: ScoredGroup, revision: RouteRevision, tally: ComparisonTally) -> _Work:
        if len(scored.results) != len(scored.samples):
            raise ShoalError(f"{len(scored.results)} results for {len(scored.samples)} samples: a group has one result per sample")
        return _Work(
            revision=revision,
            tally=tally,
            source=source_of(scored.group, self._source_key),
            samples=scored.samples,
            active=verdicts_of(scored.results),
            num_bytes=_num_bytes(scored.samples),
        )

    async def _score(self, lane: _Lane, work: _Work) -> None:
        try:
            results = await self._results(work)
            work.tally.add(compare_group(work.samples, work.active, verdicts_of(results), _first_error(results)))
        except Exception as error:  # one group is lost to the comparison, not the comparison
            log.exception("shadow_group_failed", revision=work.revision.number)
            failed = Verdict(status=ScoreStatus.ERROR, value=0.0, latency_ms=None)
            work.tally.add(compare_group(work.samples, work.active, (failed,) * len(work.samples), _text_of(error)))
        finally:
            lane.num_open -= 1
            self._wake.set()

    async def _results(self, work: _Work) -> list[ScoreResult]:
        """What the revision says of a group, combined as the active one's is."""
        components = work.revision.components_for(work.source)
        async with asyncio.TaskGroup() as calls:
            tasks = [calls.create_task(self._calls.score(component, work.samples, 1)) for component in components]
        answers = [(component, *task.result()) for component, task in zip(components, tasks, strict=True)]
        by_sample = [[_component_result(answer, place) for answer in answers] for place in range(len(work.samples))]
        return combine(work.samples, by_sample)


def _component_result(answer: tuple[RouteComponent, str, list[ScoreResult]], place: int) -> ComponentResult:
    component, service, results = answer
    return with_parts(ComponentResult(component=component, service=service, result=results[place]))


def is_chosen(group_id: str, number: int, share: float) -> bool:
    """Whether a group belongs to the share of a revision; the same groups for the same revision, others for another."""
    return int(xxhash.xxh3_64_intdigest(f"{number}/{group_id}".encode())) < share * 2.0**64


def _num_bytes(samples: Sequence[ScoreSample]) -> int:
    """What a group holds in memory, about; siblings share their prompt."""
    prompt = len(samples[0].prompt) + BYTES_PER_ID * len(samples[0].prompt_ids)
    return prompt + sum(len(sample.response) + BYTES_PER_ID * len(sample.response_ids) for sample in samples)


def _first_error(results: Sequence[ScoreResult]) -> str:
    return next((result.message or "no reason given" for result in results if result.status is ScoreStatus.ERROR), "")


def _text_of(error: Exception) -> str:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
