"""A scorer grows to three replicas and shrinks to one during a run; one of them is killed in between."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.helpers.push_matrix_cluster import Zygote
from tests.helpers.swap_cluster import SwapCluster, check_trained

pytestmark = pytest.mark.timeout(120)

NUM_PROMPTS = 6
REPLICAS = ("old", "other", "third")


def num_calls(cluster: SwapCluster, name: str) -> int:
    return sum(call["phase"] == "live" for call in cluster.journal(name))


async def until_working(cluster: SwapCluster, *names: str) -> None:
    """Wait until each of these has answered another live call."""
    before = {name: num_calls(cluster, name) for name in names}
    await cluster.until_true(lambda: all(num_calls(cluster, name) > before[name] for name in names))


async def test_scorer_grows_to_three_replicas_and_shrinks_to_one_and_no_record_is_lost(
    tmp_path: Path, redis_url: str, zygote: Zygote
) -> None:
    rollout = {"prompts_per_step": NUM_PROMPTS}
    async with SwapCluster(tmp_path, redis_url, zygote, reward={"timeout_s": 20.0}, rollout=rollout) as cluster:
        cluster.set_slow()
        await cluster.serve("old")
        await cluster.steps(1)
        await asyncio.gather(cluster.serve("other"), cluster.serve("third"))
        await until_working(cluster, *REPLICAS)
        await cluster.steps(3)
        cluster.hold("other", "live")
        await cluster.until_held("other", "live")
        await cluster.kill_server("other")
        cluster.release()
        await cluster.steps(3)
        await until_working(cluster, "old", "third")
        await cluster.serve("other")
        await until_working(cluster, *REPLICAS)
        await asyncio.gather(cluster.stop_server("old"), cluster.stop_server("third"))
        await until_working(cluster, "other")
        await cluster.steps(3)
        assert (await cluster.stages()) == {1: "active"}
        assert [server["service_id"] for server in (await cluster.rewards())["servers"]] == ["reward-other"]
    check_trained(cluster.actor.trained, NUM_PROMPTS)
    services = {part.service for records in cluster.actor.trained.values() for record in records for part in record.reward_components}
    assert services == {f"reward-{name}" for name in REPLICAS}
