"""From records to advantages through the real train step: shaping, groups, baselines, components, KL, and what metrics say of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from shoal_trainer.distributed import RankContext

from shoal.algo.advantages import AdvantageInputs
from shoal.config.functions import Entrypoint
from shoal.types import FinishReason, ScoreStatus
from tests.helpers.trainer_bench import even_split, make_batch, make_record, ragged_records
from tests.helpers.trainer_splits import component
from tests.helpers.trainer_step import Step

OUTCOMES = {"estimator": "rloo", "kl_in": "none"}


def outcome_of(step: Step) -> list[float]:
    """Sum of each record's rewards, in the order of the records: all of them are one micro-batch of one length."""
    return step.inputs.rewards.sum(dim=1).tolist()


def test_train_step_clips_then_penalises_then_normalises_outcome_rewards(policy_folder: Path, context: RankContext) -> None:
    records = [make_record(i, num_response=5, reward=reward) for i, reward in enumerate((-3.0, 0.0, 0.5, 9.0))]
    reward = {"clip": (-1.0, 1.0), "overlong_buffer_tokens": 4, "overlong_penalty": 0.8}
    step = Step(policy_folder, context, records, algorithm=OUTCOMES, reward=reward, rollout={"max_new_tokens": 6})
    step.run()
    shaped = np.clip([-3.0, 0.0, 0.5, 9.0], -1.0, 1.0) - 0.8 * 3 / 4
    assert outcome_of(step) == pytest.approx(shaped, abs=1e-6)
    reward["normalise"] = "batch"
    step = Step(policy_folder, context, records, algorithm=OUTCOMES, reward=reward, rollout={"max_new_tokens": 6})
    step.run()
    assert outcome_of(step) == pytest.approx((shaped - shaped.mean()) / np.sqrt(shaped.var() + 1e-8), abs=1e-5)


def test_train_step_uses_token_rewards_as_given_beside_shaped_outcomes(policy_folder: Path, context: RankContext) -> None:
    given = np.array([3.0, np.nan, -4.0, 0.5, 7.0], np.float32)
    mask = np.array([True, False, True, True, True])
    records = [make_record(0, reward=5.0), make_record(1, reward=0.0, token_rewards=given, response_mask=mask), make_record(2, reward=-5.0)]
    reward = {"clip": (-1.0, 1.0), "normalise": "batch"}
    step = Step(policy_folder, context, records, algorithm=OUTCOMES, reward=reward)
    step.run()
    assert step.inputs.rewards[1].tolist() == [3.0, 0.0, -4.0, 0.5, 7.0]
    # Mean and spread are those of the two outcomes alone.
    assert outcome_of(step)[0] == pytest.approx(1.0, abs=1e-6)
    assert outcome_of(step)[2] == pytest.approx(-1.0, abs=1e-6)


def test_train_step_puts_the_score_on_the_last_trained_token_and_the_penalty_on_every_one(
    policy_folder: Path, context: RankContext
) -> None:
    """R29, M-REW-01: reported lengths decide, also where a response ends with, or pads with, the same id."""
    records = [make_record(0, num_response=3, reward=1.0), make_record(1, num_response=5, reward=-0.5)]
    records[0] = replace(records[0], response_ids=np.array([5, 7, 0], np.int32))
    step = Step(policy_folder, context, records, algorithm={"kl_in": "reward"})
    step.run(kl_coef=0.0)
    assert step.inputs.rewards.tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, -0.5]]
    assert step.inputs.response_mask.sum(dim=1).tolist() == [3, 5]


def test_train_step_finds_groups_by_id_in_any_order(policy_folder: Path, context: RankContext) -> None:
    records = [make_record(i, group=i % 2, reward=float(i)) for i in range(4)]
    step = Step(policy_folder, context, records, algorithm=OUTCOMES)
    step.run([[[[0, 3], [2], [1]]]])
    index = step.inputs.group_index
    assert index is not None
    assert step.inputs.num_groups == 2
    assert index.tolist() == [0, 1, 0, 1]


def test_train_step_without_need_of_groups_gives_none(policy_folder: Path, context: RankContext) -> None:
    step = Step(policy_folder, context, ragged_records(), algorithm={"kl_in": "none"})
    step.run()
    assert step.inputs.group_index is None
    assert step.inputs.baselines is None
    assert step.inputs.components is None
    assert step.inputs.bootstrap_values is None
    assert step.inputs.values is not None


def test_train_step_gives_remax_the_greedy_rewards_bounded_and_scaled_like_the_others(policy_folder: Path, context: RankContext) -> None:
    records = [make_record(i, reward=float(i), baseline_reward=baseline) for i, baseline in enumerate((0.5, 7.0, None, 1.0))]
    step = Step(policy_folder, context, records, algorithm={"estimator": "remax", "kl_in": "none"}, reward={"clip": (0.0, 2.0)})
    step.run()
    assert step.inputs.baselines is not None
    assert step.inputs.baselines.tolist() == pytest.approx([0.5, 2.0, float("nan"), 1.0], nan_ok=True)
    reward = {"clip": (0.0, 2.0), "normalise": "batch"}
    step = Step(policy_folder, context, records, algorithm={"estimator": "remax", "kl_in": "none"}, reward=reward)
    step.run()
    scores = np.array([0.0, 1.0, 2.0, 2.0])
    scaled = (np.array([0.5, 2.0, np.nan, 1.0]) - scores.mean()) / np.sqrt(scores.var() + 1e-8)
    assert step.inputs.baselines is not None
    assert step.inputs.baselines.tolist() == pytest.approx(scaled, abs=1e-5, nan_ok=True)


def test_train_step_gives_components_in_the_order_of_their_weights(policy_folder: Path, context: RankContext) -> None:
    failed = replace(component("style", 9.0), status=ScoreStatus.NOT_SCORED)
    parts = [(component("style", 0.25), component("correct", 1.0)), (component("correct", 0.0), component("other", 5.0)), (failed,)]
    records = [make_record(i, reward=float(i), reward_components=part) for i, part in enumerate(parts)]
    reward = {"weights": {"style": 0.5, "correct": 1.0}}
    step = Step(policy_folder, context, records, algorithm={"estimator": "gdpo", "kl_in": "none"}, reward=reward)
    step.run()
    nan = float("nan")
    assert step.inputs.component_weights == (0.5, 1.0)
    assert step.inputs.components is not None
    assert step.inputs.components.flatten().tolist() == pytest.approx([0.25, 1.0, nan, 0.0, nan, nan], nan_ok=True)


def test_train_step_masks_truncated_responses_out_of_the_loss_but_not_of_baselines(policy_folder: Path, context: RankContext) -> None:
    records = [make_record(i, reward=float(i)) for i in range(3)]
    cut = [*records[:2], replace(records[2], finish_reason=FinishReason.LENGTH)]
    steps = [Step(policy_folder, context, part, algorithm={**OUTCOMES, "mask_truncated": True}) for part in (records, cut, records[:2])]
    metrics = [step.run()[0] for step in steps]
    assert steps[0].inputs.rewards.tolist() == steps[1].inputs.rewards.tolist()
    assert [part["num_masked_truncated"] for part in metrics] == [0.0, 1.0, 0.0]
    assert [part["truncated_fraction"] for part in metrics] == pytest.approx([0.0, 1 / 3, 0.0])
    assert metrics[1]["advantage_mean"] == metrics[0]["advantage_mean"]
    name = "actor.language_model.model.norm.weight"
    assert not torch.allclose(steps[1].gradients[name], steps[0].gradients[name], atol=1e-5)
    assert not torch.allclose(steps[1].gradients[name], steps[2].gradients[name], atol=1e-5)


def test_train_step_metrics_name_every_kl_term_that_is_on(policy_folder: Path, context: RankContext) -> None:
    """R68."""
    names = {"kl", "kl_k3", "kl_per_response", "kl_reward_penalty", "kl_loss"}
    common = {"kl", "kl_k3", "kl_per_response"}
    expected = {"none": set(), "reward": common | {"kl_reward_penalty"}, "loss": common | {"kl_loss"}, "both": names}
    for kl_in, present in expected.items():
        step = Step(policy_folder, context, ragged_records(), algorithm={"kl_in": kl_in})
        assert names & step.run()[0].keys() == present
        assert step.actor.has_reference == bool(present)


def test_train_step_kl_terms_have_their_own_coefficients_and_estimators(policy_folder: Path, context: RankContext) -> None:
    step = Step(policy_folder, context, ragged_records(), algorithm={"kl_in": "both", "kl_loss_estimator": "k3"})
    step.run()
    metrics, _ = step.run(step=2, kl_coef=0.3, kl_loss_coef=0.7)
    assert metrics["kl"] != 0.0
    assert metrics["kl_reward_penalty"] == pytest.approx(0.3 * metrics["kl"], rel=1e-5)
    assert metrics["kl_loss"] == pytest.approx(0.7 * metrics["kl_k3"], rel=1e-5)
    num_tokens = metrics["num_tokens"]
    assert metrics["kl_per_response"] == pytest.approx(metrics["kl"] * num_tokens / 6, rel=1e-5)


def test_train_step_metrics_of_the_mismatch_with_the_engine_are_exact(policy_folder: Path, context: RankContext) -> None:
    step = Step(policy_folder, context, ragged_records())
    metrics = step.actor.forward_batch(make_batch(step.records, even_split(6, 1, 2)))
    assert step.actor._step is not None
    kept = step.actor._step.micro_batches
    gaps = (
        torch.cat([(micro.logprobs.detach() - micro.batch.rollout_logprobs)[micro.batch.response_mask] for micro in kept]).double().numpy()
    )
    assert len(gaps) == metrics["num_tokens"]
    quantiles = [metrics[f"mismatch_ratio_{name}"] for name in ("p01", "p50", "p99")]
    assert quantiles == pytest.approx(np.quantile(np.exp(gaps), [0.01, 0.5, 0.99]), rel=1e-9)
    assert metrics["mismatch_kl"] == pytest.approx((np.exp(gaps) - gaps - 1).mean(), rel=1e-5)
    assert metrics["logprob_max_difference"] == pytest.approx(np.abs(gaps).max(), rel=1e-6)


def test_train_step_leaves_out_metrics_that_mean_nothing(policy_folder: Path, context: RankContext) -> None:
    step = Step(policy_folder, context, ragged_records(), rollout={"group_size": 1}, algorithm={"policy_loss": "reinforce"})
    metrics, _ = step.run()
    absent = {"frac_zero_std", "importance_capped_fraction", "importance_dropped_fraction", "rejected_fraction", "num_masked_truncated"}
    assert not metrics.keys() & (absent | {"clip_fraction", "clip_fraction_lower", "kl_loss"})


def test_train_step_tells_lengths_of_cut_and_finished_responses(policy_folder: Path, context: RankContext) -> None:
    """R32: every answer cut, then answers of a single token."""
    cut = [make_record(i, num_response=2, reward=0.0, finish_reason=FinishReason.LENGTH) for i in range(4)]
    metrics, _ = Step(policy_folder, context, cut, algorithm=OUTCOMES).run()
    assert metrics["truncated_fraction"] == 1.0
    assert metrics["finished_length"] == 0.0
    assert metrics["frac_zero_std"] == 1.0
    ended = [make_record(i, num_response=1, reward=float(i)) for i in range(3)] + [make_record(9, num_response=0)]
    metrics, _ = Step(policy_folder, context, ended, algorithm=OUTCOMES).run()
    assert metrics["truncated_fraction"] == 0.0
    assert metrics["finished_length"] == 1.0
    assert metrics["num_dropped"] == 1.0
    assert metrics["frac_zero_std"] == 0.0
    assert metrics["num_updates"] == 1.0


def double_reward(inputs: AdvantageInputs, sum_over_ranks: object, *, factor: float, gamma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """An estimator of a user's own: the reward of each token, times a factor."""
    assert gamma == 0.5
    return inputs.rewards * factor, inputs.rewards


def test_train_step_uses_an_estimator_of_the_users_own(policy_folder: Path, context: RankContext) -> None:
    choice = Entrypoint(entrypoint=f"{__name__}.double_reward", settings={"factor": 2.0}, needs=("groups",))
    step = Step(policy_folder, context, ragged_records(), algorithm={"estimator": choice, "kl_in": "none", "gamma": 0.5})
    metrics, _ = step.run()
    assert step.inputs.group_index is not None
    assert metrics["advantage_mean"] == pytest.approx(2.0 * metrics["return_mean"])
    assert metrics["num_updates"] == 1.0
