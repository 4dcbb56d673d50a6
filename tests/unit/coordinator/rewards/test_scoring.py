"""Scoring: calls, statuses, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from shoal_coordinator.dispatcher import GeneratedGroup
from shoal_coordinator.rewards.scoring import GROUPS_PER_CALL, GroupScorer, RewardEndpoint, ScoredGroup
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import StageClock

from shoal.config.models import RewardSection
from shoal.errors import DeadlineError, InternalError, InvalidRequestError, NotFoundError, ShoalError, UnavailableError
from shoal.types import FinishReason, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_fakes import FakeReward, FakeTokenizer, make_completion, make_request, make_task, reward_pool


def make_group(uid: str = "e0-i0", num_samples: int = 2) -> GeneratedGroup:
    completions = tuple(make_completion(index, [index, 9]) for index in range(num_samples))
    return GeneratedGroup(task=make_task(uid), attempt=1, server_id="a", sampling=make_request().sampling, completions=completions)


def make_scorer(timeout_s: float = 2.0, wait_for_server_s: float = 30.0, **servers: FakeReward) -> GroupScorer:
    return scorer_on(reward_pool(**servers), timeout_s, wait_for_server_s)


def scorer_on(pool: ServerPool[RewardEndpoint], timeout_s: float, wait_for_server_s: float) -> GroupScorer:
    config = RewardSection(scorer="sum", timeout_s=timeout_s)
    return GroupScorer(pool, config, FakeTokenizer(), StageClock(), wait_for_server_s=wait_for_server_s)


def statuses(scored: ScoredGroup) -> list[ScoreStatus]:
    return [result.status for result in scored.results]


async def test_scorer_sends_text_row_and_lengths_of_several_groups_in_one_call() -> None:
    server = FakeReward()
    first, second = await make_scorer(r=server).score([make_group("x"), make_group("y", 3)])
    ((one, *_, last),) = server.calls
    assert (one.sample_id, one.prompt, one.response, one.row) == ("x/0/1", "prompt x", "0 9", {"answer": "x"})
    assert (last.sample_id, last.response, last.num_response_tokens, last.finish_reason) == ("y/2/1", "2 9", 2, FinishReason.STOP)
    assert (first.service, first.service_version, first.scorer) == ("r", "3", "sum")
    assert [result.sample_id for result in second.results] == ["y/0/1", "y/1/1", "y/2/1"]
    assert server.timeouts_s[0] == pytest.approx(4.0, abs=0.5)


async def test_many_groups_are_split_over_calls_and_stay_in_order() -> None:
    server = FakeReward()
    groups = [make_group(f"g{index}") for index in range(2 * GROUPS_PER_CALL + 1)]
    scored = await make_scorer(r=server).score(groups)
    assert sorted(map(len, server.calls)) == [2, 2 * GROUPS_PER_CALL, 2 * GROUPS_PER_CALL]
    assert [group.group.task.uid for group in scored] == [f"g{index}" for index in range(2 * GROUPS_PER_CALL + 1)]


async def test_group_without_completions_needs_no_call() -> None:
    server = FakeReward()
    (scored,) = await make_scorer(r=server).score([make_group(num_samples=0)])
    assert (scored.results, server.calls) == ((), [])


async def test_statuses_are_kept_apart() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        if sample.sample_id.startswith("x/0"):
            return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.NOT_SCORED, message="no answer in the row")
        if sample.sample_id.startswith("x/1"):
            return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message="raised")
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=0.0)

    (scored,) = await make_scorer(r=FakeReward(score_one)).score([make_group("x", 3)])
    assert statuses(scored) == [ScoreStatus.NOT_SCORED, ScoreStatus.ERROR, ScoreStatus.SCORED]


async def test_unavailable_server_is_left_for_another_one() -> None:
    bad, good = FakeReward(failures=[UnavailableError("down")]), FakeReward()
    (scored,) = await make_scorer(a=bad, b=good).score([make_group()])
    assert (len(bad.calls), len(good.calls), scored.service) == (1, 1, "b")
    assert statuses(scored) == [ScoreStatus.SCORED] * 2


async def test_lone_server_is_asked_again_until_it_is_back_whatever_the_deadline_of_a_call() -> None:
    server = FakeReward(failures=[UnavailableError("restarting")] * 4)
    (scored,) = await make_scorer(timeout_s=0.001, a=server).score([make_group()])
    assert len(server.calls) == 5
    assert max(server.timeouts_s) == 0.001
    assert statuses(scored) == [ScoreStatus.SCORED] * 2


async def test_server_that_left_is_waited_for_until_its_successor_registers() -> None:
    pool = reward_pool()
    waiting = asyncio.create_task(scorer_on(pool, 0.001, 30.0).score([make_group()]))
    failed = asyncio.Event()

    def fail(sample: ScoreSample) -> ScoreResult:
        pool.remove("a")
        failed.set()
        raise UnavailableError("killed")

    pool.add("a", FakeReward(fail))
    await failed.wait()
    assert pool.server_ids() == ()
    pool.add("a", FakeReward())
    (scored,) = await waiting
    assert (scored.service, statuses(scored)) == ("a", [ScoreStatus.SCORED] * 2)


@pytest.mark.parametrize("error", [DeadlineError("late"), InternalError("id 5"), UnavailableError("down")])
async def test_failed_call_leaves_samples_unscored_and_never_zero(error: ShoalError) -> None:
    servers = {name: FakeReward(failures=[error] * 1000) for name in "abc"}
    (scored,) = await make_scorer(timeout_s=0.2, wait_for_server_s=0.2, **servers).score([make_group()])
    assert statuses(scored) == [ScoreStatus.ERROR] * 2
    assert str(error) in scored.results[0].message
    calls = [len(server.calls) for server in servers.values()]
    assert min(calls) >= 1 if isinstance(error, UnavailableError) else sum(calls) == 1


@pytest.mark.parametrize("error", [NotFoundError("known: exact"), InvalidRequestError("bad row")])
async def test_unknown_scorer_or_refused_request_fails_the_run(error: ShoalError) -> None:
    with pytest.raises(type(error), match=rf"reward.scorer 'sum' cannot score: {error}"):
        await make_scorer(a=FakeReward(failures=[error])).score([make_group()])


def group_of(source: str, uid: str, num_samples: int = 2) -> GeneratedGroup:
    group = make_group(uid, num_samples)
    return replace(group, task=replace(group.task, row={"answer": uid, "kind": source}))


def router(server: RewardEndpoint, **settings: object) -> GroupScorer:
    config = RewardSection.model_validate({"sources": {"sums": "exact", "code": "run", "maths": "exact"}, **settings})
    pool: ServerPool[RewardEndpoint] = reward_pool()
    pool.add("r", server)
    return GroupScorer(pool, config, FakeTokenizer(), StageClock(), wait_for_server_s=1.0, source_key="kind")


async def test_groups_of_one_step_go_to_the_scorers_of_their_sources() -> None:
    server = FakeReward()
    groups = [group_of(source, f"g{place}") for place, source in enumerate(("code", "sums", "code", "maths"))]
    scored = await router(server).score(groups)
    assert [(group.group.task.uid, group.scorer) for group in scored] == [("g0", "run"), ("g1", "exact"), ("g2", "run"), ("g3", "exact")]
    assert [[result.sample_id for result in group.results] for group in scored] == [
        [f"g{place}/{i}/1" for i in (0, 1)] for place in range(4)
    ]
    uids = [sorted({sample.sample_id.split("/")[0] for sample in call}) for call in server.calls]
    assert sorted(zip(server.scorers, uids, strict=True)) == [(("exact", ""), ["g1", "g3"]), (("run", ""), ["g0", "g2"])]


async def test_order_is_kept_when_calls_of_several_scorers_are_split() -> None:
    sources = ["code" if place % 3 else "sums" for place in range(4 * GROUPS_PER_CALL)]
    groups = [group_of(source, f"g{place}", 1) for place, source in enumerate(sources)]
    scored = await router(FakeReward()).score(groups)
    assert [group.group.task.uid for group in scored] == [f"g{place}" for place in range(4 * GROUPS_PER_CALL)]


async def test_version_is_that_of_the_default_scorer_alone() -> None:
    server = FakeReward()
    await router(server, scorer="run", version="7").score([group_of("code", "a"), group_of("sums", "b")])
    assert sorted(server.scorers) == [("exact", ""), ("run", "7")]


class LacksOne(FakeReward):
    """Has no scorer `run`."""

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """See FakeReward."""
        if scorer == "run":
            raise NotFoundError("known: exact")
        return await super().score(scorer, version, samples, timeout_s=timeout_s)


async def test_scorer_of_a_rare_source_is_missed_at_the_first_call() -> None:
    with pytest.raises(NotFoundError, match=r"reward\.sources of code: 'run' cannot score: known: exact"):
        await router(LacksOne()).score([group_of("sums", "a")])


async def test_other_scorers_are_asked_for_once_and_without_samples() -> None:
    server = FakeReward()
    scorer = router(server)
    for uid in ("a", "b"):
        await scorer.score([group_of("sums", uid)])
    await scorer.score([group_of("code", "c")])
    empty = [name for (name, _), samples in zip(server.scorers, server.calls, strict=True) if not samples]
    assert empty == ["run"]


async def test_other_scorer_that_cannot_be_asked_for_now_is_asked_for_again() -> None:
    class Busy(FakeReward):
        async def score(
            self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float
        ) -> tuple[str, list[ScoreResult]]:
            if not samples and len([name for name, _ in self.scorers if name == "exact"]) < 2:
                raise DeadlineError("late")
            return await super().score(scorer, version, samples, timeout_s=timeout_s)

    server = Busy()
    scorer = router(server)
    for uid in ("a", "b", "c", "d"):
        await scorer.score([group_of("sums", uid)])
    assert [name for name, _ in server.scorers].count("run") == 1


async def test_reward_is_the_weighted_sum_of_the_components() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        parts = {"correct": 1.0, "format": 0.5, "length": 9.0} if sample.sample_id.startswith("x/0") else {"correct": 1.0}
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=sum(parts.values()), components=parts)

    config = RewardSection(scorer="sum", weights={"correct": 2.0, "format": -1.0})
    scorer = GroupScorer(reward_pool(r=FakeReward(score_one)), config, FakeTokenizer(), StageClock(), wait_for_server_s=1.0)
    (scored,) = await scorer.score([make_group("x")])
    first, second = scored.results
    assert (first.value, first.components) == (1.5, {"correct": 1.0, "format": 0.5, "length": 9.0})
    assert (second.status, second.value) == (ScoreStatus.ERROR, 0.0)
    assert second.message == "component 'format' of reward.weights is missing (the scorer gave correct)"
