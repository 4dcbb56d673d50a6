"""Shadowing: what is scored, what is compared, and that nothing of it reaches the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from shoal_coordinator.dispatcher import GeneratedGroup
from shoal_coordinator.prompts import PromptTask
from shoal_coordinator.rewards.comparison import Comparison
from shoal_coordinator.rewards.route import RouteComponent, RouteRevision
from shoal_coordinator.rewards.scored import ScoredGroup
from shoal_coordinator.rewards.shadow import (
    BYTES_PER_ID,
    MAX_LANES,
    MAX_OPEN_GROUPS,
    MAX_QUEUED_BYTES,
    MAX_QUEUED_GROUPS,
    ShadowRunner,
    is_chosen,
)

from shoal.types import FinishReason, SamplingParams, ScoreResult, ScoreSample, ScoreStatus

ACTIVE, SHADOW = 1, 2


def make_revision(number: int, *components: RouteComponent) -> RouteRevision:
    return RouteRevision(number=number, label="", components=components or (RouteComponent(scorer="new", version="2"),))


def scored_as(sample: ScoreSample, value: float, latency_ms: float = 2.0) -> ScoreResult:
    return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=value, latency_ms=latency_ms)


def failed(sample: ScoreSample, message: str = "killed") -> ScoreResult:
    return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message=message)


def make_scored(
    uid: str = "g0", values: Sequence[float] = (0.0, 1.0), revision: int = ACTIVE, source: str = "", response: str = "r"
) -> ScoredGroup:
    row: dict[str, object] = {"data_source": source} if source else {}
    task = PromptTask(uid=uid, group_id=uid, prompt_ids=np.array([1], np.int32), text="p", row=row)
    group = GeneratedGroup(task=task, attempt=1, server_id="a", sampling=SamplingParams(max_new_tokens=4), completions=())
    samples = tuple(
        ScoreSample(
            sample_id=f"{uid}/{index}/1",
            prompt="p",
            response=response,
            row=row,
            finish_reason=FinishReason.STOP,
            num_response_tokens=2,
        )
        for index in range(len(values))
    )
    results = tuple(scored_as(sample, value, 1.0) for sample, value in zip(samples, values, strict=True))
    return ScoredGroup(group=group, revision=revision, results=results, components=((),) * len(values), samples=samples)


@dataclass
class FakeRoutes:
    """Revisions in shadow with their shares."""

    active_number: int = ACTIVE
    in_shadow: dict[int, tuple[RouteRevision, float]] = field(default_factory=lambda: {SHADOW: (make_revision(SHADOW), 1.0)})

    def shadows(self) -> Sequence[tuple[RouteRevision, float]]:
        return tuple(self.in_shadow.values())


def twice_the_place(component: RouteComponent, sample: ScoreSample) -> ScoreResult:
    return scored_as(sample, 2.0 * int(sample.sample_id.split("/")[1]))


@dataclass
class FakeCalls:
    """Scores with a function; a gate of a scorer holds its calls back. most_open: calls that were open at once."""

    score_one: Callable[[RouteComponent, ScoreSample], ScoreResult] = twice_the_place
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    called: list[tuple[str, str, int]] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0

    async def score(self, component: RouteComponent, samples: Sequence[ScoreSample], num_groups: int) -> tuple[str, list[ScoreResult]]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        self.called.append((component.scorer, samples[0].sample_id.split("/")[0], num_groups))
        try:
            if (gate := self.gates.get(component.scorer)) is not None:
                await gate.wait()
            return "r", [self.score_one(component, sample) for sample in samples]
        finally:
            self.num_open -= 1


@asynccontextmanager
async def running(runner: ShadowRunner) -> AsyncIterator[None]:
    task = asyncio.create_task(runner.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop work until something has come about; the fakes need no time but the loop's turns."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the loop's own turns bring it about; nobody tells of it
            await asyncio.sleep(0)


async def compared(runner: ShadowRunner, num_groups: int, number: int = SHADOW) -> Comparison:
    await until(lambda: runner.comparison(number).num_groups >= num_groups)
    return runner.comparison(number)


async def test_shadow_scores_live_groups_and_is_compared() -> None:
    calls = FakeCalls()
    runner = ShadowRunner(FakeRoutes(), calls)
    async with running(runner):
        runner.offer(make_scored("a", (0.0, 1.0)))
        runner.offer(make_scored("b", (1.0, 0.0)))
        comparison = await compared(runner, 2)
    assert calls.called == [("new", "a", 1), ("new", "b", 1)]
    assert comparison.points == ((0, 0), (1, 2), (1, 0), (0, 2))
    assert (comparison.number, comparison.active, comparison.num_pairs, comparison.ranking_disagreement) == (SHADOW, ACTIVE, 2, 0.5)
    assert (comparison.latency_ms.active.p99, comparison.latency_ms.shadow.p99) == (1.0, 2.0)


async def test_reward_of_the_shadow_is_combined_as_the_active_ones_is() -> None:
    def score_one(component: RouteComponent, sample: ScoreSample) -> ScoreResult:
        if component.scorer == "parts":
            return replace(scored_as(sample, 9.0), components={"form": 3.0, "style": 6.0})
        return scored_as(sample, 1.0) if component.scorer == "one" or sample.sample_id.startswith("a/0") else failed(sample)

    components = (
        RouteComponent(scorer="parts", weight=2.0, parts={"form": 0.5}),
        RouteComponent(scorer="one", sources=("math",), weight=10.0),
        RouteComponent(scorer="other", sources=("code",)),
        RouteComponent(scorer="optional", is_required=False, weight=100.0),
    )
    calls = FakeCalls(score_one)
    runner = ShadowRunner(FakeRoutes(in_shadow={SHADOW: (make_revision(SHADOW, *components), 1.0)}), calls)
    async with running(runner):
        runner.offer(make_scored("a", source="math"))
        comparison = await compared(runner, 1)
    # 2 x 0.5 x 3 + 10 x 1; the optional one lacks a sibling's score.
    assert comparison.points == ((0, 13), (1, 13))
    assert {scorer for scorer, _, _ in calls.called} == {"parts", "one", "optional"}


async def test_failing_shadow_shows_as_errors_with_the_first_one() -> None:
    runner = ShadowRunner(FakeRoutes(), FakeCalls(lambda component, sample: failed(sample, f"killed at {sample.sample_id}")))
    async with running(runner):
        runner.offer(make_scored("a"))
        comparison = await compared(runner, 1)
    assert (comparison.num_groups, comparison.num_samples, comparison.error_share.shadow, comparison.error_share.active) == (1, 0, 1.0, 0.0)
    assert comparison.first_error == "new@2: killed at a/0/1"


@pytest.mark.parametrize("fault", ["raises", "answers too little"])
async def test_fault_of_a_group_is_counted_and_shadowing_goes_on(fault: str) -> None:
    class Faulty(FakeCalls):
        async def score(self, component: RouteComponent, samples: Sequence[ScoreSample], num_groups: int) -> tuple[str, list[ScoreResult]]:
            service, results = await super().score(component, samples, num_groups)
            if samples[0].sample_id.startswith("bad"):
                if fault == "raises":
                    raise RuntimeError("broken")
                return service, results[:1]
            return service, results

    runner = ShadowRunner(FakeRoutes(), Faulty())
    async with running(runner):
        runner.offer(make_scored("bad"))
        runner.offer(make_scored("good"))
        comparison = await compared(runner, 2)
    assert (comparison.num_samples, comparison.error_share.shadow) == (2, 0.5)
    assert comparison.first_error is not None
    assert comparison.first_error.startswith("RuntimeError: broken" if fault == "raises" else "IndexError")


async def test_hanging_shadow_holds_few_calls_and_groups_beyond_its_queue_are_dropped() -> None:
    calls = FakeCalls(gates={"new": asyncio.Event()})
    runner = ShadowRunner(FakeRoutes(), calls)
    async with running(runner):
        runner.offer(make_scored("first"))
        await until(lambda: calls.num_open == 1)
        num_groups = MAX_OPEN_GROUPS + MAX_QUEUED_GROUPS + 10
        for number in range(1, num_groups):
            runner.offer(make_scored(f"g{number}"))
        num_dropped = num_groups - 1 - MAX_QUEUED_GROUPS
        assert runner.comparison(SHADOW).num_dropped == num_dropped
        await until(lambda: calls.num_open == MAX_OPEN_GROUPS)
        calls.gates["new"].set()
        comparison = await compared(runner, num_groups - num_dropped)
        assert (comparison.num_dropped, comparison.error_share.shadow) == (num_dropped, 0.0)
        assert calls.most_open == MAX_OPEN_GROUPS


async def test_hanging_shadow_does_not_keep_another_from_its_comparison() -> None:
    hanging = make_revision(3, RouteComponent(scorer="hangs"))
    calls = FakeCalls(gates={"hangs": asyncio.Event()})
    runner = ShadowRunner(FakeRoutes(in_shadow={3: (hanging, 1.0), SHADOW: (make_revision(SHADOW), 1.0)}), calls)
    async with running(runner):
        for number in range(2 * MAX_OPEN_GROUPS):
            runner.offer(make_scored(f"g{number}"))
        comparison = await compared(runner, 2 * MAX_OPEN_GROUPS)
        assert (comparison.num_samples, runner.comparison(3).num_groups) == (4 * MAX_OPEN_GROUPS, 0)


async def test_queue_is_bounded_by_what_it_holds_in_memory_too() -> None:
    runner = ShadowRunner(FakeRoutes(), FakeCalls())
    huge = "x" * (MAX_QUEUED_BYTES // 2)
    for number in range(4):
        runner.offer(make_scored(f"g{number}", (1.0,), response=huge))
    # Two and their prompts are more than the bound.
    assert runner.comparison(SHADOW).num_dropped == 3
    async with running(runner):
        await compared(runner, 1)
        for name in ("later", "last"):
            runner.offer(make_scored(name, (1.0,), response="x" * (MAX_QUEUED_BYTES // 3)))
        assert (await compared(runner, 3)).num_dropped == 3


async def test_token_ids_count_as_memory() -> None:
    runner = ShadowRunner(FakeRoutes(), FakeCalls())
    scored = make_scored("g", (1.0,))
    (sample,) = scored.samples
    ids = tuple(range(MAX_QUEUED_BYTES // BYTES_PER_ID // 2 + 1))
    for _ in range(3):
        runner.offer(replace(scored, samples=(replace(sample, response_ids=ids),)))
    assert runner.comparison(SHADOW).num_dropped == 2


async def test_offer_never_raises_whatever_is_wrong() -> None:
    runner = ShadowRunner(FakeRoutes(), FakeCalls())
    broken = replace(make_scored(), results=())
    runner.offer(broken)
    runner.offer(replace(make_scored(), samples=()))
    assert runner.comparison(SHADOW).num_groups == 0
    async with running(runner):
        runner.offer(make_scored())
        assert (await compared(runner, 1)).num_groups == 1


async def test_share_takes_the_same_groups_every_time_and_others_for_another_revision() -> None:
    ids = [f"e0-i{index}" for index in range(4000)]
    chosen = {number: [group_id for group_id in ids if is_chosen(group_id, number, 0.25)] for number in (2, 3)}
    assert 800 < len(chosen[2]) < 1200
    assert 150 < len(set(chosen[2]) & set(chosen[3])) < 350
    assert [is_chosen(group_id, 2, 0.0) for group_id in ids] == [False] * len(ids)
    assert [is_chosen(group_id, 2, 1.0) for group_id in ids] == [True] * len(ids)
    assert set(chosen[2]) < {group_id for group_id in ids if is_chosen(group_id, 2, 0.5)}


async def test_only_the_share_is_scored() -> None:
    calls = FakeCalls()
    runner = ShadowRunner(FakeRoutes(in_shadow={SHADOW: (make_revision(SHADOW), 0.5)}), calls)
    async with running(runner):
        ids = [f"g{number}" for number in range(40)]
        for uid in ids:
            runner.offer(make_scored(uid))
        wanted = [uid for uid in ids if is_chosen(uid, SHADOW, 0.5)]
        await compared(runner, len(wanted))
    assert [uid for _, uid, _ in calls.called] == wanted
    assert 0 < len(wanted) < 40


async def test_comparison_starts_again_with_another_active_revision() -> None:
    routes, calls = FakeRoutes(), FakeCalls(gates={"new": asyncio.Event()})
    runner = ShadowRunner(routes, calls)
    async with running(runner):
        for number in range(2 * MAX_OPEN_GROUPS):
            runner.offer(make_scored(f"old{number}"))
        await until(lambda: calls.num_open == MAX_OPEN_GROUPS)
        routes.active_number = 5
        runner.offer(make_scored("pinned to the earlier one"))
        runner.offer(make_scored("new", (3.0, 4.0), revision=5))
        calls.gates["new"].set()
        comparison = await compared(runner, 1)
        await until(lambda: calls.num_open == 0)
        assert runner.comparison(SHADOW) == comparison
    assert (comparison.active, comparison.points, comparison.num_dropped) == (5, ((3, 0), (4, 2)), 0)
    assert [uid for _, uid, _ in calls.called] == [*(f"old{number}" for number in range(MAX_OPEN_GROUPS)), "new"]


async def test_comparison_stays_after_the_shadow_has_ended_until_it_is_forgotten() -> None:
    routes = FakeRoutes()
    runner = ShadowRunner(routes, FakeCalls())
    async with running(runner):
        runner.offer(make_scored())
        await compared(runner, 1)
        routes.in_shadow.clear()
        runner.offer(make_scored("after"))
        assert runner.comparison(SHADOW).num_groups == 1
        runner.forget(SHADOW)
        assert runner.comparison(SHADOW) == Comparison(number=SHADOW, active=ACTIVE)
        runner.forget(SHADOW)


async def test_comparisons_of_ended_shadows_are_bounded_and_the_oldest_go_first() -> None:
    routes = FakeRoutes(in_shadow={})
    runner = ShadowRunner(routes, FakeCalls())
    async with running(runner):
        for number in range(2, MAX_LANES + 4):
            routes.in_shadow = {number: (make_revision(number), 1.0)}
            runner.offer(make_scored())
            await compared(runner, 1, number)
        kept = [number for number in range(2, MAX_LANES + 4) if runner.comparison(number).num_groups]
    assert kept == list(range(4, MAX_LANES + 4))


async def test_group_of_a_source_that_no_component_scores_is_not_scored_and_no_error() -> None:
    revision = make_revision(SHADOW, RouteComponent(scorer="new", sources=("code",)))
    runner = ShadowRunner(FakeRoutes(in_shadow={SHADOW: (revision, 1.0)}), FakeCalls())
    async with running(runner):
        runner.offer(make_scored(source="math"))
        comparison = await compared(runner, 1)
    assert (comparison.error_share.shadow, comparison.not_scored_share.shadow, comparison.num_samples) == (0.0, 1.0, 0)


async def test_cancelling_ends_the_open_calls() -> None:
    calls = FakeCalls(gates={"new": asyncio.Event()})
    runner = ShadowRunner(FakeRoutes(), calls)
    async with running(runner):
        runner.offer(make_scored())
        await until(lambda: calls.num_open == 1)
    assert calls.num_open == 0
