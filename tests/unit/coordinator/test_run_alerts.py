"""Runs that pause by themselves, with an alert, in the midst of a step or an evaluation."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from shoal_coordinator.alerts import RunAlert
from shoal_coordinator.rest_models import Command
from shoal_coordinator.states import RunState

from shoal.telemetry.metrics import sample_value
from tests.helpers.run_fakes import RunHarness

S = RunState
ALERT = RunAlert(what="3 of 4 samples have no score", service="sum@1 on reward-0", error="sum@1: broken", since_unix_s=7.0)


def pause_in(run: RunHarness, name: str, when: Callable[[int], bool] = lambda number: number == 1) -> None:
    """Pause in calls of the workload's `collect` or `evaluate`, counted from 1."""
    original: Callable[[int], Awaitable[Any]] = getattr(run.workload, name)
    number = 0

    async def pausing(policy_version: int) -> Any:  # noqa: ANN401 - as the original
        nonlocal number
        number += 1
        if when(number):
            await run.coordinator.run._parts.control.wait_for_resume(ALERT)
        return await original(policy_version)

    setattr(run.workload, name, pausing)


def gauge() -> float | None:
    return sample_value("shoal_coordinator_alert")


async def test_step_pauses_with_an_alert_and_goes_on_when_resumed(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 1}) as run:
        pause_in(run, "collect")
        run.join_all()
        await run.until(S.PAUSED)
        status = run.coordinator.backend.status()
        assert status.alert is not None
        assert status.alert.model_dump() == {"what": ALERT.what, "service": ALERT.service, "error": ALERT.error, "since_unix_s": 7.0}
        assert (status.state, status.pause_requested, gauge()) == ("paused", True, 1.0)
        run.coordinator.backend.command(Command.RESUME)
        await run.until(S.FINISHED)
        assert run.coordinator.backend.status().alert is None
    assert run.states == [
        S.WAITING_FOR_SERVICES,
        S.ROLLING_OUT,
        S.PAUSED,
        S.ROLLING_OUT,
        S.TRAINING,
        S.PUSHING,
        S.FINISHING,
        S.FINISHED,
    ]
    assert gauge() == 0.0


async def test_evaluation_pauses_with_an_alert_and_goes_on_when_resumed(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, held_out=True, run={"steps": 1}) as run:
        pause_in(run, "evaluate")
        run.join_all()
        await run.until(S.PAUSED)
        run.coordinator.backend.command(Command.RESUME)
        await run.until(S.FINISHED)
    assert run.states[:5] == [S.WAITING_FOR_SERVICES, S.EVALUATING, S.PAUSED, S.EVALUATING, S.ROLLING_OUT]


@pytest.mark.parametrize("name", ["collect", "evaluate"])
async def test_stop_in_the_pause_exports_without_a_final_evaluation(tmp_path: Path, name: str) -> None:
    async with RunHarness(tmp_path, held_out=True) as run:
        pause_in(run, name, lambda number: number == 2 or name == "collect")
        run.join_all()
        await run.until(S.PAUSED)
        run.coordinator.backend.command(Command.STOP)
        await run.until(S.STOPPED)
        assert run.coordinator.backend.status().alert is None
    assert run.states[-3:] == [S.PAUSED, S.FINISHING, S.STOPPED]
    assert run.log[-1] == "actor export"
    assert len([entry for entry in run.log if entry.startswith("evaluate")]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["state"], report["error"]) == ("stopped", None)


async def test_run_that_is_to_stop_does_not_wait_for_anybody(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        pause_in(run, "collect")
        run.workload.hold_at = 1
        run.coordinator.machine.subscribe(
            lambda _, new: run.coordinator.backend.command(Command.STOP) if new is S.ROLLING_OUT and not run.log else None
        )
        run.join_all()
        await run.until(S.STOPPED)
    assert run.states[-3:] == [S.PAUSED, S.FINISHING, S.STOPPED]


async def test_termination_in_the_pause_ends_the_run_stopped_with_a_report(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        pause_in(run, "collect")
        run.join_all()
        await run.until(S.PAUSED)
        run.cancel_run()
        await run.until(S.STOPPED)
    assert json.loads((tmp_path / "report.json").read_text())["state"] == "stopped"
    assert gauge() == 0.0


async def test_user_may_ask_for_a_pause_as_well(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 1}) as run:
        pause_in(run, "collect")
        run.join_all()
        await run.until(S.PAUSED)
        run.coordinator.backend.command(Command.PAUSE)
        run.coordinator.backend.command(Command.RESUME)
        await run.until(S.FINISHED)
    assert run.states.count(S.PAUSED) == 1


async def test_run_pauses_as_often_as_it_must(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}) as run:
        pause_in(run, "collect", lambda number: True)
        run.join_all()
        for _ in range(2):
            await run.until(S.PAUSED)
            run.coordinator.backend.command(Command.RESUME)
        await run.until(S.FINISHED)
    assert run.coordinator.run.progress.step == 2


async def test_run_that_has_lost_its_reward_servers_goes_on_to_the_step_that_will_pause(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}, coordinator={"ready_timeout_s": 0.3}) as run:
        run.workload.hold_at = 1
        run.join_all()
        await run.workload.holding.wait()
        registry = run.coordinator.registry
        (lease,) = [lease for lease in registry.leases() if lease.info.service_id == "reward-0"]
        registry.deregister("reward-0", lease.lease_id)
        run.workload.release.set()
        await run.until(S.FINISHED)
    # The fake workload needs no scores.
    assert run.states.count(S.WAITING_FOR_SERVICES) == 2
    assert run.states.count(S.ROLLING_OUT) == 2
