"""Checkpoints in another dtype than the engine, in several files, or with a copy of a tied head: equal to an engine started on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.engine_rig import EngineRig, fresh_greedy
from tests.helpers.staged_copies import as_bytes, folder_tensors, live_bytes, stage_copies, trained_tensors
from tests.helpers.tiny_models import Architecture, save_tiny_model


@pytest.mark.parametrize("architecture", ["mixtral", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_layout_in_bfloat16_casts_a_float32_checkpoint(
    tmp_path: Path, start_rig: Callable[..., EngineRig], architecture: Architecture
) -> None:
    first, second = (save_tiny_model(tmp_path / f"v{seed}", architecture, seed=seed) for seed in (0, 1))
    expected = fresh_greedy(second, "bfloat16")
    _check_swap(start_rig(first, "bfloat16"), first, second, expected, "bfloat16")


def test_layout_in_float32_takes_a_bfloat16_checkpoint_in_several_files(tmp_path: Path, start_rig: Callable[..., EngineRig]) -> None:
    first, second = (
        save_tiny_model(tmp_path / f"v{seed}", "qwen2", seed=seed, dtype=torch.bfloat16, max_shard_size="200KB") for seed in (0, 1)
    )
    assert len(list(first.glob("*.safetensors"))) > 2
    expected = fresh_greedy(second)
    _check_swap(start_rig(first), first, second, expected, "float32")


def test_layout_of_a_tied_model_whose_checkpoint_keeps_the_head_takes_the_embedding(
    tmp_path: Path, start_rig: Callable[..., EngineRig]
) -> None:
    first, second = (save_tiny_model(tmp_path / f"v{seed}", "llama", tied=True, seed=seed) for seed in (0, 1))
    expected = fresh_greedy(second)
    tensors = folder_tensors(first)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, first / "model.safetensors", {"format": "pt"})
    rig = start_rig(first)
    assert "lm_head.weight" not in {region.source_name for region in rig.model.regions}
    _check_swap(rig, first, second, expected, "float32")


def _check_swap(rig: EngineRig, first: Path, second: Path, expected: tuple[list[int], list[float]], dtype: str) -> None:
    assert rig.model.mode == "copies", rig.model.reason
    assert {kind for _, _, kind in rig.model.parameters} == {dtype}
    old, new = (stage_copies(rig.model, trained_tensors(folder)) for folder in (first, second))
    before = rig.greedy()
    assert live_bytes(rig.model) == {name: as_bytes(tensor) for name, tensor in old.items()}
    assert before != expected, "the new weights must differ, else this test shows nothing"
    rig.swap(new)
    assert rig.greedy() == expected
    assert live_bytes(rig.model) == {name: as_bytes(tensor) for name, tensor in new.items()}
    rig.swap(old)
    assert rig.greedy() == before
