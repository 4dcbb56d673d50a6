"""Layouts of tensor-parallel workers: what is staged for each by its layout is what vLLM's own loading gives that worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.simulated_rank import simulated_ranks
from tests.helpers.staged_copies import as_bytes, stage_regions, trained_tensors
from tests.helpers.tiny_models import Architecture, save_tiny_model


@pytest.mark.parametrize(
    ("architecture", "tied", "num_workers", "overrides"),
    [
        pytest.param("llama", False, 2, {}, marks=pytest.mark.slow),
        ("llama", True, 4, {"num_key_value_heads": 1}),
        pytest.param("qwen2", True, 4, {}, marks=pytest.mark.slow),
        ("qwen3", False, 2, {"num_key_value_heads": 1}),
        ("gemma", True, 2, {"num_key_value_heads": 1}),
        ("gemma3", True, 2, {"vocab_size": 129}),
        ("opt", True, 4, {}),
        ("mixtral", False, 2, {"num_key_value_heads": 1}),
        ("mixtral", True, 4, {"num_local_experts": 3}),
    ],
)
def test_layout_of_every_worker_is_what_its_loading_does(
    tmp_path: Path, engine_environment: None, architecture: Architecture, tied: bool, num_workers: int, overrides: dict[str, Any]
) -> None:
    from shoal_rollout.checkpoint_shapes import meta_checkpoint
    from shoal_rollout.engine_parameters import collect_parameters, record_load, stage_parameters
    from shoal_rollout.trained_form import as_trained, trained_origins

    folder = save_tiny_model(tmp_path / "model", architecture, tied=tied, **overrides)
    source, checkpoint = trained_tensors(folder), meta_checkpoint(folder)
    seen: dict[str, set[bytes]] = {}
    with simulated_ranks(folder, num_workers, tmp_path) as models:
        for model in models:
            parameters = collect_parameters(model)
            load = as_trained(record_load(model, parameters, checkpoint), trained_origins(folder, checkpoint))
            layout = stage_parameters(load, parameters)
            assert layout.keys() == {parameter.name for parameter in parameters}
            for parameter in parameters:
                staged = stage_regions(layout[parameter.name].shape, torch.float32, layout[parameter.name].regions, source)
                live = parameter.holders[0].live
                assert as_bytes(staged) == as_bytes(live), parameter.name
                assert live.is_contiguous()
                seen.setdefault(parameter.name, set()).add(as_bytes(live))
    sharded = {name for name, values in seen.items() if len(values) == num_workers}
    assert len(sharded) >= 9, "workers must hold different parts, else this test shows nothing"
