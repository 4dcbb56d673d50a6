"""Fencing, catching up and suspecting servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest
from shoal_coordinator.states import RunState

from shoal.errors import StateError, TransportError, UnavailableError
from shoal.types import Completion, SamplingParams, ServiceKind
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


async def hold_at(run: RunHarness, step: int) -> None:
    """Bring the run to the rollouts of a step, and hold it there."""
    run.workload.hold_at = step
    run.join_all()
    await run.workload.holding.wait()


def traffic(run: RunHarness) -> tuple[str, ...]:
    return run.coordinator.fleet.traffic_ids()


async def test_fleet_gives_a_late_joiner_no_traffic_before_it_has_the_current_version(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}) as run:
        await hold_at(run, 2)
        gate = asyncio.Event()
        run.connector.sink("rollout-1:1").faults["commit"] = [gate]
        run.join("rollout-1")
        await run.connector.sink("rollout-1:1").entered["commit"].wait()
        assert traffic(run) == ("rollout-0", "reward-0")
        states = {service.service_id: service.state for service in run.coordinator.backend.services()}
        assert (states["rollout-0"], states["rollout-1"]) == ("ready", "fenced")
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
        states = {service.service_id: service.state for service in run.coordinator.backend.services()}
        assert states["rollout-0"] == "silent"
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
