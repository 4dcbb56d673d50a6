"""The real coordinator process with a real Redis server and scripted services over real gRPC."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis

from shoal.clients.rollout import RolloutClient
from shoal.config.models import SecuritySection
from shoal.errors import UnavailableError
from shoal.types import Batch, SamplingParams, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_process import VOCABULARY, running_coordinator, write_config, write_state
from tests.helpers.fake_services import FakeCluster, FakeRollout
from tests.helpers.valkey import running_valkey

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with running_valkey(tmp_path / "redis") as server:
        yield server.url


def make_cluster(address: str) -> FakeCluster:
    return FakeCluster(address, "test", vocab_size=len(VOCABULARY))


async def test_coordinator_trains_three_steps_through_real_wires(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url)
    async with (
        running_coordinator(config, "--exit-when-done", forked=False) as coordinator,
        make_cluster(coordinator.grpc_address) as cluster,
    ):
        assert await coordinator.wait() == 0
    assert cluster.rollout.commits == cluster.actor.pushes == [1, 2, 3]
    assert cluster.rollout.generated_at == [0] * 5 + [0] * 4 + [1] * 4 + [2] * 4 + [3] * 5
    assert [call for call in cluster.actor.calls if call.startswith("update")] == ["update 1", "update 2", "update 3"]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(step["step"], step["policy_version"], step["num_samples"]) for step in metrics] == [(1, 1, 8), (2, 2, 8), (3, 3, 8)]
    assert all(step["rollout_s"] > 0 and step["push_s"] > 0 and step["control_s"] <= step["step_s"] for step in metrics)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["state"], report["steps"], len(report["evaluations"])) == ("finished", 3, 2)
    assert report["accuracy_before"] is not None
    assert report["accuracy_after"] is not None


async def test_coordinator_hands_each_gang_every_record_once_and_leaves_nothing_in_redis(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url, run={"steps": 2}, data={"held_out": None})
    async with running_coordinator(config) as coordinator, make_cluster(coordinator.grpc_address) as cluster:
        await coordinator.until_state("finished")
        assert cluster.critic is not None
        for gang in (cluster.actor, cluster.critic):
            refs = {
                step: {ref.key for rank in batch.ranks for mini in rank for micro in mini.micro_batches for ref in micro}
                for step, batch in gang.batches.items()
            }
            assert [len(keys) for keys in refs.values()] == [8, 8]
            assert not refs[1] & refs[2]
        with redis.Redis.from_url(redis_url) as client:
            assert [key for key in client.scan_iter("shoal:test:*") if b"record" in key] == []
        assert (await coordinator.get("/v1/status"))["queue_depth"] == 0


async def test_coordinator_serves_its_api_after_the_run_until_sigterm(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url, run={"steps": 1}, data={"held_out": None})
    async with running_coordinator(config) as coordinator:
        async with make_cluster(coordinator.grpc_address):
            await coordinator.until_state("finished")
            services = (await coordinator.get("/v1/services"))["services"]
            assert {service["service_id"]: service["state"] for service in services} == dict.fromkeys(
                ["rollout-0", "reward-0", "actor", "critic"], "ready"
            )
            (push,) = (await coordinator.get("/v1/pushes"))["pushes"]
            assert (push["state"], push["servers"], set(push["stages_s"])) == (
                "committed",
                ["rollout-0"],
                {"prepare", "transfer", "verify", "commit"},
            )
            (server,) = push["server_reports"]
            assert (server["stage"], server["transports"], server["dense"]) == ("committed", ["shm"], True)
            assert push["sent_bytes"] == push["dense_bytes"] == server["sent_bytes"] == 16
            summary = (await coordinator.get("/v1/status"))["pushes"]
            assert (summary["num_pushes"], summary["policy_version"], summary["delta_share"]) == (1, 1, 1.0)
            (step,) = (await coordinator.get("/v1/steps"))["steps"]
            assert step["step"] == 1
        coordinator.process.send_signal(signal.SIGTERM)
        assert await coordinator.wait() == 0


async def test_coordinator_fails_with_exit_code_1_when_a_gang_is_killed(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url)
    async with running_coordinator(config, "--exit-when-done") as coordinator, make_cluster(coordinator.grpc_address) as cluster:
        cluster.actor.fail_update_at = 2
        assert await coordinator.wait() == 1
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["state"] == "failed"
    assert "the actor gang 'actor'" in report["error"]
    assert "update of step 2" in report["error"]


async def test_coordinator_fails_when_a_silent_gangs_lease_expires(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url)
    async with running_coordinator(config) as coordinator, make_cluster(coordinator.grpc_address) as cluster:
        assert cluster.critic is not None
        assert cluster.critic.lease is not None
        assert cluster.critic.lease._renewing is not None
        cluster.critic.may_update.clear()
        await coordinator.until_state("pushing", "training")
        # As SIGSTOP: connected, silent, no renewals.
        cluster.critic.lease._renewing.remove_done_callback(cluster.critic.lease._stop_owner)
        cluster.critic.lease._renewing.cancel()
        status = await coordinator.until_state("failed")
        cluster.critic.may_update.set()
    assert "the critic gang 'critic'" in status["error"]
    assert "its lease expired" in status["error"]


async def test_coordinator_waits_for_a_rollout_server_that_died_and_catches_its_successor_up(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url)
    async with running_coordinator(config) as coordinator, make_cluster(coordinator.grpc_address) as cluster:
        await coordinator.until(lambda status: status["step"] >= 1)
        cluster.rollout.may_generate.clear()
        await asyncio.wait_for(cluster.rollout.hangs.wait(), 10)
        version = cluster.rollout.policy_version
        await cluster.rollout.__aexit__()
        await coordinator.until(
            lambda status: any("rollout server" in wait["what"] or "1 rollout" in wait["what"] for wait in status["waiting_for"])
        )
        successor = FakeRollout("rollout-0", "test", coordinator.grpc_address, vocab_size=len(VOCABULARY))
        async with successor:
            status = await coordinator.until_state("finished", "failed")
    assert status["error"] is None
    assert version >= 1
    assert successor.commits[0] == version, "caught up first"
    assert min(successor.generated_at) >= version, "no request before the current version"


async def test_a_fresh_server_answers_nothing_before_it_has_the_version_of_a_late_trainer(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url, run={"steps": 52}, data={"held_out": None})
    write_state(tmp_path, 50)
    async with running_coordinator(config) as coordinator:
        cluster = make_cluster(coordinator.grpc_address)
        assert cluster.critic is not None
        cluster.actor.policy_version = cluster.critic.policy_version = cluster.rollout.policy_version = 50
        other = FakeRollout("rollout-1", "test", coordinator.grpc_address, vocab_size=len(VOCABULARY))
        other.policy_version = 50
        # All requests hang: the run stays at version 50 until the fresh server is there.
        cluster.rollout.may_generate.clear()
        other.may_generate.clear()
        fresh = FakeRollout("rollout-1", "test", coordinator.grpc_address, vocab_size=len(VOCABULARY))
        gate = asyncio.Event()
        fresh.sink.faults["commit"] = [gate]
        async with cluster:
            await other.__aenter__()
            await coordinator.until_state("rolling_out")
            await other.__aexit__()
            async with fresh:
                assert fresh.required_versions == [50], "told with its first lease"
                await asyncio.wait_for(fresh.sink.entered["commit"].wait(), 10)
                services = {service["service_id"]: service for service in (await coordinator.get("/v1/services"))["services"]}
                assert (services["rollout-1"]["state"], services["rollout-1"]["policy_version"]) == ("fenced", 0)
                with pytest.raises(UnavailableError, match="serves 0, required is 50"):
                    await generate_directly(fresh)
                assert fresh.generated_at == []
                gate.set()
                cluster.rollout.may_generate.set()
                status = await coordinator.until_state("finished", "failed")
    assert status["error"] is None
    assert fresh.commits[0] == 50
    assert min(fresh.generated_at, default=50) >= 50
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["rollout_policy_version"] for step in steps] == [50, 51], "no sample of version 0"


async def generate_directly(server: FakeRollout) -> None:
    """As somebody who knows the server's address, and no coordinator."""
    async with RolloutClient(server.address, SecuritySection(insecure=True)) as client:
        async for _ in client.generate("direct", [3], SamplingParams(max_new_tokens=1), 1, timeout_s=5.0):
            pass


async def test_coordinator_verifies_weights_and_repairs_what_differs(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url, run={"steps": 1000}, data={"held_out": None})
    async with running_coordinator(config) as coordinator, make_cluster(coordinator.grpc_address) as cluster:
        with pytest.raises(httpx.HTTPStatusError, match="409"):
            await coordinator.post("/v1/weights/verify")
        await coordinator.until(lambda status: status["step"] >= 1)
        await coordinator.post("/v1/pause")
        await coordinator.until_state("paused")
        audit = await coordinator.post("/v1/weights/verify")
        (server,) = audit["servers"]
        assert (audit["is_equal"], server["result"], server["num_parameters"], server["num_pieces"]) == (True, "equal", 1, 1)
        assert server["probe"] == {"num_tokens": 16, "max_logprob_difference": 0.0, "greedy_share": 1.0}
        cluster.rollout.sink.corrupt = {"w": 1}
        (server,) = (await coordinator.post("/v1/weights/verify"))["servers"]
        assert (server["result"], server["first_difference"]) == ("differs", "w of worker 0 (from w of rank 0)")
        await coordinator.until(lambda status: status["pushes"]["num_committed"] > status["step"])
        await coordinator.post("/v1/weights/verify")
        audits = (await coordinator.get("/v1/audits"))["audits"]
        assert [audit["is_equal"] for audit in audits] == [True, False, True]
        metrics = await coordinator.text("/metrics")
    for line in ('shoal_push_audits_total{result="differs"} 1.0', 'shoal_push_audits_total{result="equal"} 2.0'):
        assert line in metrics


async def test_coordinator_pauses_resumes_and_stops_over_rest(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url, run={"steps": 1000})
    async with running_coordinator(config, "--exit-when-done") as coordinator, make_cluster(coordinator.grpc_address):
        with pytest.raises(httpx.HTTPStatusError, match="409"):
            await coordinator.post("/v1/resume")
        await coordinator.until(lambda status: status["step"] >= 1)
        await coordinator.post("/v1/pause")
        paused = await coordinator.until_state("paused")
        await coordinator.post("/v1/resume")
        await coordinator.until(lambda status: status["step"] > paused["step"])
        await coordinator.post("/v1/stop")
        assert await coordinator.wait() == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["state"] == "stopped"
    assert report["export_folder"] == str(tmp_path / "run" / "export")
    assert report["evaluations"][-1]["step"] == report["steps"] >= 2


async def test_coordinator_trains_a_group_without_its_stuck_sample(tmp_path: Path, redis_url: str) -> None:
    """R35: after its last deadline a group is used with the samples that did finish; the call is cancelled."""
    rollout = {"group_size": 4, "prompts_per_step": 2, "request_timeout_s": 0.5, "retries": 1}
    config = write_config(tmp_path, redis_url, run={"steps": 3}, data={"held_out": None}, rollout=rollout)
    async with running_coordinator(config, "--exit-when-done") as coordinator, make_cluster(coordinator.grpc_address) as cluster:
        cluster.rollout.sticks_at = 1
        assert await coordinator.wait() == 0
        assert cluster.rollout.num_cancelled == 4, "two groups, twice each"
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(step["num_samples"], step["num_missing"], step["num_groups"]) for step in steps] == [(8, 0, 2), (6, 2, 2), (8, 0, 2)]
    assert 1.0 <= steps[1]["step_s"] < 20.0
    batch = cluster.actor.batches[2]
    assert sum(len(refs) for rank in batch.ranks for mini in rank for refs in mini.micro_batches) == 6


async def test_coordinator_samples_dynamically_and_writes_tensorboard_events(tmp_path: Path, redis_url: str) -> None:
    config = write_config(
        tmp_path,
        redis_url,
        run={"steps": 2},
        data={"held_out": None},
        rollout={"group_size": 2, "prompts_per_step": 2, "dynamic_sampling": True},
        telemetry={"tensorboard": True},
    )
    async with running_coordinator(config, "--exit-when-done") as coordinator, make_cluster(coordinator.grpc_address) as cluster:
        cluster.reward.score = flat_in("e0-i0", "e0-i3", "e0-i4")
        assert await coordinator.wait() == 0
        batches = {step: groups_of(batch) for step, batch in cluster.actor.batches.items()}
    assert batches == {1: {"e0-i1", "e0-i2"}, 2: {"e0-i5", "e0-i6"}}
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(step["num_generated_groups"], step["num_zero_std_dropped"], step["num_refills"]) for step in steps] == [(3, 1, 1), (4, 2, 1)]
    assert json.loads((tmp_path / "run" / "state.json").read_text())["current"]["prompts"] == {"epoch": 0, "index": 7}
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"train/reward" in events.read_bytes()


def flat_in(*group_ids: str) -> Callable[[ScoreSample], ScoreResult]:
    """Every sample of these groups is worth 1; in the others it is worth its index."""

    def score(sample: ScoreSample) -> ScoreResult:
        uid, index, _ = sample.sample_id.split("/")
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=1.0 if uid in group_ids else float(index))

    return score


async def test_coordinator_goes_on_where_a_killed_one_was(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url, run={"steps": 4}, data={"held_out": None})
    async with running_coordinator(config) as first:
        cluster = make_cluster(first.grpc_address)
        async with cluster:
            cluster.rollout.sticks_at = 2
            await first.until(lambda status: status["step"] >= 2)
            first.process.kill()
            first.process.wait()
    # The gangs live on; they register with the next coordinator.
    async with running_coordinator(config, "--exit-when-done") as second:
        successor = make_cluster(second.grpc_address)
        assert successor.critic is not None
        assert cluster.critic is not None
        successor.actor.policy_version, successor.critic.policy_version = cluster.actor.policy_version, cluster.critic.policy_version
        async with successor:
            assert await second.wait() == 0
    assert sorted(cluster.actor.batches) == [1, 2]
    # Twelve rows, four a step.
    assert {step: groups_of(batch) for step, batch in successor.actor.batches.items()} == {
        3: {"e0-i8", "e0-i9", "e0-i10", "e0-i11"},
        4: {"e1-i0", "e1-i1", "e1-i2", "e1-i3"},
    }


def groups_of(batch: Batch) -> set[str]:
    return {ref.group_id for rank in batch.ranks for mini in rank for micro in mini.micro_batches for ref in micro}


def broken(sample: ScoreSample) -> ScoreResult:
    return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message="scripted")


async def test_coordinator_pauses_with_an_alert_when_nothing_can_be_scored_and_goes_on_after_the_repair(
    tmp_path: Path, redis_url: str
) -> None:
    """R46: the run survives a dead scorer, and nothing that was generated is lost."""
    config = write_config(tmp_path, redis_url, run={"steps": 2}, data={"held_out": None})
    async with running_coordinator(config, "--exit-when-done") as coordinator, make_cluster(coordinator.grpc_address) as cluster:
        works, cluster.reward.score = cluster.reward.score, broken
        status = await coordinator.until_state("paused")
        assert (status["step"], status["alert"]["service"], status["alert"]["error"]) == (0, "fake@1 on reward-0", "fake@1: scripted")
        cluster.reward.score = works
        await coordinator.post("/v1/resume")
        assert await coordinator.wait() == 0
        batches = {step: groups_of(batch) for step, batch in cluster.actor.batches.items()}
    assert batches == {1: {f"e0-i{index}" for index in range(4)}, 2: {f"e0-i{index}" for index in range(4, 8)}}
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(step["num_samples"], step["num_scorer_errors"], step["reward_revision"]) for step in steps] == [(8, 0, 1), (8, 0, 1)]
    assert steps[0]["rescored_groups"] >= 1
    assert json.loads((tmp_path / "run" / "report.json").read_text())["state"] == "finished"


async def test_coordinator_stopped_in_the_pause_exports_and_is_stopped(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url, data={"held_out": None})
    async with running_coordinator(config, "--exit-when-done") as coordinator, make_cluster(coordinator.grpc_address) as cluster:
        cluster.reward.score = broken
        await coordinator.until_state("paused")
        await coordinator.post("/v1/stop")
        assert await coordinator.wait() == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["state"], report["steps"], report["export_folder"]) == ("stopped", 0, str(tmp_path / "run" / "export"))


async def test_coordinator_ends_in_order_on_sigterm_amid_rollouts(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url, data={"held_out": None})
    async with running_coordinator(config) as coordinator:
        cluster = make_cluster(coordinator.grpc_address)
        cluster.rollout.may_generate.clear()
        async with cluster:
            status = await coordinator.until_state("rolling_out")
            await coordinator.until(lambda status: any("rollouts and scores of step 1" in wait["what"] for wait in status["waiting_for"]))
            assert status["step"] == 0
            coordinator.process.send_signal(signal.SIGTERM)
            assert await coordinator.wait() == 0
    assert json.loads((tmp_path / "run" / "report.json").read_text())["state"] == "stopped"


async def test_coordinator_reports_unusable_data_before_services_come(tmp_path: Path, redis_url: str) -> None:
    config = write_config(tmp_path, redis_url)
    (tmp_path / "train.jsonl").write_text("")
    async with running_coordinator(config, "--exit-when-done") as coordinator:
        assert await coordinator.wait() == 1
    assert "the file has no rows" in json.loads((tmp_path / "run" / "report.json").read_text())["error"]


async def test_coordinator_that_cannot_start_says_why_and_exits_with_2(tmp_path: Path) -> None:
    config = write_config(tmp_path, "redis://127.0.0.1:1/0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            "run.stepz=3": "run.steps",
            f"coordinator.rest_port={port}": f"the REST API cannot listen on 127.0.0.1:{port}",
            f"coordinator.grpc_port={port}": f"cannot listen on 127.0.0.1:{port}",
        }
        # Each in a folder of its own: two coordinators of one run are refused.
        folders = [f"run.folder={tmp_path / str(number)}" for number in range(len(cases))]
        ended = await asyncio.gather(
            *(
                asyncio.to_thread(run_to_the_end, config, "--set", setting, "--set", folder)
                for setting, folder in zip(cases, folders, strict=True)
            )
        )
    assert [process.returncode for process in ended] == [2, 2, 2]
    for process, expected in zip(ended, cases.values(), strict=True):
        assert expected in process.stderr


def run_to_the_end(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal_coordinator", "--config", str(config), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
