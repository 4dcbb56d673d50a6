"""Groups without spread are replaced by further prompts; with fakes."""

from __future__ import annotations

import asyncio

import pytest
from shoal_coordinator.alerts import StoppedWhilePausedError

from shoal.config.models import RewardSection
from shoal.errors import StateError
from shoal.types import ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_collecting import CollectorSetup
from tests.helpers.coordinator_fakes import FakeReward, FakeRollout


def flat_in(*group_ids: str) -> FakeReward:
    """Every sample of these groups is worth 1; in the others it is worth its index."""

    def score_one(sample: ScoreSample) -> ScoreResult:
        uid, index, _ = sample.sample_id.split("/")
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=1.0 if uid in group_ids else float(index))

    return FakeReward(score_one)


async def test_groups_without_spread_are_replaced_by_the_next_prompts_and_never_queued() -> None:
    setup = CollectorSetup(reward=flat_in("g0", "g2", "g4"), max_refills=5)
    collected = await setup.collect(num_groups=3, num_samples=2)
    assert sorted(setup.queued) == ["g1", "g3", "g5"]
    assert (setup.taken, setup.position) == ([3, 2, 1], 6), "exactly as many as are missing"
    metrics = collected.metrics()
    assert (metrics["num_generated_groups"], metrics["num_groups"], metrics["num_zero_std_dropped"], metrics["num_refills"]) == (6, 3, 3, 2)
    assert (metrics["reward"], metrics["frac_zero_std"], metrics["num_samples"]) == (0.5, 0.0, 6)
    assert metrics["generated_reward"] == 0.75, "dropped groups count here"


async def test_the_same_prompts_are_trained_whoever_finishes_first() -> None:
    batches = []
    for held in ("g0", "g1", "g3"):
        setup = CollectorSetup(reward=flat_in("g0", "g3"), max_refills=5)
        setup.rollout.gates[held] = asyncio.Event()
        running = asyncio.create_task(setup.collect(num_groups=4))
        for _ in range(200):
            await asyncio.sleep(0)
        setup.rollout.gates[held].set()
        await asyncio.wait_for(running, 10)
        batches.append((sorted(setup.queued), setup.position))
    assert batches == [(["g1", "g2", "g4", "g5"], 6)] * 3


async def test_short_batch_is_trained_after_the_last_refill(caplog: pytest.LogCaptureFixture) -> None:
    setup = CollectorSetup(reward=flat_in(*(f"g{index}" for index in range(1, 99))), max_refills=2)
    collected = await setup.collect(num_groups=3)
    assert (sorted(setup.queued), setup.taken) == (["g0"], [3, 2, 2])
    assert (collected.num_groups, collected.num_refills, collected.num_zero_std_dropped) == (1, 2, 6)
    assert "batch_is_short" in caplog.text


async def test_step_without_any_spread_is_an_error_that_says_what_to_do() -> None:
    setup = CollectorSetup(reward=flat_in(*(f"g{index}" for index in range(99))), max_refills=2)
    with pytest.raises(StateError, match=r"dropped 6 groups whose rewards were all equal in 3 rounds: .* raise rollout\.max_refills"):
        await setup.collect(num_groups=2)
    assert setup.queue.groups == []


async def test_groups_without_spread_are_trained_when_dynamic_sampling_is_off() -> None:
    setup = CollectorSetup(reward=flat_in("g0"))
    metrics = (await setup.collect(num_groups=2)).metrics()
    assert sorted(setup.queued) == ["g0", "g1"]
    assert (metrics["frac_zero_std"], metrics["num_generated_groups"]) == (0.5, 2)
    assert not {"num_zero_std_dropped", "num_refills", "generated_reward"} & set(metrics)


async def test_group_that_could_not_be_scored_is_replaced_too() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        uid, index, _ = sample.sample_id.split("/")
        status = ScoreStatus.ERROR if uid == "g0" else ScoreStatus.SCORED
        return ScoreResult(sample_id=sample.sample_id, status=status, value=float(index))

    setup = CollectorSetup(reward=FakeReward(score_one), max_refills=1)
    collected = await setup.collect(num_groups=2)
    assert sorted(setup.queued) == ["g1", "g2"]
    assert (collected.num_dropped_groups, collected.num_zero_std_dropped, collected.unscored_share) == (1, 0, 2 / 6)


async def test_spread_is_that_of_the_weighted_rewards() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        uid, index, _ = sample.sample_id.split("/")
        # In g0 the components differ and cancel; in the others they do not.
        components = {"right": float(index), "short": -float(index) if uid == "g0" else 0.0}
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=float(index), components=components)

    section = RewardSection(scorer="sum", weights={"right": 2.0, "short": 2.0})
    setup = CollectorSetup(reward=FakeReward(score_one), section=section, max_refills=1)
    collected = await setup.collect(num_groups=2)
    assert sorted(setup.queued) == ["g1", "g2"]
    assert sorted(collected.rewards) == [0.0, 0.0, 2.0, 2.0]


async def test_spread_of_per_token_rewards_is_that_of_their_sums() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        uid, index, _ = sample.sample_id.split("/")
        rest = [0.0] * (sample.num_response_tokens - 1)
        values = (1.0 if uid == "g0" else float(index), *rest)
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=0.0, token_values=values)

    setup = CollectorSetup(reward=FakeReward(score_one), max_refills=1)
    await setup.collect(num_groups=1)
    assert sorted(setup.queued) == ["g1"]


async def test_a_dead_scorer_ends_the_refills() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message="dead")

    setup = CollectorSetup(rollout=FakeRollout(), reward=FakeReward(score_one), max_refills=9)
    with pytest.raises(StoppedWhilePausedError, match="4 of 4 samples of the step have no score"):
        await setup.collect(num_groups=2)
    assert setup.taken == [2]
