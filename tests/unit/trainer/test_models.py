"""Log-probabilities and values do not depend on padding or neighbours, and agree with the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shoal_trainer.batching import build_micro_batch
from shoal_trainer.distributed import RankContext
from shoal_trainer.models import PolicyModel, load_policy, load_value_model, named_shards, num_parameters
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM

from shoal.errors import ConfigError
from shoal.types import ExperienceRecord
from tests.helpers.trainer_bench import VOCAB_SIZE, make_record, ref_of, run_config, save_policy

TEMPERATURE = 0.6


def scores(policy: PolicyModel, records: list[ExperienceRecord]) -> list[torch.Tensor]:
    """Log-probabilities of each record's response when all are padded into one micro-batch."""
    micro = build_micro_batch([ref_of(record) for record in records], records, VOCAB_SIZE)
    mask = micro.response_mask
    with torch.no_grad():
        packed, _ = policy(micro.inputs, micro.positions_before(mask), micro.response_ids[mask], TEMPERATURE, False)
    return list(packed.split([len(record.response_ids) for record in records]))


def plain_scores(folder: Path, record: ExperienceRecord) -> torch.Tensor:
    """The same by an ordinary forward of the one row, with eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.from_numpy(np.concatenate((record.prompt_ids, record.response_ids)).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(record.prompt_ids) - 1 : -1] / TEMPERATURE
    chosen = torch.from_numpy(record.response_ids.astype(np.int64))
    return torch.log_softmax(logits, dim=-1).gather(1, chosen[:, None])[:, 0]


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), ("llama", False), ("gpt2", True)])
def test_policy_scores_do_not_depend_on_padding_or_neighbours(tmp_path: Path, context: RankContext, architecture: str, tied: bool) -> None:
    folder = save_policy(tmp_path / "model", architecture, tied=tied)
    config = run_config(folder)
    policy = load_policy(str(folder), config.model, config.actor, context, trainable=False)
    row = make_record(0, num_prompt=3, num_response=6)
    expected = plain_scores(folder, row)
    for pad in (0, 1, 3, 8):
        neighbours = [make_record(7, num_prompt=5, num_response=4 + pad), make_record(8, num_prompt=1, num_response=1)]
        for records in ([row, *neighbours], [*neighbours, row]):
            found = scores(policy, records)[records.index(row)]
            assert (found - expected).abs().max() <= 1e-5
    assert (scores(policy, [row])[0] - expected).abs().max() <= 1e-5


def test_named_shards_are_the_tensors_of_the_model_folder(tmp_path: Path, context: RankContext) -> None:
    from safetensors import safe_open

    for tied in (True, False):
        folder = save_policy(tmp_path / f"model-{tied}", tied=tied)
        config = run_config(folder)
        policy = load_policy(str(folder), config.model, config.actor, context, trainable=True)
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            on_disk = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
        assert {name: tuple(shard.shape) for name, shard in named_shards(policy).items()} == on_disk
        assert num_parameters(policy) == sum(int(np.prod(shape)) for shape in on_disk.values())


def test_value_model_starts_at_zero_and_is_not_changed_by_padding(policy_folder: Path, context: RankContext) -> None:
    config = run_config(policy_folder)
    model = load_value_model(config.model, config.critic, context)
    records = [make_record(0, num_response=4), make_record(1, num_response=9)]
    micro = build_micro_batch([ref_of(record) for record in records], records, VOCAB_SIZE)
    values = model(micro.inputs, micro.positions_before(micro.response_mask))
    assert values.shape == (13,)
    assert values.dtype == torch.float32
    assert not values.any()


def test_policy_in_bf16_mixed_attends_in_float32_on_a_cpu_and_stays_close(policy_folder: Path, context: RankContext) -> None:
    exact_config, mixed_config = run_config(policy_folder), run_config(policy_folder, actor={"precision": "bf16_mixed"})
    exact, mixed = (
        load_policy(str(policy_folder), config.model, config.actor, context, trainable=False) for config in (exact_config, mixed_config)
    )
    assert exact.language_model.config._attn_implementation == "sdpa"
    assert mixed.language_model.config._attn_implementation == "sdpa_float32"
    records = [make_record(0, num_response=6), make_record(1, num_response=3)]
    for found, expected in zip(scores(mixed, records), scores(exact, records), strict=True):
        assert found.dtype == torch.float32
        assert 0 < (found - expected).abs().max() < 0.1


@pytest.mark.parametrize("trainable", [True, False])
def test_settings_reach_every_group_of_parameters(
    policy_folder: Path, context: RankContext, monkeypatch: pytest.MonkeyPatch, trainable: bool
) -> None:
    given: list[dict[str, Any]] = []

    def spy(module: torch.nn.Module, **options: Any) -> Any:  # noqa: ANN401 - as torch has it
        given.append(options)
        return fully_shard(module, **options)

    monkeypatch.setattr("shoal_trainer.models.fully_shard", spy)
    gang = {"reshard_after_forward": False, "offload": True, "precision": "bf16_mixed"}
    config = run_config(policy_folder, actor=gang, critic=gang)
    load_policy(str(policy_folder), config.model, config.actor, context, trainable=trainable)
    assert len(given) == 2 + 1
    # Nothing frees what a frozen model gathered, so it drops it after each forward.
    assert [options["reshard_after_forward"] for options in given] == [not trainable] * 3
    assert [type(options["offload_policy"]) for options in given] == [CPUOffloadPolicy] * 3
    assert [options["mp_policy"].param_dtype for options in given] == [torch.bfloat16] * 3
    assert not any(options["offload_policy"].pin_memory for options in given)


def test_sampled_vocab_size_is_the_models_own(policy_folder: Path, context: RankContext) -> None:
    config = run_config(policy_folder)
    policy = load_policy(str(policy_folder), config.model, config.actor, context, trainable=False)
    assert policy.vocab_size == VOCAB_SIZE


def test_load_policy_refuses_a_folder_without_a_model(tmp_path: Path, policy_folder: Path, context: RankContext) -> None:
    config = run_config(policy_folder)
    with pytest.raises(ConfigError, match="no-such"):
        load_policy(str(tmp_path / "no-such"), config.model, config.actor, context, trainable=True)


def test_load_policy_refuses_logits_that_are_changed_after_the_head(tmp_path: Path, context: RankContext) -> None:
    from transformers import GraniteConfig

    torch.manual_seed(0)
    granite = GraniteConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        logits_scaling=8.0, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(granite).save_pretrained(tmp_path / "granite")
    config = run_config(tmp_path / "granite")
    with pytest.raises(ConfigError, match="logits_scaling"):
        load_policy(str(tmp_path / "granite"), config.model, config.actor, context, trainable=True)
