"""The coordinator's push against scripted ends: every stage failing, stalling, cancelled; one complete version everywhere."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from shoal_coordinator import push as push_module
from shoal_coordinator.push import WeightPush, push
from shoal_coordinator.push_report import PushReport

from shoal.config.models import PushSection
from shoal.errors import DeadlineError, InternalError, InvalidRequestError, StateError, TransportError, UnavailableError
from shoal.types.weights import BucketEncoding, InflightMode, StagedVersion
from shoal.weights.stages import PushStage
from tests.helpers.layouts import decoder_shapes, decoder_sink, fsdp_source
from tests.helpers.push_fakes import DELTA_PART, Fault, ScriptedSink, ScriptedSource, served_versions

SETTINGS = PushSection(prepare_timeout_s=5, transfer_timeout_s=5, verify_timeout_s=5, commit_timeout_s=5)
SHORT = PushSection(prepare_timeout_s=0.4, transfer_timeout_s=0.2, verify_timeout_s=0.2, commit_timeout_s=0.4)
DOWN = UnavailableError("connection refused")
BEFORE_COMMIT = ["prepare", "plan", "verify"]


@pytest.fixture(autouse=True)
def short_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "ABORT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(push_module, "COURTESY_S", 0.1)


def make_source() -> ScriptedSource:
    return ScriptedSource(fsdp_source(decoder_shapes(tied=False), 2), policy_version=4)


def make_sinks(*names: str) -> dict[str, ScriptedSink]:
    return {name: ScriptedSink(decoder_sink(name, 2), served_version=3) for name in names or ("a", "b")}


def never() -> asyncio.Event:
    return asyncio.Event()


async def test_push_commits_everywhere_and_reports() -> None:
    source, sinks = make_source(), make_sinks()
    report = await push(source, sinks, 4, SETTINGS, push_id="p1")
    assert report.state is PushStage.COMMITTED
    assert (report.push_id, report.policy_version, report.error, report.failed_servers) == ("p1", 4, None, {})
    assert report.committed_servers == ("a", "b")
    assert report.pause_ms == {"a": 3.0, "b": 3.0}
    assert set(report.stages_s) == {"prepare", "transfer", "verify", "commit"}
    assert served_versions(sinks) == {"a": 4, "b": 4}
    assert source.calls == ["describe", "prepare", "transfer"]
    assert all(sink.calls == ["prepare", "plan", "verify", "commit"] for sink in sinks.values())


async def test_push_reports_every_servers_part() -> None:
    source, sinks = make_source(), make_sinks()
    sinks["b"].num_aborted = 5
    sinks["b"].staged = StagedVersion(source_id="gang", policy_version=3)
    report = await push(source, sinks, 4, SETTINGS, dense=["a"])
    a, b = report.servers["a"], report.servers["b"]
    assert (a.dense, b.dense, a.served_version) == (True, False, 3)
    assert a.transports == b.transports == ("shm",)
    assert a.num_buckets == b.num_buckets > 0
    assert a.sent_bytes == a.dense_bytes == b.dense_bytes == DELTA_PART * b.sent_bytes
    assert (report.sent_bytes, report.dense_bytes) == (a.sent_bytes + b.sent_bytes, 2 * a.dense_bytes)
    assert report.delta_share == pytest.approx(0.55)
    assert (report.num_aborted, b.num_aborted) == (5, 5)


async def test_push_asks_for_everything_where_it_is_told_to() -> None:
    source, sinks = make_source(), make_sinks()
    for sink in sinks.values():
        sink.staged = StagedVersion(source_id="gang", policy_version=3)
    await push(source, sinks, 4, SETTINGS, dense={"b"})
    assert {name: target.dense for name, target in source.targets[0].items()} == {"a": False, "b": True}
    assert {name: target.staged for name, target in source.targets[0].items()} == dict.fromkeys(
        "ab", StagedVersion(source_id="gang", policy_version=3)
    )
    assert set(sinks["a"].encodings[0]) == {BucketEncoding.DELTA}
    assert set(sinks["b"].encodings[0]) == {BucketEncoding.DENSE}


@pytest.mark.parametrize(("commit", "expected"), [("barrier", 5 + 6 + 7 + 8), ("rolling", 5 + 6 + 7 + 2 * 8)])
async def test_push_lets_servers_drop_it_after_the_sum_of_its_deadlines(commit: str, expected: float) -> None:
    sinks = make_sinks()
    settings = PushSection.model_validate(
        {"prepare_timeout_s": 5, "transfer_timeout_s": 6, "verify_timeout_s": 7, "commit_timeout_s": 8, "commit": commit}
    )
    await push(make_source(), sinks, 4, settings)
    assert [sink.expires_s for sink in sinks.values()] == [[expected], [expected]]


@pytest.mark.parametrize("inflight", list(InflightMode))
async def test_push_says_what_becomes_of_running_requests(inflight: InflightMode) -> None:
    sinks = make_sinks()
    await push(make_source(), sinks, 4, SETTINGS.model_copy(update={"inflight": str(inflight)}))
    assert [sink.inflight for sink in sinks.values()] == [[inflight], [inflight]]


async def test_push_hands_collective_groups_to_the_ranks() -> None:
    source, sinks = make_source(), make_sinks()
    sinks["b"].collective_group = "group-b"
    await push(source, sinks, 4, SETTINGS)
    assert source.groups == {"b": "group-b"}


async def test_push_catches_up_a_single_late_joiner() -> None:
    sinks = make_sinks("late")
    assert (await push(make_source(), sinks, 4, SETTINGS)).committed_servers == ("late",)


async def test_push_ids_differ_between_pushes_of_one_version() -> None:
    assert WeightPush(make_source(), make_sinks(), 4, SETTINGS).push_id != WeightPush(make_source(), make_sinks(), 4, SETTINGS).push_id


async def test_push_commits_only_after_every_verify() -> None:
    sinks, gate = make_sinks(), never()
    sinks["b"].faults["verify"] = [gate]
    running = asyncio.create_task(push(make_source(), sinks, 4, SETTINGS))
    await asyncio.wait_for(sinks["b"].entered["verify"].wait(), 5)
    await asyncio.sleep(0)
    assert "commit" not in sinks["a"].calls
    gate.set()
    assert (await running).committed_servers == ("a", "b")


@pytest.mark.parametrize("stage", BEFORE_COMMIT)
@pytest.mark.parametrize("fault", [DOWN, TransportError("digest of q differs"), StateError("other hash"), None])
async def test_a_sink_that_fails_before_commit_is_left_out(stage: str, fault: Fault | None) -> None:
    source, sinks = make_source(), make_sinks()
    sinks["a"].faults[stage] = [never() if fault is None else fault]
    report = await push(source, sinks, 4, SHORT)
    assert report.state is PushStage.COMMITTED
    assert report.committed_servers == ("b",)
    assert report.failed_servers["a"].startswith(f"{'prepare' if stage == 'plan' else stage}: ")
    assert ("no answer within 0." if fault is None else str(fault)) in report.failed_servers["a"]
    assert served_versions(sinks) == {"a": 3, "b": 4}
    assert sinks["a"].calls[-1] == "abort"
    assert "commit" not in sinks["a"].calls
    if stage != "verify":
        assert set(source.targets[-1]) == {"b"}, "ranks do not try to reach a server that was left out"


async def test_servers_that_hang_in_both_calls_of_prepare_leave_time_for_the_others() -> None:
    sinks = make_sinks("a", "b", "c")
    sinks["a"].faults["prepare"], sinks["b"].faults["plan"] = [never()], [never()]
    started_s = time.monotonic()
    report = await push(make_source(), sinks, 4, SHORT)
    assert report.committed_servers == ("c",)
    assert report.stages_s["prepare"] < SHORT.prepare_timeout_s
    assert time.monotonic() - started_s < push_module.expires_s(SHORT, 3)


@pytest.mark.parametrize("stage", BEFORE_COMMIT)
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
    settings = SETTINGS.model_copy(update={"transfer_timeout_s": 0.1})
    report = await asyncio.wait_for(push(source, make_sinks(), 4, settings), 4)
    assert "no answer within 0.1 s" in str(report.error)


async def test_a_push_in_which_everybody_hangs_ends_within_its_deadlines() -> None:
    source, sinks = make_source(), make_sinks()
    source.faults["transfer"] = source.faults["abort"] = never()
    for sink in sinks.values():
        sink.faults["abort"] = [never()]
    started_s = time.monotonic()
    report = await push(source, sinks, 4, SHORT)
    assert report.state is PushStage.ABORTED
    assert time.monotonic() - started_s < push_module.expires_s(SHORT, 2) + 0.3
    assert set(report.failed_servers) == {"a", "b"}
    assert report.failed_servers["b"].startswith("abort: ")


async def test_a_server_that_hangs_while_it_is_left_out_does_not_hold_the_others_up() -> None:
    sinks = make_sinks()
    sinks["a"].faults = {"prepare": [DOWN], "abort": [never()]}
    started_s = time.monotonic()
    report = await push(make_source(), sinks, 4, SETTINGS)
    assert report.committed_servers == ("b",)
    assert time.monotonic() - started_s < 2.0


async def test_a_source_of_another_version_aborts() -> None:
    sinks = make_sinks()
    report = await push(make_source(), sinks, 5, SETTINGS)
    assert report.state is PushStage.ABORTED
    assert "the trainer holds policy version 4; version 5 cannot be pushed" in str(report.error)
    assert served_versions(sinks) == {"a": 3, "b": 3}


async def test_a_server_that_the_trainer_plans_otherwise_is_left_out() -> None:
    source, sinks = make_source(), make_sinks()
    source.other_plan = {"a"}
    report = await push(source, sinks, 4, SETTINGS)
    assert report.committed_servers == ("b",)
    assert "the trainer planned 000000000000" in report.failed_servers["a"]
    assert "verify" not in sinks["a"].calls


async def test_a_server_that_the_trainer_cannot_plan_is_left_out() -> None:
    source, sinks = make_source(), make_sinks()
    source.unplanned = {"a"}
    report = await push(source, sinks, 4, SETTINGS)
    assert report.committed_servers == ("b",)
    assert "the trainer made no plan for it" in report.failed_servers["a"]


async def test_plans_that_differ_for_every_server_abort() -> None:
    source, sinks = make_source(), make_sinks()
    source.other_plan = {"a", "b"}
    report = await push(source, sinks, 4, SETTINGS)
    assert report.state is PushStage.ABORTED
    assert "transfer" not in source.calls


async def test_a_server_that_plans_otherwise_is_left_out() -> None:
    sinks = make_sinks()
    sinks["a"] = ScriptedSink(sinks["a"].layout, 3, SETTINGS.model_copy(update={"bucket_bytes": 4096}))
    sinks["b"] = ScriptedSink(sinks["b"].layout, 3, SETTINGS.model_copy(update={"bucket_bytes": 64}))
    report = await push(make_source(), sinks, 4, SETTINGS.model_copy(update={"bucket_bytes": 4096}))
    assert report.committed_servers == ("a",)
    assert "planned" in report.failed_servers["b"]


async def test_a_sink_whose_layout_cannot_be_planned_is_left_out() -> None:
    sinks = make_sinks()
    worker = sinks["a"].layout.workers[0]
    region = replace(worker.regions[0], source_name="unheard.of")
    sinks["a"].layout = replace(
        sinks["a"].layout, workers=(replace(worker, regions=(region, *worker.regions[1:])), sinks["a"].layout.workers[1])
    )
    report = await push(make_source(), sinks, 4, SETTINGS)
    assert report.committed_servers == ("b",)
    assert "unheard.of" in report.failed_servers["a"]


async def test_a_sink_that_no_transport_reaches_is_left_out() -> None:
    sinks = make_sinks()
    workers = tuple(replace(worker, endpoints={}) for worker in sinks["a"].layout.workers)
    sinks["a"].layout = replace(sinks["a"].layout, workers=workers)
    report = await push(make_source(), sinks, 4, SETTINGS)
    assert report.committed_servers == ("b",)
    assert report.failed_servers["a"].startswith("prepare: ")


async def test_a_sink_that_answers_as_another_server_is_left_out() -> None:
    sinks = make_sinks()
    sinks["a"].layout = sinks["b"].layout
    report = await push(make_source(), sinks, 4, SETTINGS)
    assert report.committed_servers == ("b",)
    assert "answers as server 'b'" in report.failed_servers["a"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("unreachable", "rank 1: connection reset"), ("forgotten", "buckets, beginning with"), ("silent", "does not say what it wrote")],
)
async def test_a_sink_without_every_digest_is_left_out(kind: str, reason: str) -> None:
    source, sinks = make_source(), make_sinks()
    if kind == "unreachable":
        source.unreachable["a"] = "rank 1: connection reset"
    else:
        getattr(source, kind).add("a")
    report = await push(source, sinks, 4, SETTINGS)
    assert report.committed_servers == ("b",)
    assert report.failed_servers["a"].startswith("transfer: ")
    assert reason in report.failed_servers["a"]
    assert "verify" not in sinks["a"].calls
    assert served_versions(sinks) == {"a": 3, "b": 4}


async def test_a_push_that_reached_no_staging_ends_before_verify() -> None:
    source, sinks = make_source(), make_sinks()
    source.unreachable = {"a": "gone", "b": "gone"}
    report = await push(source, sinks, 4, SETTINGS)
    assert report.state is PushStage.ABORTED
    assert "verify" not in report.stages_s
    assert set(report.failed_servers) == {"a", "b"}


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


async def test_a_push_without_sinks_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one rollout server"):
        await push(make_source(), {}, 4, SETTINGS)


async def cancel_at(running: WeightPush, moment: asyncio.Event) -> None:
    task: asyncio.Task[PushReport] = asyncio.create_task(running.run())
    await asyncio.wait_for(moment.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
