"""An export of a policy with adapters: the merged model, and the adapter alone as peft reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from shoal_trainer import export as export_module
from shoal_trainer.building import _actor_parts, build_actor
from shoal_trainer.commands import EXPORT, UPDATE
from shoal_trainer.distributed import RankContext
from shoal_trainer.export import Exporter
from shoal_trainer.models import PolicyModel
from shoal_trainer.source_layout import HeldTensors
from transformers import AutoModelForCausalLM

from shoal.errors import CapacityError, TransportError
from shoal.rpc.v1 import trainer_pb2
from shoal.weights import boxes
from tests.helpers.adapters import LORA, adapted_policy, lora_config, peft_model, policy_logprobs, served_by, token_logprobs
from tests.helpers.trainer_bench import VOCAB_SIZE, MemoryRecords, even_split, make_batch, ragged_records, save_policy

FEW_LAYERS = {"rank": 3, "alpha": 1.5, "target_modules": ["0.mlp.up_proj", "v_proj"]}
IDS = torch.randint(0, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(0))


def exported(
    folder: Path, target: Path, context: RankContext, lora: dict[str, Any] = LORA, shard_bytes: int = 1 << 30
) -> tuple[PolicyModel, int]:
    config = lora_config(folder, lora)
    policy = adapted_policy(config, context)
    served = served_by(policy, config, context)
    return policy, Exporter(policy, served, str(folder), context, shard_bytes).export(str(target), 3).num_bytes


@pytest.mark.parametrize(("architecture", "tied", "lora"), [("qwen2", True, LORA), ("llama", False, LORA), ("qwen2", True, FEW_LAYERS)])
def test_merged_model_and_adapter_answer_what_the_policy_answers(
    tmp_path: Path, context: RankContext, architecture: str, tied: bool, lora: dict[str, Any]
) -> None:
    folder = save_policy(tmp_path / "model", architecture, tied=tied)
    policy, num_bytes = exported(folder, tmp_path / "out", context, lora, shard_bytes=8000)
    expected = policy_logprobs(policy, IDS)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.allclose(token_logprobs(merged, IDS), expected, atol=1e-5)
    assert torch.allclose(token_logprobs(peft_model(folder, tmp_path / "out" / "adapter"), IDS), expected, atol=1e-5)
    assert not torch.allclose(token_logprobs(base, IDS), expected, atol=1e-2)
    assert {name for name, _ in merged.named_parameters()} == {name for name, _ in base.named_parameters()}
    adapter = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert num_bytes == sum(tensor.nbytes for tensor in [*base.parameters(), *adapter.values()])


def test_adapter_folder_names_its_base_and_short_targets(policy_folder: Path, tmp_path: Path, context: RankContext) -> None:
    exported(policy_folder, tmp_path / "out", context)
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"], config["peft_type"]) == (5, 12, 0.0, "LORA")
    assert config["base_model_name_or_path"] == str(policy_folder)
    assert sorted(config["target_modules"]) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    suffixes = {path.suffix for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_exported_weights_have_the_bits_that_engines_get(policy_folder: Path, tmp_path: Path, context: RankContext) -> None:
    policy, _ = exported(policy_folder, tmp_path / "out", context)
    tensors = HeldTensors(served_by(policy, lora_config(policy_folder), context).parameters, 0)
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert {one.name for one in tensors.describe()} == files.keys()
    for one in tensors.describe():
        assert torch.equal(tensors.piece(one.name, boxes.whole(one.shape)), files[one.name]), one.name


def test_export_whose_adapter_cannot_be_written_leaves_nothing(
    policy_folder: Path, tmp_path: Path, context: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = safetensors.torch.save_file

    def no_space(tensors: Any, path: Path, metadata: Any) -> None:  # noqa: ANN401
        if path.name == "adapter_model.safetensors":
            raise OSError(28, "No space left on device")
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(export_module, "save_file", no_space)
    with pytest.raises(CapacityError, match="No space left"):
        exported(policy_folder, tmp_path / "out" / "policy", context)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_rank_brings_what_is_served_up_to_date_with_every_update(policy_folder: Path, tmp_path: Path, context: RankContext) -> None:
    config = lora_config(policy_folder, algorithm={"estimator": "grpo"})
    actor = build_actor(config, context, MemoryRecords(ragged_records()))
    handlers = _actor_parts(config, context, actor).handlers
    exports = []
    for step in (1, 2):
        actor.forward_batch(make_batch(ragged_records(), even_split(6, 1, 1), step))
        actor.compute_advantages(step, 0.05, 0.05)
        handlers[UPDATE](trainer_pb2.UpdateBatchRequest(step=step).SerializeToString())
        handlers[EXPORT](trainer_pb2.ExportModelRequest(folder=str(tmp_path / str(step))).SerializeToString())
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / str(step), dtype=torch.float32)
        assert torch.allclose(token_logprobs(merged, IDS), policy_logprobs(actor.module, IDS), atol=1e-5)
        exports.append(load_file(tmp_path / str(step) / "model.safetensors"))
    changed = {name for name, tensor in exports[0].items() if not torch.equal(tensor, exports[1][name])}
    assert changed == {name for name in exports[0] if name.endswith("_proj.weight")}
    actor.policy_version += 1
    with pytest.raises(TransportError, match="gather it after every update"):
        handlers[EXPORT](trainer_pb2.ExportModelRequest(folder=str(tmp_path / "stale")).SerializeToString())
