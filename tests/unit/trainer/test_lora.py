"""Adapters in a policy: which layers get one, what is trained, and the policy without them as reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_trainer.actor import Actor
from shoal_trainer.batching import build_micro_batch
from shoal_trainer.building import build_actor
from shoal_trainer.distributed import RankContext
from shoal_trainer.inputs import ModelInputs
from shoal_trainer.lora import AdaptersOff
from shoal_trainer.models import PolicyModel, load_policy
from torch import Tensor
from transformers import Qwen2ForCausalLM

from shoal.errors import ConfigError
from tests.helpers.adapters import LORA, adapted_policy, lora_config
from tests.helpers.tiny_models import save_tiny_model
from tests.helpers.trainer_bench import (
    VOCAB_SIZE,
    MemoryRecords,
    even_split,
    make_batch,
    ppo_step,
    ragged_records,
    ref_of,
    run_config,
    save_policy,
    whole_parameters,
)


def policy_of(folder: Path, context: RankContext, *, lora: dict[str, Any] | None = LORA, seed: int = 0) -> PolicyModel:
    config = run_config(folder, actor={"lora": lora})
    return load_policy(str(folder), config.model, config.actor, context, trainable=True, seed=seed)


def adapters(policy: PolicyModel, part: str = "lora_") -> dict[str, Tensor]:
    return {name.removeprefix("language_model."): value for name, value in whole_parameters(policy).items() if part in name}


def layers(policy: PolicyModel) -> set[str]:
    return {name.partition(".lora_A")[0] for name in adapters(policy, "lora_A")}


def test_adapters_are_on_every_linear_layer_of_the_blocks_and_alone_trained(policy_folder: Path, context: RankContext) -> None:
    policy = policy_of(policy_folder, context)
    attention = {f"self_attn.{name}_proj" for name in "qkvo"}
    inside = attention | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert layers(policy) == {f"model.layers.{index}.{name}" for index in (0, 1) for name in inside}
    trained = {name.removeprefix("language_model.") for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained == adapters(policy).keys()
    assert isinstance(policy.language_model, Qwen2ForCausalLM)


def test_adapters_start_with_b_zero_and_the_a_of_their_seed(policy_folder: Path, context: RankContext) -> None:
    first, again, other = (policy_of(policy_folder, context, seed=seed) for seed in (3, 3, 4))
    assert not any(value.any() for value in adapters(first, "lora_B").values())
    for name, value in adapters(first, "lora_A").items():
        assert torch.equal(value, adapters(again)[name])
        assert not torch.equal(value, adapters(other)[name])
        assert 0.5 * value.shape[1] ** -0.5 < value.abs().max() <= value.shape[1] ** -0.5


def test_target_modules_choose_layers_by_the_end_of_their_names(policy_folder: Path, context: RankContext) -> None:
    policy = policy_of(policy_folder, context, lora={"target_modules": ["q_proj", "1.mlp.up_proj"]})
    assert layers(policy) == {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}


@pytest.mark.parametrize("target", ["query", "lm_head", "embed_tokens", "proj"])
def test_target_that_is_no_linear_layer_of_the_blocks_is_refused_with_those_that_are(
    policy_folder: Path, context: RankContext, target: str
) -> None:
    with pytest.raises(ConfigError, match=f"'{target}', .*there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"):
        policy_of(policy_folder, context, lora={"target_modules": ["q_proj", target]})


def test_model_without_linear_layers_is_refused(tmp_path: Path, context: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"have none \(they have Conv1D, .*train without lora"):
        policy_of(save_policy(tmp_path / "gpt2", "gpt2"), context)


def test_stacked_experts_get_no_adapter(tmp_path: Path, context: RankContext) -> None:
    folder = save_tiny_model(tmp_path / "experts", "mixtral", hidden_size=32)
    assert {name.rpartition(".")[2] for name in layers(policy_of(folder, context))} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ConfigError, match="Stacked experts"):
        policy_of(folder, context, lora={"target_modules": ["gate_up_proj"]})


def actor_of(folder: Path, context: RankContext, *, reference: Path | None = None, **actor: Any) -> Actor:  # noqa: ANN401
    config = lora_config(folder, actor=actor, algorithm={"estimator": "grpo", "kl_in": "both"})
    model = config.model.model_copy(update={"reference_path": None if reference is None else str(reference)})
    return build_actor(config.model_copy(update={"model": model}), context, MemoryRecords(ragged_records()))


def step(actor: Actor, number: int = 1) -> dict[str, float]:
    return ppo_step(actor, None, make_batch(ragged_records(), even_split(6, 1, 2), number))[0]


@pytest.mark.parametrize("retain_graph_tokens", [0, 10_000])
def test_first_step_has_ratio_one_and_trains_adapters_only(policy_folder: Path, context: RankContext, retain_graph_tokens: int) -> None:
    actor = actor_of(policy_folder, context, retain_graph_tokens=retain_graph_tokens)
    before = whole_parameters(actor.module)
    metrics = step(actor)
    assert metrics["ratio_max_deviation"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["kl"] == 0.0
    assert metrics["grad_norm"] > 0
    changed = {name for name, value in whole_parameters(actor.module).items() if not torch.equal(value, before[name])}
    # The gradient of A is that of B A with B zero.
    assert changed == {name for name in before if "lora_B" in name}


@pytest.mark.parametrize("settings", [{}, {"retain_graph_tokens": 0}, {"activation_checkpointing": True}, {"reshard_after_forward": False}])
def test_policy_without_adapters_is_the_reference_and_leaves_its_graph_alone(
    policy_folder: Path, context: RankContext, settings: dict[str, Any], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.symlink_to(policy_folder)
    own = actor_of(policy_folder, context, **settings)
    loaded = actor_of(policy_folder, context, reference=copy, **settings)
    assert isinstance(own._reference, AdaptersOff)
    assert isinstance(loaded._reference, PolicyModel)
    assert own.has_reference
    for number in (1, 2, 3):
        found, expected = step(own, number), step(loaded, number)
        assert found["kl"] == pytest.approx(expected["kl"], abs=1e-6)
        assert found["actor_loss"] == pytest.approx(expected["actor_loss"], abs=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert expected["kl"] != 0.0
    others = whole_parameters(loaded.module)
    for name, value in whole_parameters(own.module).items():
        assert torch.allclose(value, others[name], atol=1e-5), name


def test_reference_log_probabilities_are_those_of_the_model_as_it_was_loaded(policy_folder: Path, context: RankContext) -> None:
    config = lora_config(policy_folder)
    policy = adapted_policy(config, context)
    loaded = load_policy(str(policy_folder), config.model, config.actor, context, trainable=False)
    batch = _inputs()
    found, _ = AdaptersOff(policy)(*batch, 0.7, False)
    expected, _ = loaded(*batch, 0.7, False)
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(policy(*batch, 0.7, False)[0], expected, atol=1e-2)
    assert not found.requires_grad
    assert not list(AdaptersOff(policy).parameters())


def _inputs() -> tuple[ModelInputs, Tensor, Tensor]:
    records = ragged_records()
    micro = build_micro_batch([ref_of(record) for record in records], records, VOCAB_SIZE)
    return micro.inputs, micro.positions_before(micro.response_mask), micro.response_ids[micro.response_mask]


def test_reference_pass_that_fails_switches_adapters_on_again(policy_folder: Path, context: RankContext) -> None:
    policy = adapted_policy(lora_config(policy_folder), context)
    inputs, positions, token_ids = _inputs()
    before, _ = policy(inputs, positions, token_ids, 1.0, False)
    with pytest.raises(IndexError):
        AdaptersOff(policy)(inputs, positions + 10_000, token_ids, 1.0, False)
    after, _ = policy(inputs, positions, token_ids, 1.0, False)
    assert torch.equal(before, after)
