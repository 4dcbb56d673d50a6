"""The real train step on one rank: splits, ratio, skipped updates, idempotency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shoal_trainer import models
from shoal_trainer.batching import build_micro_batch
from shoal_trainer.distributed import RankContext

from shoal.errors import InvalidRequestError, NotFoundError, StateError
from shoal.types import ScoreStatus
from tests.helpers.trainer_bench import (
    VOCAB_SIZE,
    MemoryRecords,
    Split,
    even_split,
    make_batch,
    make_record,
    ppo_step,
    ragged_records,
    ref_of,
    save_policy,
    whole_parameters,
)
from tests.helpers.trainer_step import Step

SPLITS: list[Split] = [even_split(6, 1, 1), even_split(6, 1, 8)]
"""All records in one micro-batch, and one each beside two empty ones."""


@pytest.mark.parametrize("retain_graph_tokens", [0, 10_000])
def test_train_step_gives_the_same_loss_and_gradient_for_every_split(
    policy_folder: Path, context: RankContext, retain_graph_tokens: int
) -> None:
    """On one rank; other numbers of ranks and the aggregations are in the integration tests."""
    gang = {"retain_graph_tokens": retain_graph_tokens}
    settings: dict[str, Any] = {"algorithm": {"entropy_coef": 0.01}, "actor": gang, "critic": gang}
    results = []
    for split, overhead_tokens in ((SPLITS[0], None), (SPLITS[1], None), (SPLITS[1], 0.0)):
        step = Step(policy_folder, context, ragged_records(), overhead_tokens=overhead_tokens, **settings)
        results.append((*step.run(split), step.gradients))
    whole_actor, whole_critic, whole = results[0]
    for actor_metrics, critic_metrics, gradients in results[1:]:
        for name, value in gradients.items():
            assert torch.allclose(value, whole[name], atol=1e-6, rtol=1e-5), name
        for name in ("actor_loss", "grad_norm", "entropy", "kl", "num_tokens"):
            assert actor_metrics[name] == pytest.approx(whole_actor[name], abs=1e-6, rel=1e-5), name
        for name in ("critic_loss", "grad_norm", "value_mean", "explained_variance"):
            assert critic_metrics[name] == pytest.approx(whole_critic[name], abs=1e-6, rel=1e-5), name


def test_train_step_without_a_kept_graph_gives_the_same_gradient(policy_folder: Path, context: RankContext) -> None:
    gradients = []
    for tokens in (0, 10_000):
        step = Step(policy_folder, context, ragged_records(), actor={"retain_graph_tokens": tokens}, critic={"retain_graph_tokens": tokens})
        step.run(even_split(6, 1, 2))
        gradients.append(step.gradients)
    for name, value in gradients[0].items():
        assert torch.allclose(value, gradients[1][name], atol=1e-7, rtol=1e-6), name


@pytest.mark.parametrize("retain_graph_tokens", [0, 10_000])
def test_train_step_ratio_is_one_on_fresh_data_with_dropout_and_temperature(
    tmp_path: Path, context: RankContext, retain_graph_tokens: int
) -> None:
    folder = save_policy(tmp_path / "model", dropout=0.1)
    step = Step(folder, context, ragged_records(), rollout={"temperature": 0.7}, actor={"retain_graph_tokens": retain_graph_tokens})
    metrics, _ = step.run(even_split(6, 1, 2))
    assert metrics["ratio_max_deviation"] <= (0.0 if retain_graph_tokens else 1e-5)
    assert metrics["clip_fraction"] == 0.0
    assert abs(metrics["approx_kl"]) <= 1e-6


def test_train_step_runs_epochs_and_mini_batches(policy_folder: Path, context: RankContext) -> None:
    step = Step(policy_folder, context, ragged_records(), algorithm={"epochs": 2, "mini_batches": 2})
    metrics, critic_metrics = step.run([[[[0, 1], [2]], [[3, 4], [5]]]])
    assert metrics["num_updates"] == critic_metrics["num_updates"] == 4
    assert metrics["ratio_max_deviation"] > 1e-3
    assert step.actor.policy_version == 1


def test_train_step_without_a_trainable_token_changes_nothing(policy_folder: Path, context: RankContext) -> None:
    records = [make_record(i, response_mask=np.zeros(5, np.bool_)) for i in range(2)]
    step = Step(policy_folder, context, records)
    before = whole_parameters(step.actor.module)
    metrics, critic_metrics = step.run(even_split(2, 1, 2))
    assert metrics["actor_loss"] == critic_metrics["critic_loss"] == 0.0
    assert metrics["num_updates"] == 0.0
    assert metrics["num_updates_skipped"] == 1.0
    assert step.actor.policy_version == 0
    assert all(torch.equal(value, before[name]) for name, value in whole_parameters(step.actor.module).items())
    assert not step.actor.optimizer._adamw.state


def test_train_step_ignores_records_that_were_not_scored(policy_folder: Path, context: RankContext) -> None:
    records = ragged_records(4)
    unscored = make_record(9, reward=1e6, reward_status=ScoreStatus.NOT_SCORED)
    alone = Step(policy_folder, context, records)
    metrics, _ = alone.run(even_split(4, 1, 1))
    mixed = Step(policy_folder, context, [*records, unscored])
    mixed_metrics, _ = mixed.run(even_split(5, 1, 1))
    assert mixed_metrics["num_dropped"] == 1.0
    assert mixed_metrics["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)


def test_train_step_skips_an_update_whose_gradient_is_not_finite(policy_folder: Path, context: RankContext) -> None:
    step = Step(policy_folder, context, ragged_records())
    step.run(even_split(6, 1, 1))
    before = whole_parameters(step.actor.module)
    parameter = next(step.actor.module.parameters())
    moments = step.actor.optimizer._adamw.state[parameter]["exp_avg"].full_tensor().clone()
    handle = parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(float("nan")))  # type: ignore[no-untyped-call]
    batch = make_batch(step.records, even_split(6, 1, 1), 2)
    step.actor.forward_batch(batch)
    step.critic.forward_batch(batch)
    step.actor.compute_advantages(2, 0.0, 0.0)
    result = step.actor.update_batch(2)
    handle.remove()
    assert not result.applied
    assert result.policy_version == 1
    assert step.actor.optimizer.num_skipped == 1
    assert all(torch.equal(value, before[name]) for name, value in whole_parameters(step.actor.module).items())
    assert torch.equal(step.actor.optimizer._adamw.state[parameter]["exp_avg"].full_tensor(), moments)
    assert step.run(even_split(6, 1, 1), 3)[0]["num_updates"] == 1.0


def test_train_step_repeated_commands_get_the_first_answer(policy_folder: Path, context: RankContext) -> None:
    step = Step(policy_folder, context, ragged_records())
    batch = make_batch(step.records, even_split(6, 1, 2))
    forward = step.actor.forward_batch(batch)
    assert step.actor.forward_batch(batch) is forward
    step.critic.forward_batch(batch)
    advantages = step.actor.compute_advantages(1, 0.1, 0.0)
    assert step.actor.compute_advantages(1, 0.9, 0.0) is advantages
    update = step.actor.update_batch(1)
    parameters = whole_parameters(step.actor.module)
    assert step.actor.update_batch(1) is update
    assert step.actor.forward_batch(batch) is forward
    assert all(torch.equal(value, parameters[name]) for name, value in whole_parameters(step.actor.module).items())


def test_train_step_refuses_commands_out_of_order(policy_folder: Path, context: RankContext) -> None:
    step = Step(policy_folder, context, ragged_records())
    batch = make_batch(step.records, even_split(6, 1, 1))
    with pytest.raises(StateError):
        step.actor.update_batch(1)
    step.actor.forward_batch(batch)
    with pytest.raises(StateError):
        step.actor.update_batch(1)
    with pytest.raises(NotFoundError, match="values"):
        step.actor.compute_advantages(1, 0.0, 0.0)
    step.critic.forward_batch(batch)
    with pytest.raises(StateError, match="compute_advantages"):
        step.critic.update_batch(1)
    with pytest.raises(InvalidRequestError, match="actor"):
        step.critic.compute_advantages(1, 0.0, 0.0)
    step.actor.compute_advantages(1, 0.0, 0.0)
    assert step.critic.update_batch(1).applied
    assert step.actor.update_batch(1).applied


def test_train_step_after_an_abandoned_step_equals_one_without(policy_folder: Path, context: RankContext) -> None:
    straight, abandoned = (Step(policy_folder, context, ragged_records()) for _ in range(2))
    abandoned.actor.forward_batch(make_batch(abandoned.records, even_split(6, 1, 3)))
    for step in (straight, abandoned):
        step.run(even_split(6, 1, 2), 2)
    for name, value in straight.gradients.items():
        assert torch.allclose(value, abandoned.gradients[name], atol=1e-7), name


def test_train_step_refuses_batches_of_another_run_or_gang_size(policy_folder: Path, context: RankContext) -> None:
    step = Step(policy_folder, context, ragged_records())
    with pytest.raises(InvalidRequestError, match="2 ranks"):
        step.actor.forward_batch(make_batch(step.records, even_split(6, 2, 1)))
    missing = MemoryRecords(step.records[:2])
    step.actor._loader._records = missing
    with pytest.raises(NotFoundError):
        step.actor.forward_batch(make_batch(step.records, even_split(6, 1, 1)))


def test_train_step_with_group_advantages_loads_no_critic_column(policy_folder: Path, context: RankContext) -> None:
    step = Step(policy_folder, context, ragged_records(), algorithm={"estimator": "grpo", "kl_in": "none"})
    assert not step.actor.has_reference
    metrics, _ = ppo_step(step.actor, None, make_batch(step.records, even_split(6, 1, 2)))
    assert metrics["num_updates"] == 1.0
    assert not step.source.columns


def test_train_step_with_equal_rewards_in_every_group_and_no_kl_changes_nothing(policy_folder: Path, context: RankContext) -> None:
    records = [make_record(i, group=i // 2, reward=0.5) for i in range(4)]
    step = Step(policy_folder, context, records, algorithm={"estimator": "grpo", "kl_in": "none"})
    before = whole_parameters(step.actor.module)
    ppo_step(step.actor, None, make_batch(records, even_split(4, 1, 1)))
    assert all(torch.equal(value, before[name]) for name, value in whole_parameters(step.actor.module).items())


def test_train_step_uses_the_learning_rate_of_the_schedule(policy_folder: Path, context: RankContext) -> None:
    step = Step(policy_folder, context, ragged_records(), actor={"lr": 1e-3, "warmup_steps": 2})
    rates = [step.run(even_split(6, 1, 1), number)[0]["lr"] for number in (1, 2, 3)]
    assert rates == pytest.approx([0.0, 5e-4, 1e-3])


def test_train_step_after_a_warm_up_equals_one_without(policy_folder: Path, context: RankContext) -> None:
    cold, warm = (Step(policy_folder, context, ragged_records()) for _ in range(2))
    warm.actor.warm_up()
    warm.critic.warm_up()
    assert warm.actor.optimizer.num_updates == 0
    for step in (cold, warm):
        step.run(even_split(6, 1, 2))
    for name, value in whole_parameters(cold.actor.module).items():
        assert torch.equal(value, whole_parameters(warm.actor.module)[name]), name


def test_train_step_makes_rewarded_responses_likelier_and_others_less_likely(policy_folder: Path, context: RankContext) -> None:
    records = [make_record(i, reward=float(i % 2)) for i in range(8)]
    step = Step(policy_folder, context, records, algorithm={"kl_in": "none"}, critic={"lr": 1e-2})
    before = _mean_logprobs(step)
    for number in range(1, 6):
        step.run(even_split(8, 1, 2), number)
    change = _mean_logprobs(step) - before
    assert change[1::2].min() > 0
    assert change[0::2].max() < 0


def _mean_logprobs(step: Step) -> torch.Tensor:
    """Mean log-probability of each record's response, [B]."""
    micro = build_micro_batch([ref_of(record) for record in step.records], step.records, VOCAB_SIZE)
    with torch.no_grad():
        logprobs, _ = step.actor._logprobs(step.actor.module, micro, with_entropy=False)
    return logprobs.sum(dim=1) / micro.response_mask.sum(dim=1)


def test_train_step_of_a_large_vocabulary_in_several_chunks_equals_one_chunk(
    policy_folder: Path, context: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = []
    for chunk_elements in (1 << 24, 4 * VOCAB_SIZE):
        monkeypatch.setattr(models, "CHUNK_ELEMENTS", chunk_elements)
        step = Step(policy_folder, context, ragged_records(), algorithm={"entropy_coef": 0.1})
        step.run(even_split(6, 1, 1))
        gradients.append(step.gradients)
    for name, value in gradients[0].items():
        assert torch.allclose(value, gradients[1][name], atol=1e-6), name


def test_train_step_kl_in_loss_pulls_towards_the_reference(policy_folder: Path, context: RankContext) -> None:
    plain, pulled = (Step(policy_folder, context, ragged_records(), algorithm={"kl_in": "loss"}) for _ in range(2))
    for number in (1, 2, 3, 4):
        kl_plain = plain.run(step=number, kl_loss_coef=0.0)[0]["kl_k3"]
        kl_pulled = pulled.run(step=number, kl_loss_coef=5.0)[0]["kl_k3"]
    assert 0 < kl_pulled < kl_plain


def test_train_step_in_bf16_mixed_keeps_float32_parameters_and_stays_close(policy_folder: Path, context: RankContext) -> None:
    exact = Step(policy_folder, context, ragged_records())
    mixed = Step(policy_folder, context, ragged_records(), actor={"precision": "bf16_mixed"}, critic={"precision": "bf16_mixed"})
    exact_metrics, _ = exact.run(even_split(6, 1, 2))
    mixed_metrics, critic_metrics = mixed.run(even_split(6, 1, 2))
    assert mixed_metrics["ratio_max_deviation"] == 0.0
    assert mixed_metrics["entropy"] == pytest.approx(exact_metrics["entropy"], rel=2e-2)
    assert mixed_metrics["grad_norm"] == pytest.approx(exact_metrics["grad_norm"], rel=1e-1)
    assert critic_metrics["num_updates"] == 1.0
    assert {p.dtype for p in mixed.actor.module.parameters()} == {torch.float32}
