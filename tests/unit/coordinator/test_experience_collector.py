"""From prompts to queued records, with fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from shoal_coordinator.alerts import StoppedWhilePausedError
from shoal_coordinator.stage_clock import Stage

from shoal.config.models import RewardSection
from shoal.errors import InternalError, InvalidRequestError, NotFoundError, ShoalError, StateError
from shoal.types import Completion, FinishReason, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_collecting import CollectorSetup
from tests.helpers.coordinator_fakes import FakeReward, FakeRollout, make_completion, make_task, sampled_ids


def unscored_where(is_unscored: Callable[[ScoreSample], bool], message: str = "scorer raised ValueError") -> FakeReward:
    def score_one(sample: ScoreSample) -> ScoreResult:
        if is_unscored(sample):
            return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message=message)
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=float(sample.response.split()[0]))

    return FakeReward(score_one)


async def test_collect_queues_exactly_the_sampled_tokens_with_their_reward() -> None:
    setup = CollectorSetup(rollout=FakeRollout(policy_version=3), reward=unscored_where(lambda _: False))
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
    setup = CollectorSetup()
    setup.rollout.gates["g1"] = setup.queue.called
    # Would wait for ever if g0 were held back until g1 is done.
    assert (await asyncio.wait_for(setup.collect(num_groups=2), 10)).num_groups == 2


async def test_unscored_samples_are_left_out_and_counted() -> None:
    setup = CollectorSetup(reward=unscored_where(lambda sample: sample.sample_id in ("g0/0/0", "g1/0/0", "g1/1/0")), max_unscored_share=0.5)
    collected = await setup.collect(num_groups=3)
    assert {group[0].group_id: len(group) for group in setup.queue.groups} == {"g0": 1, "g2": 2}
    assert (collected.num_unscored, collected.num_groups, collected.num_dropped_groups) == (3, 2, 1)
    assert collected.metrics()["unscored_share"] == 0.5


async def test_too_many_unscored_samples_pause_the_run_and_name_service_share_and_reason() -> None:
    setup = CollectorSetup(reward=unscored_where(lambda sample: sample.sample_id.startswith("g0")), max_unscored_share=0.4)
    with pytest.raises(StoppedWhilePausedError):
        await setup.collect(num_groups=2)
    (alert,) = setup.attention.alerts
    assert alert.what == "2 of 4 samples of the step have no score; reward.max_unscored_share is 0.4"
    assert (alert.service, alert.error) == ("sum@3 on r", "sum@3: scorer raised ValueError")


async def test_dead_scorer_pauses_the_step_before_all_groups_are_generated() -> None:
    setup = CollectorSetup(reward=unscored_where(lambda _: True), max_unscored_share=0.0)
    setup.rollout.gates["g1"] = asyncio.Event()
    with pytest.raises(StoppedWhilePausedError):
        await asyncio.wait_for(setup.collect(num_groups=2), 10)
    assert setup.rollout.num_open == 0


@pytest.mark.parametrize("error", [NotFoundError("no such scorer"), InvalidRequestError("bad row"), InternalError("id 5")])
async def test_failing_service_pauses_the_run_and_never_fails_it(error: ShoalError) -> None:
    setup = CollectorSetup(reward=FakeReward(failures=[error] * 1000), section=RewardSection(scorer="sum", timeout_s=0.1))
    with pytest.raises(StoppedWhilePausedError):
        await setup.collect()
    (alert,) = setup.attention.alerts
    assert alert.error == f"sum@3 failed on 'r': {type(error).__name__}: {error}"


async def test_collect_pauses_when_nothing_is_left_below_the_limit() -> None:
    setup = CollectorSetup(reward=unscored_where(lambda _: True, "the score is nan"), max_unscored_share=1.0)
    with pytest.raises(StoppedWhilePausedError, match=r"4 of 4 samples .* the score is nan"):
        await setup.collect()


async def test_step_without_any_token_is_an_error_with_the_counts() -> None:
    setup = CollectorSetup(
        rollout=FakeRollout(script=lambda _, completions: [make_completion(index, []) for index in range(len(completions))])
    )
    with pytest.raises(StateError, match="none of 4 samples can be trained on: 4 had no token"):
        await setup.collect()


async def test_metrics_show_clipping_and_groups_without_signal() -> None:
    def script(request_id: str, completions: list[Completion]) -> list[Completion]:
        if "g0" in request_id:
            return [make_completion(0, [2, 3], finish_reason=FinishReason.LENGTH), make_completion(1, [4], finish_reason=FinishReason.STOP)]
        return [make_completion(index, [5, 5, 5], finish_reason=FinishReason.LENGTH) for index in range(2)]

    collected = await CollectorSetup(rollout=FakeRollout(script=script), reward=unscored_where(lambda _: False)).collect()
    metrics = collected.metrics()
    assert metrics["clipped_share"] == 0.75
    assert metrics["terminated_length"] == 1.0
    assert metrics["response_length"] == 2.25
    assert metrics["frac_zero_std"] == 0.5
    assert metrics["reward"] == 4.0
    assert metrics["reward_std"] == pytest.approx(np.std([2, 4, 5, 5]))
    assert (metrics["num_samples"], metrics["num_response_tokens"]) == (4, 9)


async def test_end_of_sequence_alone_has_length_one_and_is_scored() -> None:
    setup = CollectorSetup(
        rollout=FakeRollout(script=lambda _, completions: [make_completion(index, [2]) for index in range(len(completions))])
    )
    collected = await setup.collect()
    assert collected.lengths == [1] * 4
    assert collected.metrics()["clipped_share"] == 0.0


async def test_answers_that_are_all_cut_and_worth_nothing_are_told_and_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """R32: the answer needs more tokens than there may be."""
    cut = FakeRollout(
        script=lambda _, own: [make_completion(index, [5, 5], finish_reason=FinishReason.LENGTH) for index in range(len(own))]
    )
    nothing = FakeReward(lambda sample: ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=0.0))
    metrics = (await CollectorSetup(rollout=cut, reward=nothing).collect()).metrics()
    assert (metrics["clipped_share"], metrics["terminated_length"], metrics["frac_zero_std"], metrics["reward"]) == (1.0, 0.0, 1.0, 0.0)
    assert "every_response_was_cut" in caplog.text
    assert "no_group_has_spread" in caplog.text


async def test_step_with_a_finished_answer_and_spread_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    reward = FakeReward(
        lambda sample: ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=float(sample.sample_id.split("/")[1]))
    )
    await CollectorSetup(reward=reward).collect()
    assert "every_response_was_cut" not in caplog.text
    assert "no_group_has_spread" not in caplog.text


async def test_answers_without_tokens_are_excluded_and_counted() -> None:
    """R32: a server that returns nothing."""
    setup = CollectorSetup(rollout=FakeRollout(script=lambda _, own: [make_completion(0, []), *own[1:]]))
    collected = await setup.collect(num_samples=3)
    assert [len(group) for group in setup.queue.groups] == [2, 2]
    assert (collected.metrics()["num_empty"], collected.metrics()["num_samples"]) == (2.0, 4.0)


async def test_sample_without_a_finite_log_probability_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """R36, and R30 for an id that cannot be sampled."""

    def script(request_id: str, own: list[Completion]) -> list[Completion]:
        if "g0" in request_id:
            return [replace(own[0], rollout_logprobs=np.full(own[0].response_ids.size, -np.inf, np.float32)), *own[1:]]
        return [*own[:2], make_completion(2, [100])]

    setup = CollectorSetup(rollout=FakeRollout(script=script))
    metrics = (await setup.collect(num_samples=3)).metrics()
    assert {name: [record.sample_index for record in group] for name, group in setup.queued.items()} == {"g0": [1, 2], "g1": [0, 1]}
    assert (metrics["num_not_finite"], metrics["num_outside_vocab"], metrics["num_samples"]) == (1.0, 1.0, 4.0)
    assert caplog.text.count("samples_dropped") == 2


async def test_step_of_samples_without_finite_log_probabilities_alone_says_so() -> None:
    rollout = FakeRollout(script=lambda _, own: [make_completion(index, [100]) for index in range(len(own))])
    with pytest.raises(StateError, match="4 had an id that cannot be sampled or a log-probability that is not finite"):
        await CollectorSetup(rollout=rollout).collect()


async def test_per_token_rewards_reach_the_record_as_given_and_a_wrong_number_costs_its_sample_alone() -> None:
    """R71."""

    def score_one(sample: ScoreSample) -> ScoreResult:
        length = sample.num_response_tokens
        wrong = sample.sample_id == "g1/1/0"
        values = tuple(0.5 * place for place in range(length - wrong))
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=9.0, token_values=values)

    rollout = FakeRollout(script=lambda _, own: [make_completion(index, [7] * (3 + index)) for index in range(len(own))])
    setup = CollectorSetup(rollout=rollout, reward=FakeReward(score_one))
    collected = await setup.collect()
    assert {name: [record.sample_index for record in group] for name, group in setup.queued.items()} == {"g0": [0, 1], "g1": [0]}
    first, second = setup.queued["g0"]
    assert first.token_rewards is not None
    assert second.token_rewards is not None
    assert (first.token_rewards.tolist(), second.token_rewards.tolist()) == ([0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.5])
    assert (collected.num_unscored, collected.first_unscored_message) == (1, "sum@3: 3 per-token rewards for 4 tokens")


async def test_rows_of_two_sources_go_to_their_scorers_and_say_so_in_the_record() -> None:
    """R72."""
    section = RewardSection(sources={"sums": "sum", "codes": "judge"})
    rows: dict[str, dict[str, object]] = {f"g{index}": {"data_source": "codes" if index % 2 else "sums"} for index in range(4)}
    setup = CollectorSetup(section=section, rows=rows)
    await setup.collect(num_groups=4)
    scorers = {name: {record.reward_components[0].name for record in group} for name, group in setup.queued.items()}
    assert scorers == {"g0": {"sum"}, "g1": {"judge"}, "g2": {"sum"}, "g3": {"judge"}}


async def test_clock_counts_the_three_stages() -> None:
    setup = CollectorSetup()
    await setup.collect()
    stages = setup.clock.read().stages
    assert all(stages[stage] > 0 for stage in (Stage.ROLLOUT, Stage.REWARD, Stage.QUEUE))
