"""The coordinator's push against scripted ends: every stage failing, stalling, cancelled; one complete version everywhere."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from shoal_coordinator import push as push_module
from shoal_coordinator.push import WeightPush, push

from shoal.config.models import PushSection
from shoal.errors import InternalError, InvalidRequestError, StateError, TransportError, UnavailableError
from shoal.types.weights import BucketEncoding, InflightMode, StagedVersion
from shoal.weights.stages import PushStage
from tests.helpers.push_fakes import DELTA_PART, Fault, ScriptedSink, make_sinks, make_source, never, served_versions

SETTINGS = PushSection(prepare_timeout_s=5, transfer_timeout_s=5, verify_timeout_s=5, commit_timeout_s=5)
SHORT = PushSection(prepare_timeout_s=0.4, transfer_timeout_s=0.2, verify_timeout_s=0.2, commit_timeout_s=0.4)
DOWN = UnavailableError("connection refused")
BEFORE_COMMIT = ["prepare", "plan", "verify"]


@pytest.fixture(autouse=True)
def short_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "ABORT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(push_module, "COURTESY_S", 0.1)


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


async def test_a_push_without_sinks_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one rollout server"):
        await push(make_source(), {}, 4, SETTINGS)
