"""A real model through every service: SmolLM2-135M with tied embeddings and a 49,152-token vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.demo import started_demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

_TIED_FP32_BYTES = 134_515_008 * 4


def test_smollm2_takes_two_ppo_steps(tmp_path: Path) -> None:
    with started_demo(tmp_path, "--preset", "smollm2", "--steps", "2", "--set", "evaluation.max_prompts=4") as demo:
        assert demo.process.wait(1100) == 0, demo.log()
        steps = [json.loads(line) for line in (demo.run_folder() / "metrics.jsonl").read_text().splitlines()]
        assert [step["policy_version"] for step in steps] == [1, 2]
        # The second step samples with the pushed weights: the engine's log-probabilities are still the trainer's.
        assert steps[1]["rollout_policy_version"] == 1
        assert max(step["logprob_max_difference"] for step in steps) <= 1e-4
        # The tied matrix goes through once.
        assert steps[0]["push_bytes"] == _TIED_FP32_BYTES
        assert demo.shared_memory() == []
