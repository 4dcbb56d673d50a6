"""A new reward that is broken: the run pauses with an alert, and goes on by the old one without losing what it has generated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.push_matrix_cluster import Zygote
from tests.helpers.swap_cluster import NUM_PROMPTS, SwapCluster, check_trained, run_in_training

pytestmark = pytest.mark.timeout(120)


def scored_by(cluster: SwapCluster, name: str) -> set[str]:
    """Live samples that a server has answered for."""
    return {sample_id for call in cluster.journal(name) if call["phase"] == "live" for sample_id in call["ids"]}


async def activate_new(cluster: SwapCluster) -> None:
    await cluster.add()
    await cluster.until_stage(2, "ready")
    await cluster.post("routes/2/activate")


@pytest.mark.parametrize("broken", ["", "/1/"], ids=["all", "the second of each group"])
async def test_rollback_while_alerted_scores_the_step_again_by_the_old_revision(
    tmp_path: Path, redis_url: str, zygote: Zygote, broken: str
) -> None:
    """Groups are scored again as wholes, whichever of their samples had no score."""
    async with run_in_training(tmp_path, redis_url, zygote, reward={"max_unscored_share": 0.2}) as cluster:
        cluster.break_server("new", broken)
        await activate_new(cluster)
        alert = (await cluster.coordinator.until_state("paused"))["alert"]
        assert (alert["service"], alert["error"]) == ("new@1 on reward-new", "new@1: scripted")
        assert "samples of the step have no score" in alert["what"]
        num_generated, step = len(cluster.rollout.generated_at), len(cluster.actor.trained) + 1
        # It pauses as soon as too many surely have no score, which may be before the last group of the step is scored.
        affected = scored_by(cluster, "new")
        assert affected
        assert not affected & scored_by(cluster, "old")
        assert (await cluster.post("rollback"))["number"] == 1
        await cluster.until_stage(2, "draining")
        # Its groups are still pinned to it.
        assert (await cluster.rewards())["revisions"][1]["num_open_groups"] == NUM_PROMPTS
        assert len(cluster.rollout.generated_at) == num_generated, "nothing is generated in the pause"
        await cluster.coordinator.post("/v1/resume")
        await cluster.until_stage(2, "drained")
        await cluster.steps(2)
        assert affected <= scored_by(cluster, "new") <= scored_by(cluster, "old")
        assert (await cluster.coordinator.get("/v1/status"))["alert"] is None
    trained = cluster.actor.trained
    revisions = check_trained(trained)
    assert {revision for own in revisions.values() for revision in own} == {1}
    assert affected <= {f"{record.uid}/{record.sample_index}/{record.attempt}" for record in trained[step]}
    metrics = {row["step"]: row for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())}
    assert 1 <= metrics[step]["rescored_groups"] <= NUM_PROMPTS
    assert metrics[step]["num_scorer_errors"] == 0


async def test_repair_while_alerted_scores_the_step_again_by_the_new_revision(tmp_path: Path, redis_url: str, zygote: Zygote) -> None:
    async with run_in_training(tmp_path, redis_url, zygote) as cluster:
        cluster.break_server("new")
        await activate_new(cluster)
        await cluster.coordinator.until_state("paused")
        step = len(cluster.actor.trained) + 1
        # Resumed too early, it pauses again.
        num_calls = len(cluster.journal("new"))
        await cluster.coordinator.post("/v1/resume")
        await cluster.until_true(lambda: len(cluster.journal("new")) > num_calls)
        await cluster.coordinator.until_state("paused")
        cluster.repair_server("new")
        await cluster.coordinator.post("/v1/resume")
        await cluster.steps(2)
    revisions = check_trained(cluster.actor.trained)
    assert revisions[step - 1] == {1}
    assert all(own == {2} for number, own in revisions.items() if number >= step)


async def test_coordinator_killed_in_the_pause_forgets_nothing_but_the_step(tmp_path: Path, redis_url: str, zygote: Zygote) -> None:
    """The rollback was on disk before it was killed."""
    async with run_in_training(tmp_path, redis_url, zygote) as cluster:
        cluster.break_server("new")
        await activate_new(cluster)
        await cluster.coordinator.until_state("paused")
        await cluster.post("rollback")
        await cluster.kill_coordinator()
        assert cluster.log()[-1]["action"] == "rollback"
        await cluster.start_coordinator()
        assert (await cluster.rewards())["active"] == 1
        await cluster.steps(2)
        await cluster.until_stage(2, "drained")
    assert {revision for own in check_trained(cluster.actor.trained).values() for revision in own} == {1}
