"""Evaluation with fakes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from shoal_coordinator.alerts import StoppedWhilePausedError
from shoal_coordinator.dispatcher import Dispatcher
from shoal_coordinator.evaluation import Evaluation, evaluate, evaluation_request, greedy_request, is_correct
from shoal_coordinator.prompts import PromptRow
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.scoring import GroupScorer
from shoal_coordinator.stage_clock import StageClock

from shoal.config.models import RolloutSection, RunConfig
from shoal.types import Completion, FinishReason, SamplingParams, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_fakes import VOCAB_SIZE, FakeReward, FakeRollout, FakeTokenizer, make_completion, reward_pool, rollout_pool
from tests.helpers.routes import FakeAttention, FakeRoutes, component, revision, revision_of

ROWS = [
    PromptRow(
        row_index=index,
        prompt_ids=np.array([index + 1], np.int32),
        text=f"p{index}",
        row={"answer": str(index + 1), "data_source": "low" if index < 2 else "high"},
    )
    for index in range(4)
]


def make_config(seed: int = 0, reward: dict[str, Any] | None = None, **evaluation: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"id": "run", "folder": "runs", "seed": seed},
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "rollout": {"retries": 0, "max_new_tokens": 4},
            "reward": reward or {},
            "evaluation": evaluation,
        }
    )


async def run(
    rollout: FakeRollout,
    reward: FakeReward,
    config: RunConfig | None = None,
    *,
    routes: FakeRoutes | None = None,
    attention: FakeAttention | None = None,
) -> Evaluation:
    clock = StageClock()
    config = make_config() if config is None else config
    dispatcher = Dispatcher(
        rollout_pool(a=rollout), config.rollout, run_id="run", vocab_size=VOCAB_SIZE, clock=clock, wait_for_server_s=1.0
    )
    scorer = GroupScorer(ScorerCalls(reward_pool(r=reward), max_open_requests=8), FakeTokenizer(), clock)
    routes = FakeRoutes(revision_of(config.reward)) if routes is None else routes
    attention = FakeAttention() if attention is None else attention
    try:
        return await evaluate(
            ROWS, dispatcher, scorer, config, routes=routes, attention=attention, stop_token_ids=(2,), min_policy_version=3
        )
    finally:
        assert routes.num_open == 0


def exact(sample: ScoreSample) -> ScoreResult:
    if sample.row["answer"] == "4":
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR)
    return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=float(sample.response == sample.row["answer"]))


def nothing_for_row_1(request_id: str, completions: list[Completion]) -> list[Completion]:
    """The other rows repeat their prompt's first id, which is right."""
    return [make_completion(0, [])] if request_id.endswith("r1/0") else completions


async def test_evaluation_counts_right_wrong_empty_and_unscored_answers() -> None:
    evaluation = await run(FakeRollout(script=nothing_for_row_1, policy_version=3), FakeReward(exact))
    assert evaluation == Evaluation(
        accuracy=0.5,
        mean_reward=1.0,
        policy_versions=(3,),
        num=4,
        num_unscored=1,
        num_rows=4,
        samples=1,
        mean_length=0.75,
        reward_revision=1,
    )


async def test_several_samples_give_pass_rate_best_of_lengths_and_truncation() -> None:
    def script(request_id: str, completions: list[Completion]) -> list[Completion]:
        own = int(request_id.split("-r")[1].split("/")[0]) + 1
        # Row r of 4: r of its 3 answers are right; the last one is cut, and two tokens long.
        right = [make_completion(index, [own if index < own - 1 else 99], policy_version=3) for index in range(2)]
        cut = make_completion(2, [own, own] if own < 4 else [own], policy_version=3, finish_reason=FinishReason.LENGTH)
        return [*right, cut]

    def score(sample: ScoreSample) -> ScoreResult:
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=float(sample.response == sample.row["answer"]))

    config = make_config(samples=3, temperature=1.0)
    evaluation = await run(FakeRollout(script=script, policy_version=3), FakeReward(score), config)
    assert evaluation.accuracy == pytest.approx((0 / 3 + 1 / 3 + 2 / 3 + 3 / 3) / 4)
    assert evaluation.best_of_samples == 3 / 4
    assert (evaluation.num, evaluation.num_rows, evaluation.samples) == (12, 4, 3)
    assert evaluation.mean_length == pytest.approx(15 / 12)
    assert evaluation.truncated_share == pytest.approx(4 / 12)
    assert evaluation.metrics()["best_of_samples"] == 3 / 4


async def test_accuracy_is_told_per_source() -> None:
    config = make_config(reward={"sources": {"low": "sum", "high": "exact"}})
    evaluation = await run(FakeRollout(script=nothing_for_row_1, policy_version=3), FakeReward(exact), config)
    assert evaluation.source_accuracy == {"high": 0.5, "low": 0.5}
    assert evaluation.metrics()["accuracy_low"] == 0.5


def right(sample: ScoreSample) -> ScoreResult:
    return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=float(sample.response == sample.row["answer"]))


def declined(sample: ScoreSample) -> ScoreResult:
    return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.NOT_SCORED, message="no answer in the row")


async def test_evaluation_that_pauses_scores_again_what_lacks_a_score_and_counts_it_once() -> None:
    reward = FakeReward(lambda sample: declined(sample) if sample.row["data_source"] == "high" else right(sample))

    def repair() -> None:
        reward.score_one = right

    attention = FakeAttention([repair])
    evaluation = await run(FakeRollout(policy_version=3), reward, make_config(reward={"max_unscored_share": 0.4}), attention=attention)
    assert (evaluation.accuracy, evaluation.num_unscored, evaluation.num_rows) == (1.0, 0, 4)
    (alert,) = attention.alerts
    assert alert.what == "2 of 4 samples of the evaluation have no score; reward.max_unscored_share is 0.4"
    assert (alert.service, alert.error) == ("arithmetic@3 on r", "arithmetic@3: no answer in the row")
    asked = [sample.sample_id for call in reward.calls for sample in call]
    assert sorted(asked) == sorted([f"eval-v3-r{index}/0/0" for index in (0, 1, 2, 2, 3, 3)])


async def test_evaluation_is_scored_by_one_revision_even_if_another_is_active_after_its_pause() -> None:
    reward = FakeReward(lambda sample: declined(sample) if sample.row["data_source"] == "high" else right(sample))
    routes = FakeRoutes(revision(component("sum")))

    def repair() -> None:
        reward.score_one = right
        routes.active = revision(component("exact"), number=2)

    config = make_config(reward={"max_unscored_share": 0.4})
    evaluation = await run(FakeRollout(policy_version=3), reward, config, routes=routes, attention=FakeAttention([repair]))
    assert (evaluation.accuracy, evaluation.reward_revision, evaluation.metrics()["reward_revision"]) == (1.0, 2, 2.0)
    assert len([sample for (name, _), call in zip(reward.asked, reward.calls, strict=True) if name == "exact" for sample in call]) == 4


async def test_evaluation_keeps_the_revision_that_was_active_when_it_began() -> None:
    reward = FakeReward(right)
    routes = FakeRoutes(revision(component("sum")))
    rollout = FakeRollout(policy_version=3)
    rollout.gate = asyncio.Event()
    evaluating = asyncio.create_task(run(rollout, reward, routes=routes))
    await rollout.entered.wait()
    routes.active = revision(component("exact"), number=2)
    rollout.gate.set()
    assert (await evaluating).reward_revision == 1
    assert {name for name, _ in reward.asked} == {"sum"}


async def test_evaluation_stopped_in_its_pause_ends_without_a_result() -> None:
    with pytest.raises(StoppedWhilePausedError):
        await run(FakeRollout(policy_version=3), FakeReward(declined))


async def test_evaluation_asks_for_one_greedy_sample_without_seed() -> None:
    rollout = FakeRollout(policy_version=3)
    await run(rollout, FakeReward())
    assert sorted(rollout.requests) == [(f"run/eval-v3-r{index}/0", ()) for index in range(4)]


async def test_same_version_and_seed_are_evaluated_alike() -> None:
    config = make_config(samples=2, temperature=0.7)
    first, second, other = FakeRollout(policy_version=3), FakeRollout(policy_version=3), FakeRollout(policy_version=3)
    await run(first, FakeReward(), config)
    await run(second, FakeReward(), config)
    await run(other, FakeReward(), make_config(seed=1, samples=2, temperature=0.7))
    assert sorted(first.requests) == sorted(second.requests)
    assert {len(set(seeds)) for _, seeds in first.requests} == {2}
    assert not {seeds for _, seeds in first.requests} & {seeds for _, seeds in other.requests}


def test_evaluation_samples_by_its_own_settings() -> None:
    config = make_config(samples=5, temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=99)
    request = evaluation_request(config, (2, 7), 3)
    assert request.sampling == SamplingParams(temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=99, stop_token_ids=(2, 7))
    assert (request.num_samples, request.seed, request.min_policy_version) == (5, 0, 3)
    greedy = evaluation_request(make_config(), (2,), 3)
    assert (greedy.sampling, greedy.seed) == (SamplingParams(temperature=0.0, max_new_tokens=4, stop_token_ids=(2,)), None)


def test_greedy_baseline_stops_where_training_stops() -> None:
    request = greedy_request(RolloutSection(max_new_tokens=4, min_new_tokens=2), (2,), 3)
    assert request.sampling == SamplingParams(temperature=0.0, max_new_tokens=4, min_new_tokens=2, stop_token_ids=(2,))
    assert (request.num_samples, request.seed) == (1, None)
    assert greedy_request(RolloutSection(max_new_tokens=4, ignore_eos=True), (2,), 3).sampling.stop_token_ids == ()


def test_component_correct_decides_over_the_total() -> None:
    result = ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=1.2, components={"correct": 0.0, "format": 1.2})
    assert not is_correct(result)
    assert is_correct(ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=0.5, components={"correct": 1.0, "length": -0.5}))
    assert not is_correct(ScoreResult(sample_id="s", status=ScoreStatus.NOT_SCORED, value=1.0))


def test_correct_from_moves_the_limit() -> None:
    half = ScoreResult(sample_id="s", status=ScoreStatus.SCORED, value=0.5)
    assert is_correct(half, 0.5)
    assert not is_correct(half, 0.6)
