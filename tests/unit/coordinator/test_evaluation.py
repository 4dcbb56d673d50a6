"""Greedy evaluation with fakes."""

from __future__ import annotations

import numpy as np
from shoal_coordinator.dispatcher import Dispatcher
from shoal_coordinator.evaluation import Evaluation, evaluate, greedy_request, is_correct
from shoal_coordinator.prompts import PromptRow
from shoal_coordinator.scoring import GroupScorer
from shoal_coordinator.stage_clock import StageClock

from shoal.config.models import RewardSection, RolloutSection
from shoal.types import Completion, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_fakes import VOCAB_SIZE, FakeReward, FakeRollout, FakeTokenizer, make_completion, reward_pool, rollout_pool

ROWS = [
    PromptRow(row_index=index, prompt_ids=np.array([index + 1], np.int32), text=f"p{index}", row={"answer": str(index + 1)})
    for index in range(4)
]


async def run(rollout: FakeRollout, reward: FakeReward) -> Evaluation:
    clock = StageClock()
    config = RolloutSection(retries=0, max_new_tokens=4)
    dispatcher = Dispatcher(rollout_pool(a=rollout), config, run_id="run", vocab_size=VOCAB_SIZE, clock=clock, wait_for_server_s=1.0)
    scorer = GroupScorer(reward_pool(r=reward), RewardSection(), FakeTokenizer(), clock, wait_for_server_s=1.0)
    return await evaluate(ROWS, dispatcher, scorer, config, stop_token_ids=(2,), min_policy_version=3)


def exact(sample: ScoreSample) -> ScoreResult:
    if sample.row["answer"] == "4":
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR)
    return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=float(sample.response == sample.row["answer"]))


async def test_evaluation_counts_right_wrong_empty_and_unscored_answers() -> None:
    def script(request_id: str, completions: list[Completion]) -> list[Completion]:
        # Row 1 answers nothing; the others repeat their prompt's first id, which is right.
        return [make_completion(0, [])] if request_id.endswith("r1/0") else completions

    evaluation = await run(FakeRollout(script=script, policy_version=3), FakeReward(exact))
    assert evaluation == Evaluation(accuracy=0.5, mean_reward=1.0, policy_versions=(3,), num=4, num_unscored=1)


async def test_evaluation_asks_for_one_greedy_sample_without_seed() -> None:
    rollout = FakeRollout(policy_version=3)
    await run(rollout, FakeReward())
    assert sorted(rollout.requests) == [(f"run/eval-v3-r{index}/0", ()) for index in range(4)]
    request = greedy_request(RolloutSection(max_new_tokens=4), (2,), 3)
    assert (request.sampling.temperature, request.sampling.stop_token_ids, request.num_samples) == (0.0, (2,), 1)


def test_component_correct_decides_over_the_total() -> None:
    result = ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=1.2, components={"correct": 0.0, "format": 1.2})
    assert not is_correct(result)
    assert is_correct(ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=0.5, components={"correct": 1.0, "length": -0.5}))
    assert not is_correct(ScoreResult(sample_id="s", status=ScoreStatus.NOT_SCORED, value=1.0))
