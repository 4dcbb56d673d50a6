"""Scoring groups by the revision that each is pinned to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from shoal_coordinator.dispatcher import GeneratedGroup
from shoal_coordinator.rewards.call_sizes import GROUPS_PER_CALL
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.route import RouteRevision
from shoal_coordinator.rewards.scored import ScoredGroup
from shoal_coordinator.rewards.scoring import GroupScorer
from shoal_coordinator.stage_clock import StageClock

from shoal.config.models import RewardSection
from shoal.errors import DeadlineError
from shoal.types import FinishReason, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_fakes import FakeReward, FakeTokenizer, make_completion, make_request, make_task, offered, reward_pool
from tests.helpers.routes import component, revision, revision_of

ROUTE = revision()


def make_group(uid: str = "e0-i0", num_samples: int = 2) -> GeneratedGroup:
    completions = tuple(make_completion(index, [index, 9]) for index in range(num_samples))
    return GeneratedGroup(task=make_task(uid), attempt=1, server_id="a", sampling=make_request().sampling, completions=completions)


def scorer_on(**servers: FakeReward) -> GroupScorer:
    calls = ScorerCalls(reward_pool(**servers), max_open_requests=64, random_unit=lambda: 0.0)
    return GroupScorer(calls, FakeTokenizer(), StageClock(), source_key="kind")


async def score(server: FakeReward, *groups: GeneratedGroup, route: RouteRevision = ROUTE) -> list[ScoredGroup]:
    return await scorer_on(r=server).score([(group, route) for group in groups])


def statuses(scored: ScoredGroup) -> list[ScoreStatus]:
    return [result.status for result in scored.results]


async def test_scorer_sends_text_row_ids_and_lengths_of_several_groups_in_one_call() -> None:
    server = FakeReward(scorers=offered("sum", needs_token_ids=True))
    first, second = await score(server, make_group("x"), make_group("y", 3), route=revision(component(timeout_s=2.0)))
    ((one, *_, last),) = server.calls
    assert (one.sample_id, one.prompt, one.response, one.row) == ("x/0/1", "prompt x", "0 9", {"answer": "x"})
    assert (last.sample_id, last.response, last.num_response_tokens, last.finish_reason) == ("y/2/1", "2 9", 2, FinishReason.STOP)
    assert (last.prompt_ids, last.response_ids) == ((1, 2, 3), (2, 9))
    assert (first.revision, first.components[0][0].service, first.components[0][0].component.scorer) == (1, "r", "sum")
    assert [result.sample_id for result in second.results] == ["y/0/1", "y/1/1", "y/2/1"]
    assert [sample.sample_id for sample in second.samples] == ["y/0/1", "y/1/1", "y/2/1"]
    assert server.timeouts_s[0] == pytest.approx(4.0, abs=0.5)


async def test_many_groups_are_split_over_calls_and_stay_in_order() -> None:
    server = FakeReward()
    scored = await score(server, *(make_group(f"g{index}") for index in range(2 * GROUPS_PER_CALL + 1)))
    assert sorted(map(len, server.calls)) == [2, 2 * GROUPS_PER_CALL, 2 * GROUPS_PER_CALL]
    assert [group.group.task.uid for group in scored] == [f"g{index}" for index in range(2 * GROUPS_PER_CALL + 1)]


async def test_group_without_completions_needs_no_call() -> None:
    server = FakeReward()
    (scored,) = await score(server, make_group(num_samples=0))
    assert (scored.results, scored.components, server.calls) == ((), (), [])


async def test_statuses_are_kept_apart() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        if sample.sample_id.startswith("x/0"):
            return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.NOT_SCORED, message="no answer in the row")
        if sample.sample_id.startswith("x/1"):
            return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message="raised")
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=0.0)

    (scored,) = await score(FakeReward(score_one), make_group("x", 3))
    assert statuses(scored) == [ScoreStatus.NOT_SCORED, ScoreStatus.ERROR, ScoreStatus.SCORED]
    assert [result.message for result in scored.results] == ["sum@3: no answer in the row", "sum@3: raised", ""]


async def test_failed_call_leaves_samples_unscored_and_never_zero() -> None:
    (scored,) = await score(FakeReward(failures=[DeadlineError("late")]), make_group())
    assert statuses(scored) == [ScoreStatus.ERROR] * 2
    assert scored.results[0].message == "sum@3 failed on 'r': DeadlineError: late"
    assert scored.components[0][0].service == "r"


def group_of(source: str, uid: str, num_samples: int = 2) -> GeneratedGroup:
    group = make_group(uid, num_samples)
    return replace(group, task=replace(group.task, row={"answer": uid, "kind": source}))


BY_SOURCE = revision_of(RewardSection(sources={"sums": "exact", "code": "run", "maths": "exact"}))


async def test_groups_of_one_step_go_to_the_scorers_of_their_sources() -> None:
    """R72."""
    server = FakeReward()
    groups = [group_of(source, f"g{place}") for place, source in enumerate(("code", "sums", "code", "maths"))]
    scored = await score(server, *groups, route=BY_SOURCE)
    names = [{own.component.scorer for sample in group.components for own in sample} for group in scored]
    assert names == [{"run"}, {"exact"}, {"run"}, {"exact"}]
    assert [[result.sample_id for result in group.results] for group in scored] == [
        [f"g{place}/{i}/1" for i in (0, 1)] for place in range(4)
    ]
    uids = [sorted({sample.sample_id.split("/")[0] for sample in call}) for call in server.calls]
    assert sorted(zip(server.asked, uids, strict=True)) == [(("exact", "3"), ["g1", "g3"]), (("run", "3"), ["g0", "g2"])]


async def test_order_is_kept_when_calls_of_several_scorers_are_split() -> None:
    sources = ["code" if place % 3 else "sums" for place in range(4 * GROUPS_PER_CALL)]
    scored = await score(FakeReward(), *(group_of(source, f"g{place}", 1) for place, source in enumerate(sources)), route=BY_SOURCE)
    assert [group.group.task.uid for group in scored] == [f"g{place}" for place in range(4 * GROUPS_PER_CALL)]


async def test_row_of_a_source_that_the_route_leaves_out_is_not_scored() -> None:
    server = FakeReward()
    (scored,) = await score(server, group_of("poems", "g0"), route=BY_SOURCE)
    assert (statuses(scored), server.calls) == ([ScoreStatus.NOT_SCORED] * 2, [])


class Worth(FakeReward):
    """Each scorer gives everything the same."""

    def __init__(self, **values: float) -> None:
        super().__init__()
        self.values = values

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """See the class."""
        _, results = await super().score(scorer, version, samples, timeout_s=timeout_s)
        return version, [replace(result, value=self.values[scorer]) for result in results]


async def test_each_group_is_scored_by_the_revision_that_it_is_pinned_to() -> None:
    old, new = revision(component("sum")), revision(component("exact"), component("judge", weight=10.0), number=2)
    server = Worth(sum=1.0, exact=2.0, judge=3.0)
    scored = await scorer_on(r=server).score([(make_group("a"), old), (make_group("b"), new), (make_group("c"), old)])
    assert [(group.revision, [result.value for result in group.results]) for group in scored] == [
        (1, [1.0, 1.0]),
        (2, [32.0, 32.0]),
        (1, [1.0, 1.0]),
    ]
    assert sorted(name for name, _ in server.asked) == ["exact", "judge", "sum"], "one call of each"


async def test_revisions_that_share_a_scorer_share_its_calls_and_weigh_it_apart() -> None:
    server = Worth(sum=1.0)
    once, twice = revision(component("sum")), revision(component("sum", weight=2.0), number=2)
    first, second = await scorer_on(r=server).score([(make_group("a"), once), (make_group("b"), twice)])
    assert (first.results[0].value, second.results[0].value, len(server.calls)) == (1.0, 2.0, 1)


async def test_groups_of_one_prompt_are_combined_alike() -> None:
    """A greedy answer is compared with the samples: what is left out for one is left out for all."""

    def score_one(sample: ScoreSample) -> ScoreResult:
        lacks = sample.sample_id.startswith("x-greedy")
        status = ScoreStatus.ERROR if lacks and server.asked[-1][0] == "judge" else ScoreStatus.SCORED
        return ScoreResult(sample_id=sample.sample_id, status=status, value=1.0)

    server = FakeReward(score_one)
    route = revision(component("sum"), component("judge", is_required=False))
    greedy = make_group("x-greedy", 1)
    greedy = replace(greedy, task=replace(greedy.task, group_id="x"))
    samples, own, other = await score(server, make_group("x"), greedy, make_group("y"), route=route)
    assert [result.value for result in (*samples.results, *own.results)] == [1.0, 1.0, 1.0]
    assert [result.value for result in other.results] == [2.0, 2.0]


async def test_reward_is_the_weighted_sum_of_the_parts() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        parts = {"correct": 1.0, "format": 0.5, "length": 9.0} if sample.sample_id.startswith("x/0") else {"correct": 1.0}
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=sum(parts.values()), components=parts)

    route = revision_of(RewardSection(scorer="sum", weights={"correct": 2.0, "format": -1.0}))
    (scored,) = await score(FakeReward(score_one), make_group("x"), route=route)
    first, second = scored.results
    assert (first.value, first.components) == (1.5, {"correct": 1.0, "format": 0.5, "length": 9.0})
    assert (second.status, second.value) == (ScoreStatus.ERROR, 0.0)
    assert second.message == "sum@3: part 'format' of the route (reward.weights) is missing; the scorer gave correct"


async def test_list_of_the_responses_length_is_used_and_one_too_short_is_refused_for_its_sample() -> None:
    """R71."""

    def score_one(sample: ScoreSample) -> ScoreResult:
        values = (0.5, -0.25) if sample.sample_id.startswith("x/0") else (0.5,)
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=sum(values), token_values=values)

    (scored,) = await score(FakeReward(score_one), make_group("x"))
    assert scored.results[0].token_values == (0.5, -0.25)
    assert (scored.results[1].status, scored.results[1].message) == (ScoreStatus.ERROR, "sum@3: 1 per-token rewards for 2 tokens")
