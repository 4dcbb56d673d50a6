"""What `shoal plan` derives from a model's shape is what an engine's own loading shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.cli.plan_shapes import shape_of_model
from shoal.types.weights import SinkRegion
from shoal.weights.llama_layouts import engine_layout, tensors_of
from tests.helpers.simulated_rank import simulated_ranks
from tests.helpers.staged_copies import folder_tensors
from tests.helpers.tiny_models import Architecture, save_tiny_model


@pytest.mark.parametrize(
    ("architecture", "tied", "num_workers", "overrides"),
    [
        ("llama", False, 2, {}),
        ("llama", True, 4, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("qwen2", True, 4, {}),
        ("qwen3", False, 2, {"num_key_value_heads": 1}),
    ],
)
def test_derived_layout_is_the_one_that_loading_shows(
    tmp_path: Path, engine_environment: None, architecture: Architecture, tied: bool, num_workers: int, overrides: dict[str, Any]
) -> None:
    from shoal_rollout.checkpoint_shapes import meta_checkpoint
    from shoal_rollout.engine_parameters import collect_parameters, record_load, stage_parameters

    folder = save_tiny_model(tmp_path / "model", architecture, tied=tied, **overrides)
    shape = shape_of_model(folder)
    assert tensors_of(shape) == {name: tuple(tensor.shape) for name, tensor in folder_tensors(folder).items()}
    derived = engine_layout(shape, server_id="rollout-0", tp=num_workers, dtype="float32", endpoints=())
    with simulated_ranks(folder, num_workers, tmp_path) as models:
        for worker, model in zip(derived.workers, models, strict=True):
            parameters = collect_parameters(model)
            found = stage_parameters(record_load(model, parameters, meta_checkpoint(folder)), parameters)
            shapes = {parameter.name: parameter.shape for parameter in worker.parameters}
            assert shapes == {name: tuple(layout.shape) for name, layout in found.items()}
            regions = {region for layout in found.values() for region in layout.regions}
            assert live_regions(worker.regions) == live_regions(regions)


def live_regions(regions: set[SinkRegion] | tuple[SinkRegion, ...]) -> set[SinkRegion]:
    """Those that copy anything."""
    return {region for region in regions if region.source_box.num_elements}
