"""From prompts to queued records, with fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from shoal_coordinator.collected import CollectedExperience
from shoal_coordinator.dispatcher import Dispatcher, GenerationRequest
from shoal_coordinator.experience import CollectionPlan, ExperienceCollector
from shoal_coordinator.prompts import PromptTask
from shoal_coordinator.scoring import GroupScorer
from shoal_coordinator.stage_clock import Stage, StageClock

from shoal.config.models import RewardSection, RolloutSection
from shoal.errors import NotFoundError, StateError
from shoal.types import Completion, FinishReason, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_fakes import (
    VOCAB_SIZE,
    FakeQueue,
    FakeReward,
    FakeRollout,
    FakeTokenizer,
    make_completion,
    make_request,
    make_task,
    reward_pool,
    rollout_pool,
    sampled_ids,
)


@dataclass
class Setup:
    rollout: FakeRollout = field(default_factory=FakeRollout)
    reward: FakeReward = field(default_factory=FakeReward)
    queue: FakeQueue = field(default_factory=FakeQueue)
    clock: StageClock = field(default_factory=StageClock)
    max_unscored_share: float = 0.5
    greedy: GenerationRequest | None = None
    max_refills: int | None = None
    position: int = 0

    async def collect(self, num_groups: int = 2, num_samples: int = 2) -> CollectedExperience:
        dispatcher = Dispatcher(
            rollout_pool(a=self.rollout),
            RolloutSection(retries=0),
            run_id="run",
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
            wait_for_server_s=1.0,
        )
        collector = ExperienceCollector(
            dispatcher,
            GroupScorer(reward_pool(r=self.reward), RewardSection(scorer="sum"), FakeTokenizer(), self.clock, wait_for_server_s=1.0),
            self.queue,
            clock=self.clock,
            run_id="run",
            tokenizer_hash="hash",
            max_unscored_share=self.max_unscored_share,
            scorer_name="sum",
        )
        plan = CollectionPlan(num_groups=num_groups, request=make_request(num_samples), greedy=self.greedy, max_refills=self.max_refills)
        return await collector.collect(self.take, plan)

    def take(self, num_prompts: int) -> list[PromptTask]:
        """Issue prompts g0, g1, ..."""
        start, self.position = self.position, self.position + num_prompts
        return [make_task(f"g{index}") for index in range(start, self.position)]


def unscored_where(is_unscored: Callable[[ScoreSample], bool], message: str = "scorer raised ValueError") -> FakeReward:
    def score_one(sample: ScoreSample) -> ScoreResult:
        if is_unscored(sample):
            return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message=message)
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=float(sample.response.split()[0]))

    return FakeReward(score_one)


async def test_collect_queues_exactly_the_sampled_tokens_with_their_reward() -> None:
    setup = Setup(rollout=FakeRollout(policy_version=3), reward=unscored_where(lambda _: False))
    collected = await setup.collect(num_groups=3)
    assert sorted(group[0].group_id for group in setup.queue.groups) == ["g0", "g1", "g2"]
    seeds_of = {request_id.split("/")[1]: seeds for request_id, seeds in setup.rollout.requests}
    for record in (record for group in setup.queue.groups for record in group):
        ids = sampled_ids(seeds_of[record.uid][record.sample_index])
        assert record.response_ids.tolist() == ids
        assert record.response_mask.tolist() == [True] * len(ids)
        assert record.reward == float(ids[0])
        np.testing.assert_array_equal(record.prompt_ids, make_task().prompt_ids)
        assert (record.reward_components[0].name, record.reward_components[0].service_version) == ("sum", "3")
        assert (record.tokenizer_hash, record.engine_id, record.attempt, record.run_id) == ("hash", "engine", 0, "run")
        assert 0 < record.created_unix_ms <= record.scored_unix_ms
    assert (collected.num_groups, len(collected.rewards), collected.policy_versions) == (3, 6, {3})


async def test_groups_are_queued_while_others_still_generate() -> None:
    setup = Setup()
    setup.rollout.gates["g1"] = setup.queue.called
    # Would wait for ever if g0 were held back until g1 is done.
    assert (await asyncio.wait_for(setup.collect(num_groups=2), 10)).num_groups == 2


async def test_unscored_samples_are_left_out_and_counted() -> None:
    setup = Setup(reward=unscored_where(lambda sample: sample.sample_id in ("g0/0/0", "g1/0/0", "g1/1/0")), max_unscored_share=0.5)
    collected = await setup.collect(num_groups=3)
    assert {group[0].group_id: len(group) for group in setup.queue.groups} == {"g0": 1, "g2": 2}
    assert (collected.num_unscored, collected.num_groups, collected.num_dropped_groups) == (3, 2, 1)
    assert collected.metrics()["unscored_share"] == 0.5


async def test_too_many_unscored_samples_name_scorer_share_and_reason() -> None:
    setup = Setup(reward=unscored_where(lambda sample: sample.sample_id.startswith("g0")), max_unscored_share=0.4)
    with pytest.raises(StateError, match=r"'sum' left 2 of 4 samples unscored.*0\.4; first reason: scorer raised ValueError"):
        await setup.collect(num_groups=2)


async def test_dead_scorer_stops_the_step_before_all_groups_are_generated() -> None:
    setup = Setup(reward=unscored_where(lambda _: True), max_unscored_share=0.0)
    setup.rollout.gates["g1"] = asyncio.Event()
    with pytest.raises(StateError, match="unscored"):
        await asyncio.wait_for(setup.collect(num_groups=2), 10)
    assert setup.rollout.num_open == 0


async def test_unknown_scorer_comes_out_as_one_plain_error() -> None:
    with pytest.raises(NotFoundError, match="'sum' cannot score: no such scorer"):
        await Setup(reward=FakeReward(failures=[NotFoundError("no such scorer")])).collect()


async def test_step_without_any_token_is_an_error_with_the_counts() -> None:
    setup = Setup(rollout=FakeRollout(script=lambda _, completions: [make_completion(index, []) for index in range(len(completions))]))
    with pytest.raises(StateError, match="none of 4 samples can be trained on: 4 had no token"):
        await setup.collect()


async def test_collect_names_the_scorer_when_nothing_is_left_below_the_limit() -> None:
    setup = Setup(reward=unscored_where(lambda _: True, "the score is nan"), max_unscored_share=1.0)
    with pytest.raises(StateError, match=r"none of 4 samples .* scorer 'sum' left 4 unscored \(the score is nan\): repair it"):
        await setup.collect()


async def test_metrics_show_clipping_and_groups_without_signal() -> None:
    def script(request_id: str, completions: list[Completion]) -> list[Completion]:
        if "g0" in request_id:
            return [make_completion(0, [2, 3], finish_reason=FinishReason.LENGTH), make_completion(1, [4], finish_reason=FinishReason.STOP)]
        return [make_completion(index, [5, 5, 5], finish_reason=FinishReason.LENGTH) for index in range(2)]

    collected = await Setup(rollout=FakeRollout(script=script), reward=unscored_where(lambda _: False)).collect()
    metrics = collected.metrics()
    assert metrics["clipped_share"] == 0.75
    assert metrics["terminated_length"] == 1.0
    assert metrics["response_length"] == 2.25
    assert metrics["frac_zero_std"] == 0.5
    assert metrics["reward"] == 4.0
    assert metrics["reward_std"] == pytest.approx(np.std([2, 4, 5, 5]))
    assert (metrics["num_samples"], metrics["num_response_tokens"]) == (4, 9)


async def test_end_of_sequence_alone_has_length_one_and_is_scored() -> None:
    setup = Setup(rollout=FakeRollout(script=lambda _, completions: [make_completion(index, [2]) for index in range(len(completions))]))
    collected = await setup.collect()
    assert collected.lengths == [1] * 4
    assert collected.metrics()["clipped_share"] == 0.0


async def test_all_answers_cut_give_terminated_length_zero() -> None:
    cut = FakeRollout(
        script=lambda _, own: [make_completion(index, [5, 5], finish_reason=FinishReason.LENGTH) for index in range(len(own))]
    )
    metrics = (await Setup(rollout=cut).collect()).metrics()
    assert (metrics["clipped_share"], metrics["terminated_length"], metrics["frac_zero_std"]) == (1.0, 0.0, 1.0)


async def test_clock_counts_the_three_stages() -> None:
    setup = Setup()
    await setup.collect()
    stages = setup.clock.read().stages
    assert all(stages[stage] > 0 for stage in (Stage.ROLLOUT, Stage.REWARD, Stage.QUEUE))
