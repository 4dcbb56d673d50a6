"""One greedy answer per prompt, whose reward is the baseline of the group's samples; with fakes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from shoal_coordinator.evaluation import greedy_request

from shoal.config.models import RewardSection, RolloutSection
from shoal.errors import DeadlineError, StateError
from shoal.types import Completion, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_collecting import CollectorSetup
from tests.helpers.coordinator_fakes import FakeReward, FakeRollout, make_completion

GREEDY = greedy_request(RolloutSection(max_new_tokens=4), (2,), 0)


def is_greedy(sample: ScoreSample) -> bool:
    return sample.sample_id.split("/")[0].endswith("-greedy")


def scored(sample: ScoreSample) -> ScoreResult:
    """A greedy answer of group g7 is worth 7.5, a sample its index."""
    uid, index, _ = sample.sample_id.split("/")
    value = float(uid[1:].removesuffix("-greedy")) + 0.5 if is_greedy(sample) else float(index)
    return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=value)


def greedy_is(answer: Callable[[list[Completion]], list[Completion]], group_id: str = "g0") -> FakeRollout:
    """Answers differently for the greedy answer of one group."""
    return FakeRollout(script=lambda request_id, own: answer(own) if f"/{group_id}-greedy/" in request_id else own)


async def test_every_record_carries_the_reward_of_its_prompts_greedy_answer() -> None:
    setup = CollectorSetup(reward=FakeReward(scored), greedy=GREEDY)
    collected = await setup.collect(num_groups=3, num_samples=2)
    assert {name: [record.baseline_reward for record in group] for name, group in setup.queued.items()} == {
        "g0": [0.5, 0.5],
        "g1": [1.5, 1.5],
        "g2": [2.5, 2.5],
    }
    assert [record.sample_index for record in setup.queued["g0"]] == [0, 1]
    metrics = collected.metrics()
    assert (metrics["baseline_reward"], metrics["reward"], metrics["num_samples"]) == (1.5, 0.5, 6)
    assert (metrics["num_generated_groups"], metrics["num_groups"]) == (3, 3)


async def test_greedy_answer_is_generated_beside_the_samples_of_the_same_prompt_without_seeds() -> None:
    setup = CollectorSetup(reward=FakeReward(scored), greedy=GREEDY)
    await setup.collect(num_groups=1, num_samples=2)
    calls = dict(zip([request_id for request_id, _ in setup.rollout.requests], setup.rollout.sampling, strict=True))
    assert set(calls) == {"run/g0/0", "run/g0-greedy/0"}
    greedy = calls["run/g0-greedy/0"]
    assert (greedy.temperature, greedy.max_new_tokens, greedy.stop_token_ids) == (0.0, 4, (2,))
    assert dict(setup.rollout.requests)["run/g0-greedy/0"] == ()
    (call,) = setup.reward.calls
    assert {sample.prompt for sample in call} == {"prompt g0"}
    assert len(call) == 3, "scored in one call with its group"


async def test_records_have_no_baseline_where_none_is_needed() -> None:
    setup = CollectorSetup(reward=FakeReward(scored))
    metrics = (await setup.collect()).metrics()
    assert {record.baseline_reward for group in setup.queue.groups for record in group} == {None}
    assert "baseline_reward" not in metrics


@pytest.mark.parametrize(
    "rollout",
    [greedy_is(lambda own: [make_completion(0, [])]), greedy_is(lambda own: [make_completion(0, [100])])],
    ids=["no token", "an id outside the vocabulary"],
)
async def test_group_without_a_usable_greedy_answer_is_dropped_and_counted(rollout: FakeRollout) -> None:
    setup = CollectorSetup(rollout=rollout, reward=FakeReward(scored), greedy=GREEDY)
    collected = await setup.collect(num_groups=2)
    assert sorted(setup.queued) == ["g1"]
    assert (collected.num_dropped_groups, collected.num_no_baseline, collected.num_groups) == (1, 1, 1)
    assert (collected.num_unscored, collected.metrics()["baseline_reward"]) == (0, 1.5)


async def test_group_whose_greedy_answer_was_not_scored_is_dropped_and_leaves_the_unscored_share_alone() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        result = scored(sample)
        return (
            ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.NOT_SCORED)
            if is_greedy(sample) and "g0" in sample.sample_id
            else result
        )

    setup = CollectorSetup(reward=FakeReward(score_one), greedy=GREEDY, max_unscored_share=0.0)
    collected = await setup.collect(num_groups=2)
    assert (sorted(setup.queued), collected.num_no_baseline, collected.unscored_share) == (["g1"], 1, 0.0)


async def test_greedy_answer_that_came_too_late_costs_its_group_alone() -> None:
    def late(own: list[Completion]) -> list[Completion]:
        raise DeadlineError("late")

    setup = CollectorSetup(rollout=greedy_is(late), reward=FakeReward(scored), greedy=GREEDY)
    collected = await setup.collect(num_groups=2)
    assert (sorted(setup.queued), collected.num_no_baseline, collected.num_missing) == (["g1"], 1, 0)


async def test_step_without_any_greedy_score_says_so() -> None:
    rollout = FakeRollout(script=lambda request_id, own: [make_completion(0, [])] if "greedy" in request_id else own)
    setup = CollectorSetup(rollout=rollout, reward=FakeReward(scored), greedy=GREEDY)
    with pytest.raises(StateError, match="2 groups had no scored greedy answer"):
        await setup.collect(num_groups=2)
    assert setup.queue.groups == []


async def test_baseline_is_weighted_like_the_rewards() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        result = scored(sample)
        components = {"right": result.value, "short": 1.0}
        return ScoreResult(sample_id=result.sample_id, status=result.status, value=0.0, components=components)

    section = RewardSection(scorer="sum", weights={"right": 10.0, "short": 1.0})
    setup = CollectorSetup(reward=FakeReward(score_one), section=section, greedy=GREEDY)
    await setup.collect(num_groups=2)
    assert {record.baseline_reward for record in setup.queued["g1"]} == {16.0}
    assert [record.reward for record in setup.queued["g1"]] == [1.0, 11.0]


async def test_baseline_of_per_token_rewards_is_their_sum() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        values = (0.25,) * sample.num_response_tokens
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=9.0, token_values=values)

    rollout = greedy_is(lambda own: [make_completion(0, [5, 5, 5])])
    setup = CollectorSetup(rollout=rollout, reward=FakeReward(score_one), greedy=GREEDY)
    await setup.collect(num_groups=1)
    assert {record.baseline_reward for record in setup.queued["g0"]} == {0.75}


async def test_dynamic_sampling_replaces_a_group_without_a_baseline() -> None:
    setup = CollectorSetup(rollout=greedy_is(lambda own: [make_completion(0, [])]), reward=FakeReward(scored), greedy=GREEDY, max_refills=1)
    await setup.collect(num_groups=2)
    assert (sorted(setup.queued), setup.taken) == (["g1", "g2"], [2, 1])
