"""Fencing, catching up and suspecting servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest
from shoal_coordinator.states import RunState

from shoal.errors import StalePolicyError, StateError, TransportError, UnavailableError
from shoal.telemetry.metrics import sample_value
from shoal.types import Completion, SamplingParams, ServiceKind
from tests.helpers.coordinator_fakes import make_completion
from tests.helpers.run_fakes import RunHarness, SilentRollout

SAMPLING = SamplingParams(max_new_tokens=1)


class DyingRollout(SilentRollout):
    """Unavailable, also for probes, until `alive` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = asyncio.Event()

    async def describe(self, *, timeout_s: float):  # type: ignore[no-untyped-def] # noqa: ANN201
        if not self.alive.is_set():
            raise UnavailableError("connection refused")
        return await super().describe(timeout_s=timeout_s)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        num_samples: int,
        seeds: Sequence[int] = (),
        min_policy_version: int = 0,
        *,
        timeout_s: float,
    ) -> AsyncGenerator[Completion, None]:
        raise UnavailableError("connection refused")
        yield


class StaleRollout(SilentRollout):
    """Refuses requests for a newer version than it serves."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        num_samples: int,
        seeds: Sequence[int] = (),
        min_policy_version: int = 0,
        *,
        timeout_s: float,
    ) -> AsyncGenerator[Completion, None]:
        if self.sink.served_version < min_policy_version:
            raise StalePolicyError(f"serves {self.sink.served_version}, wanted {min_policy_version}")
        yield make_completion(0, [1], policy_version=self.sink.served_version)


async def hold_at(run: RunHarness, step: int) -> None:
    """Bring the run to the rollouts of a step, and hold it there."""
    run.workload.hold_at = step
    run.join_all()
    await run.workload.holding.wait()


def go_on_to(run: RunHarness, step: int) -> None:
    """Let a held run go on, and hold it again at the rollouts of a later step."""
    run.workload.hold_at = step
    run.workload.holding.clear()
    run.workload.release.set()
    run.workload.release.clear()


def traffic(run: RunHarness) -> tuple[str, ...]:
    return run.coordinator.fleet.traffic_ids()


def states(run: RunHarness) -> dict[str, str]:
    return {service.service_id: service.state for service in run.coordinator.backend.services()}


async def test_fleet_gives_a_late_joiner_no_traffic_before_it_has_the_current_version(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}) as run:
        await hold_at(run, 2)
        gate = asyncio.Event()
        run.connector.sink("rollout-1:1").faults["commit"] = [gate]
        run.join("rollout-1")
        await run.connector.sink("rollout-1:1").entered["commit"].wait()
        assert traffic(run) == ("rollout-0", "reward-0")
        assert (states(run)["rollout-0"], states(run)["rollout-1"]) == ("ready", "fenced")
        gate.set()
        await run.until_true(lambda: "rollout-1" in traffic(run))
        assert run.connector.sink("rollout-1:1").served_version == run.coordinator.fleet.policy_version
        run.workload.release.set()
        await run.until(RunState.FINISHED)


async def test_fleet_catches_up_a_server_that_was_started_again(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}) as run:
        await hold_at(run, 2)
        run.connector.sink("rollout-0:1").served_version = 0
        run.join("rollout-0", incarnation="b", policy_version=0)
        assert traffic(run) == ("reward-0",)
        await run.until_true(lambda: "rollout-0" in traffic(run))
        assert run.connector.sink("rollout-0:1").served_version == 1
        run.workload.release.set()
        await run.until(RunState.FINISHED)
    pushes = [(push.policy_version, push.reason) for push in run.coordinator.backend.pushes(10)]
    assert pushes == [(1, "step"), (1, "catch_up"), (2, "step")]


async def test_fleet_admits_a_server_with_the_current_version_at_once(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        await hold_at(run, 1)
        run.join("rollout-1", policy_version=0)
        assert traffic(run) == ("rollout-0", "rollout-1", "reward-0")
        assert run.connector.sink("rollout-1:1").calls == []


async def test_fleet_never_pushes_while_the_actor_updates(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}) as run:
        gate = run.connector.actor.gates["update 2"] = asyncio.Event()
        run.join_all()
        await run.until_true(lambda: "actor update 2" in run.log)
        run.join("rollout-1")
        await run.until_true(lambda: any("catching up" in wait.what for wait in run.coordinator.backend.status().waiting_for))
        assert run.connector.sink("rollout-1:1").calls == []
        gate.set()
        await run.until(RunState.FINISHED)
    assert run.connector.sink("rollout-1:1").served_version == 2


async def test_fleet_fences_a_server_that_missed_the_push_and_trains_on_with_the_other(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 1}) as run:
        run.connector.sink("rollout-1:1").faults["prepare"] = [StateError("no room")] * 100
        run.join("rollout-1")
        run.join_all()
        await run.until(RunState.FINISHED)
        assert traffic(run) == ("rollout-0", "reward-0")
    (push,) = run.coordinator.backend.pushes(1)
    assert "no room" in push.failed_servers["rollout-1"]


async def test_fleet_takes_an_unavailable_server_out_of_traffic_until_it_answers(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        dying = DyingRollout()
        run.connector.rollout = lambda address: dying  # type: ignore[method-assign]
        await hold_at(run, 1)
        server = await run.coordinator.fleet._rollout_pool.pick(1.0)
        with pytest.raises(UnavailableError):
            async for _ in server.client.generate("r", [1], SAMPLING, 1, timeout_s=1.0):
                pass
        assert traffic(run) == ("reward-0",)
        assert server.gone.is_set()
        assert states(run)["rollout-0"] == "silent"
        dying.alive.set()
        await run.until_true(lambda: "rollout-0" in traffic(run))


async def test_fleet_gives_up_when_no_server_can_ever_be_pushed_to(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, coordinator={"ready_timeout_s": 60.0}) as run:
        run.connector.sink("rollout-0:1").faults["prepare"] = [TransportError("no space for shared memory")] * 100
        run.join_all()
        await run.until_true(lambda: run.coordinator.run.progress.step == 1)  # and no further: nothing can roll out
        for member in run.coordinator.fleet.rollouts():
            member.num_failures = 3
            member.failing_since_s = float("-inf")
        await run.until(RunState.FAILED)
        error = str(run.coordinator.run.progress.error)
    assert error.startswith("policy version 1 cannot be pushed to any rollout server: rollout-0:")
    assert "no space for shared memory" in error


async def test_fleet_forgets_a_server_that_left(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        await hold_at(run, 1)
        lease = run.join("rollout-1")
        run.coordinator.registry.deregister("rollout-1", lease)
        assert traffic(run) == ("rollout-0", "reward-0")
        assert [info.service_id for info in run.coordinator.registry.services(ServiceKind.ROLLOUT)] == ["rollout-0"]


async def test_fleet_pauses_between_failed_catch_ups(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, coordinator={"ready_timeout_s": 60.0}) as run:
        sink = run.connector.sink("rollout-0:1")
        sink.faults["prepare"] = [TransportError("no space for shared memory")] * 1000
        run.join_all()
        await run.until_true(lambda: run.coordinator.run.progress.step == 1)
        for _ in range(1000):  # turns of the event loop, in which a loop without a pause would push again and again
            await asyncio.sleep(0)
        assert 990 < len(sink.faults["prepare"]) < 1000


async def test_fleet_catches_up_with_everything_and_sends_changes_afterwards(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 3}) as run:
        run.connector.sink("rollout-1:1").faults["verify"] = [None, StateError("digest differs")]
        run.join("rollout-1")
        await hold_at(run, 3)
        await run.until_true(lambda: "rollout-1" in traffic(run))
        run.workload.release.set()
        await run.until(RunState.FINISHED)
    pushes = [(push.policy_version, push.reason) for push in run.coordinator.backend.pushes(10)]
    assert pushes == [(1, "step"), (2, "step"), (2, "catch_up"), (3, "step")]
    sent = {name: sent_encodings(run, name) for name in ("rollout-0", "rollout-1")}
    assert sent == {"rollout-0": ["DENSE", "DELTA", "DELTA"], "rollout-1": ["DENSE", "DENSE", "DELTA"]}
    last = run.coordinator.backend.pushes(1)[0]
    assert (last.sent_bytes, last.dense_bytes, [server.dense for server in last.server_reports]) == (2, 32, [False, False])


async def test_fleet_sends_everything_every_so_many_pushes(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 7}, push={"dense_every": 3}) as run:
        run.join_all()
        await run.until(RunState.FINISHED)
    assert sent_encodings(run, "rollout-0") == ["DENSE", "DELTA", "DELTA", "DENSE", "DELTA", "DELTA", "DENSE"]
    steps = run.coordinator.backend.steps(0, 10)
    assert [step["push_delta_share"] for step in steps] == [1.0, 0.0625, 0.0625, 1.0, 0.0625, 0.0625, 1.0]
    assert [(step["push_sent_bytes"], step["push_bytes"]) for step in steps[:2]] == [(16, 16), (1, 16)]


def sent_encodings(run: RunHarness, name: str) -> list[str]:
    """How the one bucket of each push went that a server verified."""
    return [encoding.name for encodings in run.connector.sink(f"{name}:1").encodings for encoding in encodings]


async def test_fleet_tells_servers_the_version_that_they_must_have(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}) as run:
        registry = run.coordinator.registry
        assert registry.required_policy_version == 0
        gate = asyncio.Event()
        run.connector.sink("rollout-0:1").faults["commit"] = [None, gate]
        run.join_all()
        await run.until_true(lambda: run.connector.sink("rollout-0:1").calls.count("commit") == 2)
        assert registry.required_policy_version == 1, "2 is not required before it is current"
        gate.set()
        await run.until(RunState.FINISHED)
        assert registry.required_policy_version == 2


@pytest.mark.parametrize("commit", ["barrier", "rolling"])
async def test_fleet_leaves_servers_their_requests_over_a_push(tmp_path: Path, commit: str) -> None:
    async with RunHarness(tmp_path, push={"commit": commit}) as run:
        run.join("rollout-1")
        await hold_at(run, 1)
        pool = run.coordinator.fleet._rollout_pool
        leases = [await pool.pick(1.0), await pool.pick(1.0, ["rollout-0"])]
        gate = asyncio.Event()
        run.connector.sink("rollout-1:1").faults["commit"] = [gate]
        go_on_to(run, 2)
        await run.connector.sink("rollout-1:1").entered["commit"].wait()
        assert run.connector.sink("rollout-0:1").calls.count("commit") == 1
        assert traffic(run) == ("rollout-0", "rollout-1", "reward-0"), "both answer while one commits after the other"
        gate.set()
        await run.workload.holding.wait()
        assert run.coordinator.fleet.policy_version == 1
        assert traffic(run) == ("rollout-0", "rollout-1", "reward-0")
        assert [lease.gone.is_set() for lease in leases] == [False, False]


async def test_fleet_routes_nothing_to_an_old_version_once_the_new_one_is_current(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, push={"commit": "rolling"}) as run:
        run.join("rollout-1")
        await hold_at(run, 1)
        lease = await run.coordinator.fleet._rollout_pool.pick(1.0, ["rollout-0"])
        stuck = asyncio.Event()
        run.connector.sink("rollout-1:1").faults |= {"commit": [StateError("running requests did not finish")], "prepare": [None, stuck]}
        go_on_to(run, 2)
        await run.workload.holding.wait()
        assert run.coordinator.fleet.policy_version == 1
        assert traffic(run) == ("rollout-0", "reward-0")
        assert lease.gone.is_set(), "what it was generating is generated elsewhere"
        assert states(run)["rollout-1"] == "fenced"
        stuck.set()
        await run.until_true(lambda: "rollout-1" in traffic(run))


async def test_fleet_waits_for_min_servers_and_goes_on_with_them(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}, rollout={"servers": 2, "min_servers": 2}) as run:
        gate = asyncio.Event()
        run.connector.sink("rollout-1:1").faults |= {"verify": [StateError("digest differs")], "prepare": [None, gate]}
        await run.until(RunState.WAITING_FOR_SERVICES)  # the first time; below, the second
        run.join("rollout-1")
        run.join_all()
        await run.until(RunState.WAITING_FOR_SERVICES)
        await run.until_true(lambda: run.connector.sink("rollout-1:1").calls.count("prepare") == 2)
        assert (run.coordinator.machine.state, run.coordinator.run.progress.step) == (RunState.WAITING_FOR_SERVICES, 1)
        gate.set()
        await run.until(RunState.FINISHED)
    assert run.connector.sink("rollout-1:1").served_version == 2


async def test_fleet_repairs_a_server_that_serves_another_version_than_was_thought(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}, coordinator={"lease_s": 1.1}) as run:
        await hold_at(run, 2)
        sink, server = run.connector.sink("rollout-0:1"), run.connector.rollout("rollout-0:1")
        assert (server.num_described, traffic(run)) == (0, ("rollout-0", "reward-0"))
        gate = asyncio.Event()
        sink.served_version = 0
        sink.faults["prepare"] = [gate]
        await asyncio.wait_for(server.described.wait(), 10)
        await run.until_true(lambda: states(run)["rollout-0"] == "fenced")
        assert traffic(run) == ("reward-0",)
        gate.set()
        await run.until_true(lambda: "rollout-0" in traffic(run))
        assert sink.served_version == 1
        assert sent_encodings(run, "rollout-0") == ["DENSE", "DENSE"]
        run.workload.release.set()
        await run.until(RunState.FINISHED)


async def test_fleet_suspects_a_server_that_is_older_than_it_was_thought(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}) as run:
        stale = StaleRollout(run.connector.sink("rollout-0:1"))
        run.connector.rollouts["rollout-0:1"] = stale
        await hold_at(run, 2)
        server = await run.coordinator.fleet._rollout_pool.pick(1.0)
        run.connector.sink("rollout-0:1").served_version = 0
        with pytest.raises(StalePolicyError):
            async for _ in server.client.generate("r", [1], SAMPLING, 1, min_policy_version=1, timeout_s=1.0):
                pass
        assert traffic(run) == ("reward-0",)
        await run.until_true(lambda: "rollout-0" in traffic(run))
        assert run.connector.sink("rollout-0:1").served_version == 1
        run.workload.release.set()
        await run.until(RunState.FINISHED)


async def test_fleet_leaves_a_server_out_of_a_running_push_when_its_lease_expires(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 1}) as run:
        lease = run.join("rollout-1")
        run.connector.sink("rollout-1:1").faults["verify"] = [asyncio.Event()]
        closed = run.connector.sink("rollout-1:1").closed
        run.join_all()
        await run.connector.sink("rollout-1:1").entered["verify"].wait()
        run.coordinator.registry.deregister("rollout-1", lease)
        await asyncio.wait_for(closed.wait(), 5)
        await run.until(RunState.FINISHED)
    (push,) = run.coordinator.backend.pushes(10)
    assert push.servers == ["rollout-0"]
    assert push.failed_servers == {"rollout-1": "verify: it left, was started again, or its lease expired"}
    assert push.stages_s["verify"] < 30, "long before the deadline of VERIFY"


async def test_fleet_ends_a_push_at_once_when_its_last_server_is_gone(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}) as run:
        await hold_at(run, 2)
        run.connector.source_end.faults["transfer"] = asyncio.Event()
        run.workload.release.set()
        await run.until_true(lambda: run.connector.source_end.calls.count("transfer") == 2)
        run.coordinator.registry._leases["rollout-0"].expires_s = 0.0
        run.coordinator.registry.expire_due()
        await run.until_true(lambda: run.coordinator.run.progress.step == 2)
    last = run.coordinator.backend.pushes(1)[0]
    assert (last.state, last.policy_version) == ("aborted", 2)


async def test_fleet_publishes_the_version_of_each_server(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}) as run:
        lease = run.join("rollout-9", policy_version=7)
        assert sample_value("shoal_server_policy_version", {"server": "rollout-9"}) == 7
        run.coordinator.registry.deregister("rollout-9", lease)
        assert sample_value("shoal_server_policy_version", {"server": "rollout-9"}) is None
        run.join_all()
        await run.until(RunState.FINISHED)
        assert sample_value("shoal_server_policy_version", {"server": "rollout-0"}) == 2


async def test_fleet_sends_traffic_to_the_successor_of_a_service_and_not_to_its_old_connection(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}) as run:
        await hold_at(run, 2)
        fleet = run.coordinator.fleet
        before = {pool: (await pool.pick(1.0)).client for pool in (fleet._reward_pool, fleet._rollout_pool)}
        run.join("reward-0", incarnation="b")
        run.join("rollout-0", incarnation="b", policy_version=fleet.policy_version)
        await run.until_true(lambda: traffic(run) == ("rollout-0", "reward-0"))
        for pool, old in before.items():
            assert (await pool.pick(1.0)).client is not old
        run.workload.release.set()
        await run.until(RunState.FINISHED)
