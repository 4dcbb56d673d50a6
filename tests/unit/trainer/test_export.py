"""The exported folder is complete, loads, and appears at once or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from shoal_trainer import export
from shoal_trainer.distributed import RankContext
from shoal_trainer.export import SHARD_BYTES, Exporter
from shoal_trainer.merging import ServedWeights
from shoal_trainer.models import PolicyModel, load_policy, named_shards
from transformers import AutoModelForCausalLM

from shoal.errors import CapacityError, InvalidRequestError
from tests.helpers.trainer_bench import VOCAB_SIZE, run_config, save_policy


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = save_policy(tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"last": VOCAB_SIZE - 1}}}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "unrelated.bin").write_text("x")
    return folder


def policy_of(folder: Path, context: RankContext) -> PolicyModel:
    config = run_config(folder)
    policy = load_policy(str(folder), config.model, config.actor, context, trainable=True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    return policy


def exporter_of(policy: PolicyModel, folder: Path, context: RankContext, shard_bytes: int = SHARD_BYTES) -> Exporter:
    served = ServedWeights(named_shards(policy), None, context.device, lambda: 0)
    return Exporter(policy, served, str(folder), context, shard_bytes)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 8000])
def test_export_loads_with_the_trained_weights(model_folder: Path, tmp_path: Path, context: RankContext, shard_bytes: int) -> None:
    policy = policy_of(model_folder, context)
    target = tmp_path / "out" / "policy"
    result = exporter_of(policy, model_folder, context, shard_bytes).export(str(target), 7)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    original = AutoModelForCausalLM.from_pretrained(model_folder)
    for name, parameter in original.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter + 0.01), name
    assert result.policy_version == 7
    assert result.num_bytes == sum(p.numel() * 4 for p in original.parameters())
    assert len(list(target.glob("*.safetensors"))) == (1 if shard_bytes > 1e6 else len(set(_index(target)["weight_map"].values())))
    assert (target / "tokenizer.json").exists()
    assert (target / "chat_template.jinja").exists()
    assert not (target / "unrelated.bin").exists()
    assert [path.name for path in target.parent.iterdir()] == ["policy"]


def _index(target: Path) -> dict[str, dict[str, str]]:
    index: dict[str, dict[str, str]] = json.loads((target / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    return index


def test_export_twice_replaces_the_folder(model_folder: Path, tmp_path: Path, context: RankContext) -> None:
    exporter = exporter_of(policy_of(model_folder, context), model_folder, context)
    exporter.export(str(tmp_path / "policy"), 1)
    (tmp_path / "policy" / "stale").write_text("old")
    exporter.export(str(tmp_path / "policy"), 1)
    assert not (tmp_path / "policy" / "stale").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy").config.vocab_size > 0


def test_export_that_cannot_be_written_leaves_the_old_folder(
    model_folder: Path, tmp_path: Path, context: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = exporter_of(policy_of(model_folder, context), model_folder, context)
    exporter.export(str(tmp_path / "policy"), 1)

    def no_space(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", no_space)
    with pytest.raises(CapacityError, match="No space left"):
        exporter.export(str(tmp_path / "policy"), 2)
    assert (tmp_path / "policy" / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "policy"]


def test_export_refuses_a_relative_path_and_a_file(model_folder: Path, tmp_path: Path, context: RankContext) -> None:
    exporter = exporter_of(policy_of(model_folder, context), model_folder, context)
    with pytest.raises(InvalidRequestError, match="absolute"):
        exporter.export("policy", 1)
    (tmp_path / "taken").write_text("x")
    with pytest.raises(InvalidRequestError, match="is a file"):
        exporter.export(str(tmp_path / "taken"), 1)
