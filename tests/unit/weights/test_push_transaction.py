"""The coordinator's push against scripted ends: every stage failing, stalling, cancelled; one complete version everywhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from shoal_coordinator import push as push_module
from shoal_coordinator.push import PushReport, WeightPush, push

from shoal.config.models import PushSection
from shoal.errors import DeadlineError, InternalError, InvalidRequestError, StateError, TransportError, UnavailableError
from shoal.weights.stages import PushStage
from tests.helpers.layouts import decoder_shapes, decoder_sink, fsdp_shards
from tests.helpers.push_fakes import Fault, ScriptedSink, ScriptedSource, served_versions

DEADLINES = PushSection(prepare_timeout_s=5, transfer_timeout_s=5, verify_timeout_s=5, commit_timeout_s=5)
SHORT = PushSection(prepare_timeout_s=0.2, transfer_timeout_s=0.2, verify_timeout_s=0.2, commit_timeout_s=0.4)
DOWN = UnavailableError("connection refused")


@pytest.fixture(autouse=True)
def short_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "ABORT_TIMEOUT_S", 0.2)


def make_source() -> ScriptedSource:
    return ScriptedSource(fsdp_shards(decoder_shapes(tied=False), 2), policy_version=4)


def make_sinks(*names: str) -> dict[str, ScriptedSink]:
    return {name: ScriptedSink(decoder_sink(name, 2), served_version=3) for name in names or ("a", "b")}


def never() -> asyncio.Event:
    return asyncio.Event()


async def test_push_commits_everywhere_and_reports() -> None:
    source, sinks = make_source(), make_sinks()
    report = await push(source, sinks, 4, DEADLINES, push_id="p1")
    assert report.state is PushStage.COMMITTED
    assert (report.push_id, report.policy_version, report.error, report.failed_servers) == ("p1", 4, None, {})
    assert report.committed_servers == ("a", "b")
    assert report.pause_ms == {"a": 3.0, "b": 3.0}
    assert set(report.stages_s) == {"prepare", "transfer", "verify", "commit"}
    assert report.num_bytes > 0
    assert served_versions(sinks) == {"a": 4, "b": 4}
    assert source.calls == ["describe", "prepare", "transfer"]
    assert all(sink.calls == ["prepare", "verify", "commit"] for sink in sinks.values())


async def test_push_catches_up_a_single_late_joiner() -> None:
    sinks = make_sinks("late")
    assert (await push(make_source(), sinks, 4, DEADLINES)).committed_servers == ("late",)


async def test_push_ids_differ_between_pushes_of_one_version() -> None:
    assert WeightPush(make_source(), make_sinks(), 4, DEADLINES).push_id != WeightPush(make_source(), make_sinks(), 4, DEADLINES).push_id


async def test_push_commits_only_after_every_verify() -> None:
    sinks, gate = make_sinks(), never()
    sinks["b"].faults["verify"] = [gate]
    running = asyncio.create_task(push(make_source(), sinks, 4, DEADLINES))
    await asyncio.wait_for(sinks["b"].entered["verify"].wait(), 5)
    await asyncio.sleep(0)
    assert "commit" not in sinks["a"].calls
    gate.set()
    assert (await running).committed_servers == ("a", "b")


@pytest.mark.parametrize("stage", ["prepare", "verify"])
@pytest.mark.parametrize("fault", [DOWN, TransportError("digest of q differs"), None])
async def test_a_sink_that_fails_before_commit_is_left_out(stage: str, fault: Fault | None) -> None:
    sinks = make_sinks()
    sinks["a"].faults[stage] = [never() if fault is None else fault]
    report = await push(make_source(), sinks, 4, SHORT)
    assert report.state is PushStage.COMMITTED
    assert report.committed_servers == ("b",)
    assert report.failed_servers["a"].startswith(f"{stage}: ")
    assert ("no answer within 0.2 s" if fault is None else str(fault)) in report.failed_servers["a"]
    assert served_versions(sinks) == {"a": 3, "b": 4}
    assert sinks["a"].calls[-1] == "abort"


@pytest.mark.parametrize("stage", ["prepare", "verify"])
@pytest.mark.parametrize("fault", [DOWN, None])
async def test_a_push_without_sinks_left_aborts(stage: str, fault: Fault | None) -> None:
    source, sinks = make_source(), make_sinks()
    for sink in sinks.values():
        sink.faults[stage] = [never() if fault is None else fault]
    report = await push(source, sinks, 4, SHORT)
    assert report.state is PushStage.ABORTED
    assert set(report.failed_servers) == {"a", "b"}
    assert "no server is left" in str(report.error)
    assert served_versions(sinks) == {"a": 3, "b": 3}
    assert source.calls[-1] == "abort"


@pytest.mark.parametrize("stage", ["describe", "prepare", "transfer"])
@pytest.mark.parametrize("fault", [DOWN, InternalError("rank 1 died"), None])
async def test_a_source_that_fails_aborts_everywhere(stage: str, fault: Fault | None) -> None:
    source, sinks = make_source(), make_sinks()
    source.faults[stage] = never() if fault is None else fault
    report = await push(source, sinks, 4, SHORT)
    assert report.state is PushStage.ABORTED
    assert report.failed_servers == {}
    assert ("no answer within" if fault is None else str(fault)) in str(report.error)
    assert served_versions(sinks) == {"a": 3, "b": 3}
    assert all(sink.calls[-1] == "abort" and "commit" not in sink.calls for sink in sinks.values())
    assert source.calls[-1] == "abort"


async def test_a_slow_stage_has_its_own_deadline() -> None:
    source = make_source()
    source.faults["transfer"] = never()
    deadlines = DEADLINES.model_copy(update={"transfer_timeout_s": 0.1})
    report = await asyncio.wait_for(push(source, make_sinks(), 4, deadlines), 4)
    assert "no answer within 0.1 s" in str(report.error)


async def test_an_abort_that_is_not_answered_is_reported_and_bounded() -> None:
    source, sinks = make_source(), make_sinks()
    source.faults["transfer"] = DOWN
    sinks["b"].faults["abort"] = [never()]
    report = await asyncio.wait_for(push(source, sinks, 4, DEADLINES), 4)
    assert report.state is PushStage.ABORTED
    assert set(report.failed_servers) == {"b"}
    assert report.failed_servers["b"].startswith("abort: ")


async def test_a_source_of_another_version_aborts() -> None:
    sinks = make_sinks()
    report = await push(make_source(), sinks, 5, DEADLINES)
    assert report.state is PushStage.ABORTED
    assert "the trainer holds policy version 4; version 5 cannot be pushed" in str(report.error)
    assert served_versions(sinks) == {"a": 3, "b": 3}


async def test_plans_that_differ_abort() -> None:
    source, sinks = make_source(), make_sinks()
    source.other_plan = True
    report = await push(source, sinks, 4, DEADLINES)
    assert report.state is PushStage.ABORTED
    assert "planned 000000000000" in str(report.error)
    assert "transfer" not in source.calls


async def test_a_sink_whose_layout_cannot_be_planned_is_left_out() -> None:
    sinks = make_sinks()
    worker = sinks["a"].layout.workers[0]
    sinks["a"].layout = replace(sinks["a"].layout, workers=(replace(worker, regions=worker.regions[1:]), sinks["a"].layout.workers[1]))
    report = await push(make_source(), sinks, 4, DEADLINES)
    assert report.committed_servers == ("b",)
    assert worker.regions[0].parameter in report.failed_servers["a"]


async def test_a_sink_that_answers_as_another_server_is_left_out() -> None:
    sinks = make_sinks()
    sinks["a"].layout = sinks["b"].layout
    report = await push(make_source(), sinks, 4, DEADLINES)
    assert report.committed_servers == ("b",)
    assert "answers as server 'b'" in report.failed_servers["a"]


@pytest.mark.parametrize("kind", ["unreachable", "forgotten"])
async def test_a_sink_without_every_digest_is_left_out(kind: str) -> None:
    source, sinks = make_source(), make_sinks()
    getattr(source, kind).add("a")
    report = await push(source, sinks, 4, DEADLINES)
    assert report.committed_servers == ("b",)
    assert report.failed_servers["a"].startswith("transfer: ")
    assert "verify" not in sinks["a"].calls
    assert served_versions(sinks) == {"a": 3, "b": 4}


async def test_a_push_that_reached_no_staging_ends_before_verify() -> None:
    source, sinks = make_source(), make_sinks()
    source.unreachable = {"a", "b"}
    report = await push(source, sinks, 4, DEADLINES)
    assert report.state is PushStage.ABORTED
    assert "verify" not in report.stages_s
    assert set(report.failed_servers) == {"a", "b"}


async def test_a_lost_commit_answer_is_asked_again() -> None:
    sinks = make_sinks()
    sinks["a"].lost_answers = 1
    report = await push(make_source(), sinks, 4, DEADLINES.model_copy(update={"commit_timeout_s": 1.0}))
    assert report.committed_servers == ("a", "b")
    first_s, second_s = sinks["a"].commit_timeouts_s
    assert first_s == pytest.approx(0.5, abs=0.05)
    assert 0.1 < second_s <= 0.5
    assert served_versions(sinks) == {"a": 4, "b": 4}


@pytest.mark.parametrize("fault", [DOWN, DeadlineError("late"), InternalError("id 7")])
async def test_a_commit_of_unknown_outcome_is_asked_again(fault: Fault) -> None:
    sinks = make_sinks()
    sinks["a"].faults["commit"] = [fault]
    assert (await push(make_source(), sinks, 4, DEADLINES)).committed_servers == ("a", "b")
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
    report = await push(make_source(), sinks, 4, DEADLINES)
    assert report.failed_servers == {"a": "commit: StateError: not verified"}
    assert sinks["a"].calls.count("commit") == 1


async def test_no_confirmed_commit_is_a_failed_push() -> None:
    sinks = make_sinks()
    for sink in sinks.values():
        sink.faults["commit"] = [StateError("not verified")]
    report = await push(make_source(), sinks, 4, DEADLINES)
    assert report.state is PushStage.FAILED
    assert "no server confirmed" in str(report.error)
    assert set(report.failed_servers) == {"a", "b"}


async def test_a_second_push_of_a_served_version_commits_again() -> None:
    source, sinks = make_source(), make_sinks()
    first, second = await push(source, sinks, 4, DEADLINES), await push(source, sinks, 4, DEADLINES)
    assert first.committed_servers == second.committed_servers == ("a", "b")
    assert served_versions(sinks) == {"a": 4, "b": 4}


@pytest.mark.parametrize("stage", ["prepare", "verify"])
async def test_cancelling_before_commit_aborts(stage: str) -> None:
    source, sinks = make_source(), make_sinks()
    sinks["b"].faults[stage] = [never()]
    running = WeightPush(source, sinks, 4, DEADLINES)
    await cancel_at(running, sinks["b"].entered[stage])
    assert running.report().state is PushStage.ABORTED
    assert running.report().error == "cancelled"
    assert served_versions(sinks) == {"a": 3, "b": 3}
    assert all(sink.staged_push is None for sink in sinks.values())


async def test_cancelling_in_transfer_aborts_even_if_cancelled_again() -> None:
    source, sinks = make_source(), make_sinks()
    source.faults["transfer"] = never()
    gate = never()
    sinks["b"].faults["abort"] = [gate]
    running = WeightPush(source, sinks, 4, DEADLINES)
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
    assert running.report().state is PushStage.ABORTED
    assert all(sink.staged_push is None for sink in sinks.values())


async def test_cancelling_in_commit_finishes_the_commit() -> None:
    sinks, gate = make_sinks(), never()
    sinks["b"].faults["commit"] = [gate]
    running = WeightPush(make_source(), sinks, 4, DEADLINES)
    task = asyncio.create_task(running.run())
    await asyncio.wait_for(sinks["b"].entered["commit"].wait(), 5)
    task.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running.report().committed_servers == ("a", "b")
    assert running.report().state is PushStage.COMMITTED


async def test_a_fault_of_the_program_aborts_and_is_raised() -> None:
    source, sinks = make_source(), make_sinks()
    source.faults["transfer"] = ZeroDivisionError("bug")
    running = WeightPush(source, sinks, 4, DEADLINES)
    with pytest.raises(ZeroDivisionError):
        await running.run()
    assert running.report().state is PushStage.ABORTED
    assert all(sink.calls[-1] == "abort" for sink in sinks.values())


async def test_a_push_without_sinks_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one rollout server"):
        await push(make_source(), {}, 4, DEADLINES)


async def cancel_at(running: WeightPush, moment: asyncio.Event) -> None:
    task: asyncio.Task[PushReport] = asyncio.create_task(running.run())
    await asyncio.wait_for(moment.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
