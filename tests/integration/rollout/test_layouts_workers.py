"""Two real engine workers: each finds its own layout, and together they serve what was staged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.inprocess_engine import InProcessEngine
from tests.helpers.tiny_models import Architecture, reference_logprobs, save_tiny_model

PROMPT = [5, 6, 7, 90, 100]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("architecture", "tied", "mode", "overrides"),
    [
        ("llama", False, "copies", {"num_key_value_heads": 1}),
        ("mixtral", False, "copies", {}),
        ("opt", True, "copies", {}),
        ("gpt2", True, "reload", {}),
    ],
)
def test_two_workers_serve_what_was_staged(
    tmp_path: Path, engine_environment: None, architecture: Architecture, tied: bool, mode: str, overrides: dict[str, int]
) -> None:
    first, second = (save_tiny_model(tmp_path / f"v{seed}", architecture, tied=tied, seed=seed, **overrides) for seed in (0, 1))  # type: ignore[arg-type]  # sizes only
    engine = InProcessEngine(first, extension="tests.helpers.layout_worker.LayoutWorker", tensor_parallel_size=2)
    try:
        modes = engine.llm.collective_rpc("layout_discover", args=(str(first),))
        assert [found for found, _ in modes] == [mode, mode]
        for folder in (second, first):
            assert engine.llm.collective_rpc("layout_swap", args=(str(folder),)) == [True, True]
            assert engine.llm.reset_prefix_cache()
            ids, logprobs, _ = engine.sample(PROMPT, temperature=0.0)
            np.testing.assert_allclose(logprobs, reference_logprobs(folder, PROMPT, ids), atol=1e-4)
    finally:
        engine.close()
