"""The whole loop over scripted gangs and servers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from shoal_coordinator.rest_models import Command
from shoal_coordinator.states import RunState

from shoal.errors import InternalError, StateError, TransportError
from tests.helpers.run_fakes import RunHarness

S = RunState


def read_report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


async def test_run_trains_evaluates_exports_and_reports(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, held_out=True, run={"steps": 2}) as run:
        run.join_all()
        await run.until(S.FINISHED)
    step = [S.ROLLING_OUT, S.TRAINING, S.PUSHING]
    assert run.states == [S.WAITING_FOR_SERVICES, S.EVALUATING, *step, *step, S.EVALUATING, S.FINISHING, S.FINISHED]
    report = read_report(tmp_path)
    assert (report["state"], report["steps"], report["samples"], report["tokens"]) == ("finished", 2, 8, 40)
    assert (report["accuracy_before"], report["accuracy_after"]) == (0.0, 0.2)
    assert report["export_folder"] == str(tmp_path / "export")
    assert {key: report["pushes"][key] for key in ("num_pushes", "num_committed", "sent_bytes", "dense_bytes", "max_pause_ms")} == {
        "num_pushes": 2,
        "num_committed": 2,
        "sent_bytes": 17,
        "dense_bytes": 32,
        "max_pause_ms": 3.0,
    }
    assert run.log[-1] == "actor export"


async def test_run_trains_every_step_on_the_version_of_the_last_push(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        run.join_all()
        await run.until(S.FINISHED)
        assert run.coordinator.fleet.policy_version == 3
    assert [entry for entry in run.log if entry.startswith("collect")] == [f"collect {step} at version {step - 1}" for step in (1, 2, 3)]
    assert run.connector.sinks["rollout-0:1"].served_version == 3
    assert run.connector.sinks["rollout-0:1"].calls.count("commit") == 3
    assert run.workload.queue.acked == [f"s{step}-g{index}" for step in (1, 2, 3) for index in (0, 1)]


async def test_run_keeps_the_order_of_a_step(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 1}) as run:
        run.join_all()
        await run.until(S.FINISHED)
    position = {entry: index for index, entry in enumerate(run.log)}
    forwards = {position["actor forward 1"], position["critic forward 1"]}
    assert position["collect 1 at version 0"] < min(forwards)
    assert max(forwards) < position["actor advantages 1"] < min(position["actor update 1"], position["critic update 1"])


async def test_run_pushes_while_the_critic_still_updates_and_acknowledges_after_it(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 1}) as run:
        gate = run.connector.critic.gates["update 1"] = asyncio.Event()
        run.join_all()
        await run.until_true(lambda: run.connector.sinks and run.connector.sinks["rollout-0:1"].served_version == 1)
        assert run.coordinator.machine.state is S.PUSHING
        assert run.workload.queue.acked == []
        gate.set()
        await run.until(S.FINISHED)
    assert len(run.workload.queue.acked) == 2


async def test_run_with_grpo_needs_no_critic(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, estimator="grpo", run={"steps": 2}) as run:
        for service_id in ("rollout-0", "reward-0", "actor"):
            run.join(service_id)
        await run.until(S.FINISHED)
    assert not [entry for entry in run.log if entry.startswith("critic")]


async def test_run_of_no_steps_ends_by_itself(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, held_out=True, run={"steps": 0}) as run:
        run.join_all()
        await run.until(S.FINISHED)
    assert run.log == ["evaluate version 0", "actor export"]
    assert (tmp_path / "metrics.jsonl").read_text() == ""


async def test_run_evaluates_every_so_many_steps(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, held_out=True, run={"steps": 4}, evaluation={"every": 2}) as run:
        run.join_all()
        await run.until(S.FINISHED)
    assert [entry for entry in run.log if entry.startswith("evaluate")] == [f"evaluate version {version}" for version in (0, 2, 4)]


async def test_run_writes_the_agreed_metrics(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 1}) as run:
        run.join_all()
        await run.until(S.FINISHED)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert (metrics["step"], metrics["policy_version"], metrics["rollout_policy_version"]) == (1, 1, 0)
    assert (metrics["reward"], metrics["reward_std"], metrics["response_length"]) == (0.5, 0.5, 3.0)
    assert (metrics["kl"], metrics["actor_loss"], metrics["critic_loss"], metrics["critic_value_mean"]) == (0.1, 0.5, 0.5, 0.5)
    assert (metrics["num_tokens"], metrics["push_pause_ms"], metrics["actor_update_applied"]) == (20, 3.0, 1.0)
    assert (metrics["push_bytes"], metrics["push_sent_bytes"], metrics["push_delta_share"], metrics["num_aborted"]) == (16, 16, 1.0, 0.0)
    for stage in ("rollout_s", "reward_s", "queue_s", "forward_s", "advantages_s", "update_s", "push_s", "step_s", "control_s"):
        assert metrics[stage] >= 0.0
    assert metrics["control_s"] <= metrics["step_s"]


@pytest.mark.parametrize(
    ("gang", "command"),
    [("actor", "forward 2"), ("critic", "forward 2"), ("actor", "advantages 2"), ("actor", "update 2"), ("critic", "update 2")],
)
async def test_run_fails_with_the_name_of_a_failing_gang(tmp_path: Path, gang: str, command: str) -> None:
    async with RunHarness(tmp_path) as run:
        getattr(run.connector, gang).fail[command] = InternalError("out of memory")
        run.join_all()
        await run.until(S.FAILED)
        error = run.coordinator.run.progress.error
    assert error is not None
    assert error.startswith(f"the {gang} gang {gang!r} at {gang}:1 failed its")
    assert "out of memory; look at its log" in error
    report = read_report(tmp_path)
    assert (report["state"], report["error"], report["steps"]) == ("failed", error, 1)


async def test_run_does_not_acknowledge_what_a_failing_gang_did_not_commit(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        run.connector.critic.fail["update 2"] = InternalError("nan")
        run.join_all()
        await run.until(S.FAILED)
    assert run.workload.queue.acked == ["s1-g0", "s1-g1"]


async def test_run_fails_when_a_gangs_lease_expires(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        run.connector.critic.gates["update 1"] = asyncio.Event()
        run.join_all()
        await run.until(S.PUSHING)
        run.coordinator.registry._now_s = lambda: float("inf")
        run.coordinator.registry.expire_due()
        await run.until(S.FAILED)
        error = run.coordinator.run.progress.error
    assert error is not None
    assert (
        "gang 'actor' at actor:1 is gone (its lease expired)" in error or "gang 'critic' at critic:1 is gone (its lease expired)" in error
    )
    assert "start the run again" in error


async def test_run_fails_when_a_gang_is_started_again(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        run.workload.hold_at = 1
        run.join_all()
        await run.workload.holding.wait()
        run.join("critic", incarnation="b")
        await run.until(S.FAILED)
        error = run.coordinator.run.progress.error
    assert error is not None
    assert "the critic gang 'critic' at critic:1 is gone (it was started again)" in error


async def test_run_names_missing_services_when_they_do_not_come(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, coordinator={"ready_timeout_s": 0.2}) as run:
        run.join("rollout-0")
        run.join("actor")
        await run.until(S.FAILED)
        error = run.coordinator.run.progress.error
    assert error is not None
    assert "1 of 1 reward services (none registered since" in error
    assert "1 of 1 critic services" in error
    assert "rollout services" not in error


async def test_run_says_for_whom_it_waits(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        run.join("actor")
        await run.until_true(lambda: run.coordinator.backend.status().waiting_for)
        (wait,) = run.coordinator.backend.status().waiting_for
        assert wait.what == "services to be ready, so far: reward (0 of 1), rollout (0 of 1), critic (0 of 1)"
        gate = run.connector.critic.gates["update 1"] = asyncio.Event()
        run.join_all()
        await run.until_true(lambda: run.workload.queue.groups and run.connector.sinks["rollout-0:1"].served_version == 1)
        waits = {(tuple(wait.waits_for), wait.what) for wait in run.coordinator.backend.status().waiting_for}
        assert (("critic",), "update of step 1") in waits
        gate.set()
        await run.until(S.FINISHED)
        assert run.coordinator.backend.status().waiting_for == []


async def test_run_pauses_at_the_step_border_and_goes_on(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        run.workload.hold_at = 1
        run.join_all()
        await run.workload.holding.wait()
        run.coordinator.backend.command(Command.PAUSE)
        assert run.coordinator.machine.state is S.ROLLING_OUT
        run.workload.release.set()
        await run.until(S.PAUSED)
        status = run.coordinator.backend.status()
        assert (status.step, status.pause_requested, status.waiting_for[0].waits_for) == (1, True, ["user"])
        run.coordinator.backend.command(Command.RESUME)
        await run.until(S.FINISHED)
    assert run.coordinator.run.progress.step == 3


async def test_run_stops_after_the_current_step_with_evaluation_and_export(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, held_out=True) as run:
        run.workload.hold_at = 1
        run.join_all()
        await run.workload.holding.wait()
        run.coordinator.backend.command(Command.STOP)
        run.workload.release.set()
        await run.until(S.STOPPED)
    assert run.log[-2:] == ["evaluate version 1", "actor export"]
    assert (read_report(tmp_path)["state"], read_report(tmp_path)["steps"]) == ("stopped", 1)


async def test_run_stops_while_paused(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        run.coordinator.backend.command(Command.PAUSE)
        run.join_all()
        await run.until(S.PAUSED)
        run.coordinator.backend.command(Command.STOP)
        await run.until(S.STOPPED)
    assert run.coordinator.run.progress.step == 0


async def test_run_stops_while_services_are_missing(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        await run.until(S.WAITING_FOR_SERVICES)
        run.coordinator.backend.command(Command.STOP)
        await run.until(S.STOPPED)
    assert run.log == []


async def test_run_refuses_commands_that_cannot_take_effect(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 1}) as run:
        with pytest.raises(StateError, match="cannot resume a run that is not paused"):
            run.coordinator.backend.command(Command.RESUME)
        run.join_all()
        await run.until(S.FINISHED)
        for command in Command:
            with pytest.raises(StateError, match=f"cannot {command} a run that is finished"):
                run.coordinator.backend.command(command)


async def test_run_ends_after_the_step_that_crosses_the_wall_limit(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 1000, "max_wall_s": 0.05}) as run:
        run.join_all()
        await asyncio.sleep(0.06)
        await run.until(S.FINISHED)
    assert run.coordinator.run.progress.step < 1000


async def test_run_is_stopped_by_cancellation_and_still_reports(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        run.workload.hold_at = 1
        run.join_all()
        await run.workload.holding.wait()
        run.cancel_run()
        await run.until(S.STOPPED)
    assert read_report(tmp_path)["state"] == "stopped"


async def test_run_does_not_push_an_update_that_was_not_applied(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 1}) as run:
        run.connector.actor.applies = False
        run.join_all()
        await run.until(S.FINISHED)
    assert run.connector.source_end.calls == []
    assert run.coordinator.run.progress.step == 1


async def test_run_refuses_gangs_at_different_steps(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        run.connector.actor.step = 4
        run.join_all()
        await run.until(S.FAILED)
        assert "committed different steps" in str(run.coordinator.run.progress.error)


async def test_run_survives_a_fault_of_its_own_with_the_state_failed(tmp_path: Path) -> None:
    async with RunHarness(tmp_path) as run:
        run.workload.queue.depth = None  # type: ignore[assignment, method-assign]
        run.join_all()
        await run.until(S.FAILED)
        assert "its log has the traceback" in str(run.coordinator.run.progress.error)


async def test_run_goes_on_after_a_push_that_failed_once(tmp_path: Path) -> None:
    async with RunHarness(tmp_path, run={"steps": 2}) as run:
        run.join_all()
        run.connector.sinks["rollout-0:1"].faults["verify"] = [TransportError("digest differs")]
        await run.until(S.FINISHED)
    pushes = run.coordinator.backend.pushes(10)
    assert [(push.policy_version, push.reason, push.state) for push in pushes] == [
        (1, "step", "aborted"),
        (1, "catch_up", "committed"),
        (2, "step", "committed"),
    ]
    assert "digest differs" in pushes[0].failed_servers["rollout-0"]
