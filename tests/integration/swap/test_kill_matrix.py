"""kill -9 of the new server, the old server and the coordinator in each stage of a swap, with groups in flight."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.helpers.push_matrix_cluster import Zygote
from tests.helpers.swap_cluster import SwapCluster, check_trained, run_in_training

pytestmark = pytest.mark.timeout(120)

STAGES = ("registered", "checked", "ready", "shadow", "active", "draining", "drained")
VICTIMS = ("new", "old", "coordinator")
LONG_S = 20.0
"""Timeout of a component whose check is held up."""
PAUSED_WITHIN_S = 12.0
"""The deadline of a call is 2 s; the rest is for a busy machine."""

BY_OLD = ("registered", "checked", "ready", "shadow")
"""Stages of revision 2 in which revision 1 is active."""


async def reach(cluster: SwapCluster, stage: str, timeout_s: float) -> None:
    """Bring revision 2 into a stage, with groups in flight at the server that scores them."""
    held = {"registered": "check", "checked": "warm"}.get(stage)
    if held is not None:
        cluster.hold("new", held)
    await cluster.add(timeout_s)
    if held is not None:
        await cluster.until_held("new", held)
    else:
        await cluster.until_stage(2, "ready")
    if stage == "shadow":
        cluster.hold("new", "live")
        await cluster.post("routes/2/shadow", share=1.0)
        await cluster.until_held("new", "live")
    if stage in ("active", "drained"):
        await cluster.post("routes/2/activate")
        await cluster.until_stage(1, "drained")
    at = "new" if stage in ("active", "drained") else "old"
    cluster.hold(at, "live")
    await cluster.until_held(at, "live")
    if stage == "draining":
        await cluster.post("routes/2/activate")
    assert (await cluster.stages())[2 if stage not in ("draining", "drained") else 1] == stage


async def expect_agreement(cluster: SwapCluster, active: int) -> None:
    """Memory says what the disk says."""
    rewards = await cluster.rewards()
    assert (rewards["active"], cluster.log()[-1]["active"]) == (active, active)
    assert [route["number"] for route in rewards["revisions"] if route["stage"] == "active"] == [active]


async def expect_pause(cluster: SwapCluster, scorer: str) -> None:
    """The run waits for a human, who is told whose fault it is."""
    alert = (await cluster.coordinator.until_state("paused", timeout_s=PAUSED_WITHIN_S))["alert"]
    assert alert["service"].startswith(f"{scorer}@1 on "), alert
    assert f"{scorer}@1" in alert["error"], alert


async def start(cluster: SwapCluster, stage: str, victim: str) -> int:
    """Reach the stage and kill; the active revision."""
    is_held_long = stage in ("registered", "checked") and victim != "new"
    await reach(cluster, stage, LONG_S if is_held_long else 1.0)
    await (cluster.kill_coordinator() if victim == "coordinator" else cluster.kill_server(victim))
    cluster.release()
    return 1 if stage in BY_OLD else 2


@pytest.mark.parametrize("stage", STAGES)
async def test_killed_coordinator_goes_on_with_what_the_log_says(tmp_path: Path, redis_url: str, zygote: Zygote, stage: str) -> None:
    async with run_in_training(tmp_path, redis_url, zygote) as cluster:
        active = await start(cluster, stage, "coordinator")
        before = cluster.log()
        assert before[-1]["active"] == active
        await cluster.start_coordinator()
        await expect_agreement(cluster, active)
        assert cluster.log()[: len(before)] == before
        await asyncio.gather(cluster.until_ready("old"), cluster.until_ready("new"))
        await cluster.steps(2)
        await expect_goes_on(cluster, stage)
        await expect_agreement(cluster, active)
    assert check_trained(cluster.actor.trained)[len(cluster.actor.trained)] == {active}


async def expect_goes_on(cluster: SwapCluster, stage: str) -> None:
    """Whatever was under way is taken up."""
    if stage in ("registered", "checked", "ready"):
        await cluster.until_stage(2, "ready")
    elif stage == "shadow":
        await cluster.until_true_of("/v1/rewards/routes/2/comparison", lambda comparison: comparison["num_samples"] > 0)
        assert (await cluster.stages())[2] == "shadow"
    else:
        await cluster.until_stage(1, "drained")


@pytest.mark.parametrize("stage", STAGES)
async def test_killed_new_server(tmp_path: Path, redis_url: str, zygote: Zygote, stage: str) -> None:
    async with run_in_training(tmp_path, redis_url, zygote) as cluster:
        active = await start(cluster, stage, "new")
        await expect_agreement(cluster, active)
        if stage in BY_OLD:
            await cluster.steps(2)
            await expect_harmless(cluster, stage)
        else:
            await expect_pause(cluster, "new")
            if stage == "active":
                await cluster.serve("new")
            else:
                assert (await cluster.post("rollback"))["number"] == 1
                active = 1
            await cluster.coordinator.post("/v1/resume")
            await cluster.steps(2)
        await expect_agreement(cluster, active)
    assert check_trained(cluster.actor.trained)[len(cluster.actor.trained)] == {active}


async def expect_harmless(cluster: SwapCluster, stage: str) -> None:
    """A revision that is not active fails alone."""
    if stage in ("registered", "checked"):
        problem = (await cluster.until_stage(2, "rejected"))["problem"]
        assert "new" in problem
        return
    refused = await cluster.until_refused("routes/2/activate")
    assert "no server offers new@1" in refused
    if stage == "shadow":
        await cluster.until_true_of("/v1/rewards/routes/2/comparison", lambda comparison: (comparison["error_share"]["shadow"] or 0) > 0)
    await cluster.serve("new")
    assert (await cluster.stages())[2] == stage


@pytest.mark.parametrize("stage", STAGES)
async def test_killed_old_server(tmp_path: Path, redis_url: str, zygote: Zygote, stage: str) -> None:
    async with run_in_training(tmp_path, redis_url, zygote) as cluster:
        active = await start(cluster, stage, "old")
        await expect_agreement(cluster, active)
        if stage in BY_OLD or stage == "draining":
            await expect_pause(cluster, "old")
            if stage in ("registered", "checked"):
                await cluster.serve("old")
                await cluster.until_stage(2, "ready")
            elif stage in ("ready", "shadow"):
                await cluster.post("routes/2/activate")
                active = 2
            await cluster.coordinator.post("/v1/resume")
        await cluster.steps(2)
        if active == 2:
            await cluster.until_stage(1, "drained")
            assert "no server offers old@1" in await cluster.until_refused("rollback")
            await cluster.post("routes/1/retire")
        await expect_agreement(cluster, active)
    assert check_trained(cluster.actor.trained)[len(cluster.actor.trained)] == {active}


async def test_killed_server_that_comes_back_with_other_code_gets_no_work(tmp_path: Path, redis_url: str, zygote: Zygote) -> None:
    """Nobody mixes two codes under one version; the right one is waited for."""
    async with run_in_training(tmp_path, redis_url, zygote) as cluster:
        await cluster.kill_server("old")
        cluster.start_server("old", is_other_code=True)
        await expect_pause(cluster, "old")
        await cluster.until_ready("old", "other code under the same version")
        await cluster.stop_server("old")
        await cluster.serve("old")
        await cluster.coordinator.post("/v1/resume")
        await cluster.steps(2)
        await expect_agreement(cluster, 1)
    check_trained(cluster.actor.trained)
    assert max(record.reward for records in cluster.actor.trained.values() for record in records) < 100.0
