"""Which parameter of the trained model a checkpoint's tensor is a part of, found from what saving does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shoal_rollout.checkpoint_shapes import meta_checkpoint
from shoal_rollout.load_recorder import RecordedCopy, RecordedLoad
from shoal_rollout.trained_form import as_trained, trained_origins

from shoal.types import Box
from shoal.weights.boxes import whole
from tests.helpers.staged_copies import folder_tensors, slices_of, trained_tensors
from tests.helpers.tiny_models import Architecture, save_tiny_model


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_experts_are_boxes_of_the_trained_stack(tmp_path: Path, architecture: Architecture) -> None:
    folder = save_tiny_model(tmp_path / "model", architecture)
    origins = trained_origins(folder, meta_checkpoint(folder))
    assert sum("experts." in name for name in origins) == 2 * 4 * 3
    saved, trained = folder_tensors(folder), trained_tensors(folder)
    for name, origin in origins.items():
        assert torch.equal(trained[origin.name][slices_of(origin.box)].view(saved[name].shape), saved[name]), name
    assert saved.keys() - origins.keys() <= trained.keys()


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("gpt2", True), ("gemma3", True)])
def test_models_that_are_saved_as_they_are_trained_keep_their_names(tmp_path: Path, architecture: Architecture, tied: bool) -> None:
    folder = save_tiny_model(tmp_path / "model", architecture, tied=tied)
    assert trained_origins(folder, meta_checkpoint(folder)) == {}


def test_unknown_model_keeps_its_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert trained_origins(tmp_path, {"w": torch.empty(3, device="meta")}) == {}


def test_copies_are_carried_over_to_the_trained_stack(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "mixtral")
    origins = trained_origins(folder, meta_checkpoint(folder))
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    rows, other = Box(offsets=(64, 0), sizes=(32, 128)), whole((128,))
    load = RecordedLoad(copies=(RecordedCopy("e", name, rows, rows), RecordedCopy("n", "model.norm.weight", other, other)), zeros={})
    first, second = as_trained(load, origins).copies
    assert (first.source_name, first.parameter_box) == ("model.layers.1.mlp.experts.gate_up_proj", rows)
    assert first.source_box == Box(offsets=(2, 256 + 64, 0), sizes=(1, 32, 128))
    assert second == load.copies[1]
