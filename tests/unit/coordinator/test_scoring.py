"""Scoring: calls, statuses, failures."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from shoal_coordinator.dispatcher import GeneratedGroup
from shoal_coordinator.rewards import checked_results
from shoal_coordinator.scoring import GROUPS_PER_CALL, GroupScorer, RewardEndpoint, ScoredGroup
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


def make_sample(num_response_tokens: int = 2) -> ScoreSample:
    return ScoreSample(
        sample_id="s", prompt="p", response="r", row={}, finish_reason=FinishReason.STOP, num_response_tokens=num_response_tokens
    )


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_score_that_is_not_finite_is_an_error(value: float) -> None:
    (result,) = checked_results([make_sample()], [ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=value)])
    assert result.status is ScoreStatus.ERROR
    assert str(value) in result.message


def test_per_token_rewards_of_another_length_are_an_error() -> None:
    good = ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=1.0, token_values=(0.5, 0.5))
    assert checked_results([make_sample(2)], [good]) == [good]
    (bad,) = checked_results([make_sample(3)], [good])
    assert (bad.status, bad.message) == (ScoreStatus.ERROR, "2 per-token rewards for 3 tokens")


def test_results_of_other_samples_are_refused() -> None:
    result = ScoreResult(sample_id="s", status=ScoreStatus.SCORED)
    with pytest.raises(InternalError, match="2 results"):
        checked_results([make_sample()], [result, result])
    with pytest.raises(InternalError, match="do not match"):
        checked_results([make_sample()], [replace(result, sample_id="t")])
