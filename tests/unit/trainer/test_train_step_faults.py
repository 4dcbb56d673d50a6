"""Steps with nothing to learn from, garbage in masked slots, and updates that must not happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shoal_trainer.distributed import RankContext

from shoal.types import ExperienceRecord, FinishReason
from tests.helpers.trainer_bench import key_of, make_batch, make_record, ragged_records, save_policy, whole_parameters
from tests.helpers.trainer_step import Step


def optimizer_state(step: Step) -> list[torch.Tensor]:
    """Moments and step counters of the actor's optimizer."""
    state = step.actor.optimizer._adamw.state
    return [_whole(value).clone() for of_parameter in state.values() for value in of_parameter.values()]


def _whole(tensor: Any) -> torch.Tensor:  # noqa: ANN401
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def assert_untouched(step: Step, parameters: dict[str, torch.Tensor], state: list[torch.Tensor]) -> None:
    assert all(torch.equal(value, parameters[name]) for name, value in whole_parameters(step.actor.module).items())
    now = optimizer_state(step)
    assert len(now) == len(state)
    assert all(torch.equal(value, before) for value, before in zip(now, state, strict=True))


def flat_records() -> list[ExperienceRecord]:
    """Groups whose rewards are all equal."""
    return [make_record(i, group=i // 2, reward=0.35 * (i // 2)) for i in range(6)]


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """Fields of the log lines of an event."""
    return [vars(record) for record in caplog.records if record.message == event]


def test_train_step_whose_groups_have_no_spread_leaves_everything_bit_identical(
    policy_folder: Path, context: RankContext, caplog: pytest.LogCaptureFixture
) -> None:
    """R07 with beta 0: old moments must not move the parameters either."""
    step = Step(policy_folder, context, ragged_records(), algorithm={"estimator": "grpo", "kl_in": "none"}, actor={"weight_decay": 0.1})
    assert step.run()[0]["num_updates"] == 1.0
    parameters, state = whole_parameters(step.actor.module), optimizer_state(step)
    assert any(value.abs().max() > 0 for value in state)
    step.use(flat_records())
    metrics, _ = step.run(step=2)
    assert_untouched(step, parameters, state)
    assert metrics["frac_zero_std"] == 1.0
    assert metrics["grad_norm"] == 0.0
    assert metrics["num_updates_skipped"] == 1.0
    assert step.actor.policy_version == 1
    assert logged(caplog, "no_reward_spread")
    assert logged(caplog, "update_skipped")


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_train_step_whose_groups_have_no_spread_still_follows_the_kl(
    policy_folder: Path, context: RankContext, tmp_path: Path, kl_in: str
) -> None:
    """R07 with beta above 0: the loss term pulls to the reference; in the reward the KL makes the sums of a group differ."""
    model = {"reference_path": str(save_policy(tmp_path / "reference", seed=1))}
    step = Step(policy_folder, context, flat_records(), algorithm={"estimator": "grpo", "kl_in": kl_in}, model=model)
    metrics, _ = step.run(kl_coef=0.1, kl_loss_coef=0.1)
    assert metrics["frac_zero_std"] == 1.0
    assert metrics["grad_norm"] > 0
    assert metrics["num_updates"] == 1.0


@pytest.mark.parametrize("retain_graph_tokens", [0, 10_000])
def test_train_step_whose_responses_are_all_cut_and_masked_changes_nothing(
    policy_folder: Path, context: RankContext, caplog: pytest.LogCaptureFixture, retain_graph_tokens: int
) -> None:
    """R10, M-AGG-04."""
    algorithm = {"mask_truncated": True, "loss_aggregation": "seq_mean_token_sum_norm", "entropy_coef": 0.01}
    gang = {"retain_graph_tokens": retain_graph_tokens}
    step = Step(policy_folder, context, ragged_records(), algorithm=algorithm, actor=gang, critic=gang)
    step.run()
    parameters, state = whole_parameters(step.actor.module), optimizer_state(step)
    step.use([replace(record, finish_reason=FinishReason.LENGTH) for record in ragged_records()])
    metrics, critic_metrics = step.run([[[[0, 1, 2], [3, 4, 5]]]], 2)
    assert_untouched(step, parameters, state)
    assert metrics["actor_loss"] == critic_metrics["critic_loss"] == 0.0
    assert metrics["grad_norm"] == 0.0
    assert metrics["num_updates"] == 0.0
    assert metrics["num_updates_skipped"] == critic_metrics["num_updates_skipped"] == 1.0
    assert metrics["num_masked_truncated"] == 6.0
    assert step.actor.policy_version == 1
    assert logged(caplog, "update_skipped")
    step.use(ragged_records())
    assert step.run(step=3)[0]["num_updates"] == 1.0


def test_train_step_skips_only_the_mini_batch_without_a_trained_token(policy_folder: Path, context: RankContext) -> None:
    records = ragged_records()
    records[0] = replace(records[0], response_mask=np.zeros_like(records[0].response_mask))
    step = Step(policy_folder, context, records, algorithm={"epochs": 2, "mini_batches": 2})
    metrics, critic_metrics = step.run([[[[0]], [[1, 2], [3, 4, 5]]]])
    assert metrics["num_updates"] == critic_metrics["num_updates"] == 2.0
    assert metrics["num_updates_skipped"] == critic_metrics["num_updates_skipped"] == 2.0
    assert step.actor.policy_version == 1


def garbage_in_rollout_logprobs(record: ExperienceRecord, value: float) -> ExperienceRecord:
    return replace(record, rollout_logprobs=np.where(record.response_mask, record.rollout_logprobs, value).astype(np.float32))


def garbage_in_token_rewards(record: ExperienceRecord, value: float) -> ExperienceRecord:
    rewards = np.linspace(-1.0, 1.0, len(record.response_ids))
    return replace(record, token_rewards=np.where(record.response_mask, rewards, value).astype(np.float32))


def holed_records() -> list[ExperienceRecord]:
    """Responses with a masked hole in the middle and at the end."""
    records = []
    for index in range(4):
        mask = np.array([True, True, False, True, False, False])
        records.append(make_record(index, group=index // 2, num_response=6, reward=float(index), response_mask=mask))
    return records


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -200.0])
@pytest.mark.parametrize("spoil", [garbage_in_rollout_logprobs, garbage_in_token_rewards])
def test_train_step_is_the_same_with_any_bits_in_masked_slots_of_a_record(
    policy_folder: Path, context: RankContext, spoil: Callable[[ExperienceRecord, float], ExperienceRecord], value: float
) -> None:
    """R11 among them: a difference of 200 in a masked slot."""
    algorithm = {
        "old_logprobs": "rollout", "importance_weights": "sequence_truncate", "rejection": "geometric", "rejection_low": 1e-3,
        "rejection_high": 1e3, "kl_in": "both", "entropy_coef": 0.01,
    }  # fmt: skip
    steps = [
        Step(policy_folder, context, [spoil(record, garbage) for record in holed_records()], algorithm=algorithm)
        for garbage in (0.0, value)
    ]
    metrics = [step.run() for step in steps]
    _assert_same_steps(steps, metrics)


def _assert_same_steps(steps: list[Step], metrics: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    for name, expected in steps[0].gradients.items():
        assert torch.equal(steps[1].gradients[name], expected), name
    assert max(gradient.abs().max().item() for gradient in steps[0].gradients.values()) > 1e-3
    for clean, spoiled in zip(*metrics, strict=True):
        for name, value in clean.items():
            if not name.endswith("_s"):
                assert spoiled[name] == value, name


def _in_padding(column: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(mask, column, np.nan).astype(np.float32)


def test_train_step_is_the_same_with_nan_in_masked_slots_of_the_columns(policy_folder: Path, context: RankContext) -> None:
    """The columns `values`, `returns`, and the reference's log-probabilities."""
    steps = [Step(policy_folder, context, holed_records(), algorithm={"kl_in": "both"}) for _ in range(2)]
    metrics = []
    for step, spoil in zip(steps, (False, True), strict=True):
        batch = make_batch(step.records, [[[[0, 1, 2, 3]]]])
        step.actor.forward_batch(batch)
        step.critic.forward_batch(batch)
        _spoil(step, "values", spoil)
        actor_metrics = step.actor.compute_advantages(1, 0.1, 0.1)
        _spoil(step, "returns", spoil)
        critic_metrics = step.critic.update_batch(1).metrics
        metrics.append((actor_metrics | step.actor.update_batch(1).metrics, critic_metrics))
    _assert_same_steps(steps, metrics)


def _spoil(step: Step, name: str, spoil: bool) -> None:
    """Put NaN into the masked slots of a column, and of what the actor keeps."""
    if not spoil:
        return
    for record in step.records:
        key = key_of(record)
        step.source.columns[name, key] = _in_padding(step.source.columns[name, key], record.response_mask)
    assert step.actor._step is not None
    for micro in step.actor._step.micro_batches:
        assert micro.ref_logprobs is not None
        micro.ref_logprobs = micro.ref_logprobs.masked_fill(~micro.batch.response_mask, float("nan"))


def test_train_step_drops_and_counts_ids_that_only_pad_the_vocabulary(context: RankContext, tmp_path: Path) -> None:
    """R30: the tokenizer knows 60 ids, the model has rows for 61; the trainer normalises over the 60."""
    folder = save_policy(tmp_path / "model")
    vocabulary = {f"t{index}": index for index in range(60)}
    (folder / "tokenizer.json").write_text('{"model": {"vocab": ' + str(vocabulary).replace("'", '"') + "}}")
    records = [replace(record, response_ids=np.minimum(record.response_ids, 59)) for record in ragged_records()]
    records = [replace(record, prompt_ids=np.minimum(record.prompt_ids, 59)) for record in records]
    clean = Step(folder, context, records)
    spoiled_ids = records[2].response_ids.copy()
    spoiled_ids[-1] = 60
    extra = replace(records[2], response_ids=spoiled_ids, sample_index=77)
    spoiled = Step(folder, context, [*records, extra])
    metrics, _ = clean.run()
    found, _ = spoiled.run()
    assert found["num_dropped"] == 1.0
    assert metrics["num_dropped"] == 0.0
    assert found["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)
    assert found["ratio_first_deviation"] <= 1e-5


def test_train_step_replaces_a_step_that_has_only_advantages(policy_folder: Path, context: RankContext) -> None:
    """Critic warm-up: the actor's update is never called, its critic is trained, and the next step is an ordinary one."""
    warm = Step(policy_folder, context, ragged_records())
    before = whole_parameters(warm.actor.module)
    for number in (1, 2):
        batch = make_batch(warm.records, [[[[0, 1, 2, 3, 4, 5]]]], number)
        warm.actor.forward_batch(batch)
        warm.critic.forward_batch(batch)
        warm.actor.compute_advantages(number, 0.05, 0.05)
        assert warm.critic.update_batch(number).applied
    assert warm.actor.policy_version == 0
    assert all(torch.equal(value, before[name]) for name, value in whole_parameters(warm.actor.module).items())
    metrics, _ = warm.run(step=3)
    assert metrics["num_updates"] == 1.0
    assert metrics["ratio_first_deviation"] == 0.0
    assert warm.actor.policy_version == 1
