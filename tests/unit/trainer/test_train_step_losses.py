"""The actor's and the critic's gradient against plain loops over an unsharded model: every term of the loss at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shoal_trainer.distributed import RankContext
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from shoal.types import ExperienceRecord, FinishReason
from tests.helpers.trainer_bench import key_of, make_record, save_policy
from tests.helpers.trainer_splits import spread_values
from tests.helpers.trainer_step import Step

TEMPERATURE = 0.7
MAX_NEW_TOKENS = 8

SECTIONS: dict[str, Any] = {
    "rollout": {"temperature": TEMPERATURE, "max_new_tokens": MAX_NEW_TOKENS},
    "reward": {"clip": (-1.0, 1.0), "overlong_buffer_tokens": 3, "overlong_penalty": 0.6},
    "algorithm": {
        "estimator": "grpo",
        "kl_in": "both",
        "kl_estimator": "k1",
        "kl_loss_estimator": "k3",
        "entropy_coef": 0.02,
        "importance_weights": "token_truncate",
        "importance_high": 1.2,
        "rejection": "geometric",
        "rejection_low": 0.4,
        "rejection_high": 2.5,
        "mask_truncated": True,
    },
}
KL_COEF, KL_LOSS_COEF = 0.1, 0.2


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model than the policy."""
    return save_policy(tmp_path_factory.mktemp("reference") / "model", seed=1)


def scored_responses(model: Any, record: ExperienceRecord) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - transformers is untyped
    """Log-probabilities and entropies of the response tokens, [T], by one plain forward of this record alone."""
    ids = torch.tensor([*record.prompt_ids, *record.response_ids])[None]
    start = len(record.prompt_ids) - 1
    logits = model(input_ids=ids).logits[0, start:-1] / TEMPERATURE
    logprobs = logits.log_softmax(dim=-1)
    entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(1, torch.from_numpy(record.response_ids).long()[:, None])[:, 0], entropies


def records_near(model: Any) -> list[ExperienceRecord]:  # noqa: ANN401
    """Two groups of three with log-probabilities like an engine's: one response far from the trainer's, one cut, one long, one masked."""
    rng = np.random.default_rng(3)
    records = [
        make_record(index, group=index // 3, num_prompt=2 + index % 2, num_response=(3, 5, 8, 4, 2, 6)[index], reward=index * 0.9 - 2.0)
        for index in range(6)
    ]
    records[1] = replace(records[1], response_mask=np.array([True, False, True, True, True]))
    records[3] = replace(records[3], finish_reason=FinishReason.LENGTH)
    with torch.no_grad():
        noisy = [scored_responses(model, record)[0].numpy() + rng.normal(0, 0.2, len(record.response_ids)) for record in records]
    noisy[4] += 2.0
    return [replace(record, rollout_logprobs=values.astype(np.float32)) for record, values in zip(records, noisy, strict=True)]


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO of two groups of three."""
    advantages = []
    for index, reward in enumerate(rewards):
        group = np.array(rewards[index // 3 * 3 : index // 3 * 3 + 3])
        advantages.append((reward - group.mean()) / (group.std(ddof=1) + 1e-6))
    return advantages


def naive_loss(records: Sequence[ExperienceRecord], policy: Any, reference: Any) -> Tensor:  # noqa: ANN401
    """The loss of `SECTIONS`, as its formulas say."""
    logprobs, entropies = zip(*(scored_responses(policy, record) for record in records), strict=True)
    with torch.no_grad():
        references = [scored_responses(reference, record)[0] for record in records]
    masks = [torch.from_numpy(record.response_mask) for record in records]
    rewards = []
    for record, own, ref, mask in zip(records, logprobs, references, masks, strict=True):
        overlong = min(max((len(record.response_ids) - (MAX_NEW_TOKENS - 3)) / 3, 0.0), 1.0)
        kl = (own - ref)[mask].sum().item()
        rewards.append(min(max(record.reward, -1.0), 1.0) - 0.6 * overlong - KL_COEF * kl)
    total, count = torch.zeros(()), 0
    for index, advantage in enumerate(group_advantages(rewards)):
        record, mask = records[index], masks[index]
        if record.finish_reason is FinishReason.LENGTH:
            continue
        count += int(mask.sum())
        own, ref = logprobs[index][mask], references[index][mask]
        engine_ratio = (own.detach() - torch.from_numpy(record.rollout_logprobs)[mask]).exp()
        if not 0.4 <= engine_ratio.log().mean().exp() <= 2.5:
            continue
        policy_loss = -advantage * (own - own.detach()).exp() * engine_ratio.clamp(max=1.2)
        kl = (ref - own).exp() - (ref - own) - 1
        total = total + (policy_loss + KL_LOSS_COEF * kl - 0.02 * entropies[index][mask]).sum()
    return total / count


def assert_same_gradient(step: Step, policy: Any) -> None:  # noqa: ANN401
    for name, parameter in policy.named_parameters():
        assert torch.allclose(step.gradients[f"actor.language_model.{name}"], parameter.grad, atol=2e-6, rtol=1e-4), name


@pytest.mark.parametrize("retain_graph_tokens", [0, 10_000])
def test_train_step_gradient_of_every_term_together_is_that_of_plain_loops(
    policy_folder: Path, reference_folder: Path, context: RankContext, retain_graph_tokens: int
) -> None:
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in (policy_folder, reference_folder))
    records = records_near(policy)
    loss = naive_loss(records, policy, reference)
    loss.backward()  # type: ignore[no-untyped-call]
    sections: dict[str, Any] = {
        **SECTIONS,
        "actor": {"retain_graph_tokens": retain_graph_tokens},
        "model": {"reference_path": str(reference_folder)},
    }
    step = Step(policy_folder, context, records, **sections)
    metrics, _ = step.run([[[[0, 3], [1, 2, 4, 5]]]], kl_coef=KL_COEF, kl_loss_coef=KL_LOSS_COEF)
    assert metrics["actor_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert_same_gradient(step, policy)
    assert metrics["rejected_fraction"] == pytest.approx(2 / 27)
    assert 0 < metrics["importance_capped_fraction"] < 0.5
    assert metrics["num_masked_truncated"] == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"mask_truncated": False},
        {"importance_weights": "none"},
        {"importance_weights": "sequence_truncate"},
        {"rejection": "none"},
        {"kl_in": "reward"},
        {"kl_in": "loss"},
        {"kl_loss_estimator": "k2"},
        {"kl_estimator": "k2"},
        {"entropy_coef": 0.0},
        {"policy_loss": "ppo", "old_logprobs": "rollout", "importance_weights": "none"},
        {"loss_aggregation": "seq_mean_token_mean"},
        {"estimator": "dr_grpo"},
    ],
    ids=lambda changes: next(iter(f"{name}={value}" for name, value in changes.items())),
)
def test_train_step_gradient_changes_with_every_setting(
    policy_folder: Path, reference_folder: Path, context: RankContext, changes: Mapping[str, Any], expected_gradient: dict[str, Tensor]
) -> None:
    records = records_near(AutoModelForCausalLM.from_pretrained(policy_folder))
    sections: dict[str, Any] = {
        **SECTIONS,
        "algorithm": {**SECTIONS["algorithm"], **changes},
        "model": {"reference_path": str(reference_folder)},
    }
    step = Step(policy_folder, context, records, **sections)
    step.run(kl_coef=KL_COEF, kl_loss_coef=KL_LOSS_COEF)
    assert max((value - expected_gradient[name]).abs().max().item() for name, value in step.gradients.items()) > 1e-4


@pytest.fixture(scope="module")
def expected_gradient(policy_folder: Path, reference_folder: Path, context: RankContext) -> dict[str, Tensor]:
    """The gradient of `SECTIONS` as they are."""
    records = records_near(AutoModelForCausalLM.from_pretrained(policy_folder))
    step = Step(policy_folder, context, records, **SECTIONS, model={"reference_path": str(reference_folder)})
    step.run(kl_coef=KL_COEF, kl_loss_coef=KL_LOSS_COEF)
    return step.gradients


def test_train_step_gspo_and_cispo_on_fresh_data_have_the_gradient_of_reinforce(policy_folder: Path, context: RankContext) -> None:
    """With ratio 1 all of them are -A * grad log p; GSPO weighs the tokens of a sequence alike, as its mean does."""
    records = records_near(AutoModelForCausalLM.from_pretrained(policy_folder))
    gradients = []
    for policy_loss in ("reinforce", "gspo", "cispo", "ppo"):
        algorithm = {"estimator": "rloo", "kl_in": "none", "policy_loss": policy_loss, "loss_aggregation": "seq_mean_token_mean"}
        step = Step(policy_folder, context, records, algorithm=algorithm)
        step.run()
        gradients.append(step.gradients)
    for gradient in gradients[1:]:
        for name, value in gradients[0].items():
            assert torch.allclose(gradient[name], value, atol=1e-6), name


def test_train_step_divides_by_the_longest_response_unless_a_length_is_set(policy_folder: Path, context: RankContext) -> None:
    losses = {}
    for aggregation, length in (("seq_mean_token_sum", None), ("seq_mean_token_sum_norm", None), ("seq_mean_token_sum_norm", 20)):
        algorithm = {"loss_aggregation": aggregation, "loss_norm_length": length, "old_logprobs": "rollout"}
        step = Step(policy_folder, context, [make_record(i, reward=float(i)) for i in range(3)], algorithm=algorithm)
        actor_metrics, critic_metrics = step.run()
        losses[aggregation, length] = np.array([actor_metrics["actor_loss"], critic_metrics["critic_loss"]])
    whole = losses["seq_mean_token_sum", None]
    assert np.abs(whole).min() > 1e-3
    assert losses["seq_mean_token_sum_norm", None] == pytest.approx(whole / MAX_NEW_TOKENS, rel=1e-6)
    assert losses["seq_mean_token_sum_norm", 20] == pytest.approx(whole / 20, rel=1e-6)


def naive_values(backbone: Any, head: Tensor, record: ExperienceRecord) -> Tensor:  # noqa: ANN401
    """The value after every token of prompt and response, by one plain forward of this record alone."""
    ids = torch.tensor([*record.prompt_ids, *record.response_ids])[None]
    with torch.no_grad():
        values: Tensor = backbone(input_ids=ids).last_hidden_state[0] @ head
    return values


def test_train_step_bootstraps_truncated_responses_with_the_value_after_their_last_token(policy_folder: Path, context: RankContext) -> None:
    records = [make_record(i, num_prompt=2, num_response=3 + i, reward=1.0) for i in range(3)]
    records[1] = replace(records[1], finish_reason=FinishReason.LENGTH)
    algorithm = {"bootstrap_truncated": True, "gamma": 0.9, "lam": 0.8, "whiten_advantages": False, "kl_in": "none"}
    step = Step(policy_folder, context, records, algorithm=algorithm)
    head, backbone = spread_values(step.critic), AutoModel.from_pretrained(policy_folder)
    expected = [naive_values(backbone, head, record) for record in records]
    step.run()
    columns = [step.source.columns["bootstrap_values", key_of(record)] for record in records]
    assert columns[0].tolist() == columns[2].tolist() == [0.0]
    assert columns[1] == pytest.approx(expected[1][-1:].numpy(), abs=1e-5)
    assert abs(columns[1][0]) > 0.1
    for record, values, bootstrap in zip(records, expected, columns, strict=True):
        kept = values[1:-1]
        assert step.source.columns["values", key_of(record)] == pytest.approx(kept.numpy(), abs=1e-5)
        assert step.source.columns["returns", key_of(record)] == pytest.approx(naive_returns(kept.tolist(), float(bootstrap[0])), abs=1e-4)


def naive_returns(values: Sequence[float], bootstrap: float) -> list[float]:
    """GAE with reward 1 at the end, gamma 0.9 and lambda 0.8, plus the values."""
    advantage, returns = 0.0, []
    following = [*values[1:], bootstrap]
    for t in reversed(range(len(values))):
        reward = 1.0 if t == len(values) - 1 else 0.0
        advantage = reward + 0.9 * following[t] - values[t] + 0.9 * 0.8 * advantage
        returns.append(advantage + values[t])
    return returns[::-1]


def test_critic_clips_values_against_those_of_its_forward(policy_folder: Path, context: RankContext) -> None:
    records = [make_record(i, reward=float(i)) for i in range(3)]
    fractions = []
    for value_clip in (1e-4, 1e4):
        step = Step(policy_folder, context, records, algorithm={"epochs": 3, "value_clip": value_clip}, critic={"lr": 0.05})
        fractions.append(step.run()[1]["value_clip_fraction"])
    # The first of the three passes moves no value yet.
    assert 0.0 < fractions[0] <= 2 / 3
    assert fractions[1] == 0.0
