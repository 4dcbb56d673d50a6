"""The same services on a GPU: engine, gangs (nccl) and the push through whatever `auto` chooses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.demo import tiny_demo

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_trains_and_pushes_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    tolerance = {"float32": 1e-3, "bfloat16": 0.1}[dtype]
    precision = {"float32": "float32", "bfloat16": "bf16_mixed"}[dtype]
    settings = ("--set", f"rollout.dtype={dtype}", "--set", f"actor.precision={precision}", "--set", f"critic.precision={precision}")
    with tiny_demo(tmp_path, "--steps", "3", *settings) as demo:
        assert demo.process.wait(500) == 0, demo.log()
        steps = [json.loads(line) for line in (demo.run_folder() / "metrics.jsonl").read_text().splitlines()]
    assert [step["policy_version"] for step in steps] == [1, 2, 3]
    assert max(step["logprob_max_difference"] for step in steps) <= tolerance
