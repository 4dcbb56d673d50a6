"""Swaps by REST in a run of real processes that trains and evaluates; the coordinator is killed in between."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.push_matrix_cluster import Zygote
from tests.helpers.swap_cluster import SwapCluster, check_trained, run_in_training

pytestmark = pytest.mark.timeout(120)

NUM_SWAPS = 20


async def swap_at_random(cluster: SwapCluster, rng: random.Random) -> None:
    """Swap back and forth; each command answers with what is active now, and the disk says so already."""
    for _ in range(NUM_SWAPS):
        await asyncio.sleep(rng.random() * 0.1)
        active = (await cluster.rewards())["active"]
        path = "rollback" if active == 2 and rng.random() < 0.5 else f"routes/{3 - active}/activate"
        route = await cluster.post(path)
        assert (route["number"], route["stage"]) == (3 - active, "active")
        assert [entry["active"] for entry in cluster.log() if entry["action"] in ("activate", "rollback")][-1] == 3 - active


async def test_swaps_in_a_run_that_trains_and_evaluates(tmp_path: Path, redis_url: str, zygote: Zygote) -> None:
    sections: dict[str, dict[str, Any]] = {
        "data": {"held_out": str(tmp_path / "held_out.jsonl")},
        "evaluation": {"every": 2},
        "reward": {"timeout_s": 10.0},
    }
    async with run_in_training(tmp_path, redis_url, zygote, **sections) as cluster:
        rng = random.Random(3)
        await cluster.add(timeout_s=10.0)
        await cluster.until_stage(2, "ready")
        await swap_at_random(cluster, rng)
        await cluster.kill_coordinator()
        active = cluster.log()[-1]["active"]
        await cluster.start_coordinator()
        assert (await cluster.rewards())["active"] == active
        await asyncio.gather(cluster.until_ready("old"), cluster.until_ready("new"))
        await cluster.steps(2)
        await swap_at_random(cluster, rng)
        await cluster.steps(2)
        evaluations = (await cluster.coordinator.get("/v1/status"))["evaluations"]
    revisions = check_trained(cluster.actor.trained)
    assert all(len(own) == 1 for own in revisions.values()), "a step is issued at once"
    assert {revision for own in revisions.values() for revision in own} == {1, 2}
    assert evaluations
    steps = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    shown = {step["step"]: step["reward_revision"] for step in steps}
    assert all(shown[step] == max(revisions[step]) for step in shown)
