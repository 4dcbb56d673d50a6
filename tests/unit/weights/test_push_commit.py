"""The coordinator's push from COMMIT on, against scripted ends; and what becomes of one that is cancelled or loses servers."""

from __future__ import annotations

import asyncio

import pytest
from shoal_coordinator import push as push_module
from shoal_coordinator.push import WeightPush, push
from shoal_coordinator.push_report import PushReport

from shoal.config.models import PushSection
from shoal.errors import DeadlineError, InternalError, StateError, UnavailableError
from shoal.weights.stages import PushStage
from tests.helpers.push_fakes import Fault, ScriptedSink, make_sinks, make_source, never, served_versions

SETTINGS = PushSection(prepare_timeout_s=5, transfer_timeout_s=5, verify_timeout_s=5, commit_timeout_s=5)
SHORT = PushSection(prepare_timeout_s=0.4, transfer_timeout_s=0.2, verify_timeout_s=0.2, commit_timeout_s=0.4)
DOWN = UnavailableError("connection refused")
BEFORE_COMMIT = ["prepare", "plan", "verify"]


@pytest.fixture(autouse=True)
def short_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "ABORT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(push_module, "COURTESY_S", 0.1)


async def test_barrier_commits_side_by_side() -> None:
    sinks, gate = make_sinks(), never()
    sinks["a"].faults["commit"] = [gate]
    running = asyncio.create_task(push(make_source(), sinks, 4, SETTINGS))
    await asyncio.wait_for(sinks["b"].entered["commit"].wait(), 5)
    assert sinks["a"].entered["commit"].is_set()
    gate.set()
    assert (await running).committed_servers == ("a", "b")


async def test_rolling_commits_one_after_another() -> None:
    sinks, gate = make_sinks("a", "b", "c"), never()
    sinks["b"].faults["commit"] = [gate]
    running = asyncio.create_task(push(make_source(), sinks, 4, SETTINGS.model_copy(update={"commit": "rolling"})))
    await asyncio.wait_for(sinks["b"].entered["commit"].wait(), 5)
    await asyncio.sleep(0)
    assert served_versions(sinks) == {"a": 4, "b": 3, "c": 3}
    assert "commit" not in sinks["c"].calls
    gate.set()
    assert (await running).committed_servers == ("a", "b", "c")


@pytest.mark.parametrize("fault", [StateError("requests did not finish in time"), None])
async def test_rolling_goes_on_after_a_server_that_fails(fault: Fault | None) -> None:
    sinks = make_sinks("a", "b", "c")
    sinks["b"].faults["commit"] = [never(), never()] if fault is None else [fault]
    report = await push(make_source(), sinks, 4, SHORT.model_copy(update={"commit": "rolling"}))
    assert report.committed_servers == ("a", "c")
    assert report.failed_servers["b"].startswith("commit: ")
    assert served_versions(sinks) == {"a": 4, "b": 3, "c": 4}


async def test_a_lost_commit_answer_is_asked_again() -> None:
    sinks = make_sinks()
    sinks["a"].lost_answers = 1
    report = await push(make_source(), sinks, 4, SETTINGS.model_copy(update={"commit_timeout_s": 1.0}))
    assert report.committed_servers == ("a", "b")
    first_s, second_s = sinks["a"].commit_timeouts_s
    assert first_s == pytest.approx(0.5, abs=0.05)
    assert 0.1 < second_s <= 0.5
    assert served_versions(sinks) == {"a": 4, "b": 4}


async def test_a_long_commit_keeps_only_seconds_for_asking_again() -> None:
    sinks = make_sinks("a")
    await push(make_source(), sinks, 4, SETTINGS.model_copy(update={"commit_timeout_s": 60.0}))
    assert sinks["a"].commit_timeouts_s == [pytest.approx(55.0, abs=0.5)]


@pytest.mark.parametrize("fault", [DOWN, DeadlineError("late"), InternalError("id 7")])
async def test_a_commit_of_unknown_outcome_is_asked_again(fault: Fault) -> None:
    sinks = make_sinks()
    sinks["a"].faults["commit"] = [fault]
    assert (await push(make_source(), sinks, 4, SETTINGS)).committed_servers == ("a", "b")
    assert sinks["a"].calls.count("commit") == 2


async def test_a_silent_commit_is_reported_within_its_deadline() -> None:
    sinks = make_sinks()
    sinks["a"].lost_answers = 99
    report = await asyncio.wait_for(push(make_source(), sinks, 4, SHORT), 4)
    assert report.state is PushStage.COMMITTED
    assert report.committed_servers == ("b",)
    assert report.failed_servers["a"].startswith("commit: ")
    assert "abort" not in sinks["a"].calls


async def test_a_refused_commit_is_not_asked_again() -> None:
    sinks = make_sinks()
    sinks["a"].faults["commit"] = [StateError("not verified")]
    report = await push(make_source(), sinks, 4, SETTINGS)
    assert report.failed_servers == {"a": "commit: StateError: not verified"}
    assert sinks["a"].calls.count("commit") == 1


async def test_no_confirmed_commit_is_a_failed_push() -> None:
    sinks = make_sinks()
    for sink in sinks.values():
        sink.faults["commit"] = [StateError("not verified")]
    report = await push(make_source(), sinks, 4, SETTINGS)
    assert report.state is PushStage.FAILED
    assert "no server confirmed" in str(report.error)
    assert set(report.failed_servers) == {"a", "b"}


async def test_a_second_push_of_a_served_version_commits_again() -> None:
    source, sinks = make_source(), make_sinks()
    first, second = await push(source, sinks, 4, SETTINGS), await push(source, sinks, 4, SETTINGS)
    assert first.committed_servers == second.committed_servers == ("a", "b")
    assert served_versions(sinks) == {"a": 4, "b": 4}


@pytest.mark.parametrize("stage", BEFORE_COMMIT)
async def test_cancelling_before_commit_aborts(stage: str) -> None:
    source, sinks = make_source(), make_sinks()
    sinks["b"].faults[stage] = [never()]
    running = WeightPush(source, sinks, 4, SETTINGS)
    await cancel_at(running, sinks["b"].entered[stage])
    check_aborted(running, sinks)


@pytest.mark.parametrize("stage", ["describe", "prepare", "transfer"])
async def test_cancelling_while_the_source_works_aborts(stage: str) -> None:
    source, sinks = make_source(), make_sinks()
    source.faults[stage] = never()
    running = WeightPush(source, sinks, 4, SETTINGS)
    await cancel_at(running, source.entered[stage])
    check_aborted(running, sinks)
    assert source.calls[-1] == "abort"


def check_aborted(running: WeightPush, sinks: dict[str, ScriptedSink]) -> None:
    assert running.report().state is PushStage.ABORTED
    assert running.report().error == "cancelled"
    assert served_versions(sinks) == {"a": 3, "b": 3}
    assert all(sink.staged_push is None for sink in sinks.values())


async def test_cancelling_in_transfer_aborts_even_if_cancelled_again() -> None:
    source, sinks = make_source(), make_sinks()
    source.faults["transfer"] = never()
    gate = never()
    sinks["b"].faults["abort"] = [gate]
    running = WeightPush(source, sinks, 4, SETTINGS)
    task = asyncio.create_task(running.run())
    await asyncio.wait_for(source.entered["transfer"].wait(), 5)
    task.cancel()
    await asyncio.wait_for(sinks["b"].entered["abort"].wait(), 5)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    check_aborted(running, sinks)


@pytest.mark.parametrize("commit", ["barrier", "rolling"])
async def test_cancelling_in_commit_finishes_the_commit(commit: str) -> None:
    sinks, gate = make_sinks(), never()
    sinks["a"].faults["commit"] = [gate]
    running = WeightPush(make_source(), sinks, 4, SETTINGS.model_copy(update={"commit": commit}))
    task = asyncio.create_task(running.run())
    await asyncio.wait_for(sinks["a"].entered["commit"].wait(), 5)
    task.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running.report().committed_servers == ("a", "b")
    assert running.report().state is PushStage.COMMITTED


async def test_a_server_that_is_known_to_be_gone_does_not_hold_up_a_transfer() -> None:
    source, sinks = make_source(), make_sinks("a")
    source.faults["transfer"] = never()
    running = WeightPush(source, sinks, 4, SETTINGS)
    task = asyncio.create_task(running.run())
    await asyncio.wait_for(source.entered["transfer"].wait(), 5)
    running.leave_out("a", "its lease expired")
    report = await asyncio.wait_for(task, 2)
    assert report.state is PushStage.ABORTED
    assert report.failed_servers == {"a": "transfer: its lease expired"}


async def test_a_server_that_is_gone_is_left_out_while_the_others_go_on() -> None:
    sinks, gate = make_sinks(), never()
    sinks["b"].faults["verify"] = [gate]
    running = WeightPush(make_source(), sinks, 4, SETTINGS)
    task = asyncio.create_task(running.run())
    await asyncio.wait_for(sinks["b"].entered["verify"].wait(), 5)
    running.leave_out("a", "its lease expired")
    gate.set()
    report = await task
    assert report.committed_servers == ("b",)
    assert report.failed_servers == {"a": "verify: its lease expired"}
    assert served_versions(sinks) == {"a": 3, "b": 4}


async def test_a_fault_of_the_program_aborts_and_is_raised() -> None:
    source, sinks = make_source(), make_sinks()
    source.faults["transfer"] = ZeroDivisionError("bug")
    running = WeightPush(source, sinks, 4, SETTINGS)
    with pytest.raises(ZeroDivisionError):
        await running.run()
    assert running.report().state is PushStage.ABORTED
    assert all(sink.calls[-1] == "abort" for sink in sinks.values())


async def cancel_at(running: WeightPush, moment: asyncio.Event) -> None:
    task: asyncio.Task[PushReport] = asyncio.create_task(running.run())
    await asyncio.wait_for(moment.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
