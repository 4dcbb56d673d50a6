"""What is counted of pushes and audits."""

from __future__ import annotations

from shoal_coordinator.audit_report import AuditReport, ServerAudit
from shoal_coordinator.push_history import PushHistory, PushReason
from shoal_coordinator.push_report import PushReport, ServerReport

from shoal.telemetry.metrics import sample_value
from shoal.weights.stages import PushStage


def make_report(*servers: ServerReport, state: PushStage = PushStage.COMMITTED, transfer_s: float = 0.5) -> PushReport:
    return PushReport(
        push_id="p",
        policy_version=1,
        state=state,
        stages_s={"prepare": 0.25, "transfer": transfer_s},
        servers={server.server_id: server for server in servers},
        error=None,
        started_unix_s=1.0,
    )


def committed(server_id: str, *, sent_bytes: int, pause_ms: float, num_aborted: int = 0) -> ServerReport:
    return ServerReport(
        server_id=server_id,
        dense=False,
        stage=PushStage.COMMITTED,
        sent_bytes=sent_bytes,
        dense_bytes=100,
        pause_ms=pause_ms,
        num_aborted=num_aborted,
    )


def failed(server_id: str) -> ServerReport:
    return ServerReport(server_id=server_id, dense=True, stage=PushStage.VERIFY, error="digest differs", sent_bytes=100, dense_bytes=100)


def read(name: str, **labels: str) -> float:
    return sample_value(name, labels) or 0.0


def test_report_sums_up_its_servers() -> None:
    report = make_report(committed("a", sent_bytes=5, pause_ms=2.0), failed("b"))
    assert report.committed_servers == ("a",)
    assert report.failed_servers == {"b": "verify: digest differs"}
    assert (report.sent_bytes, report.dense_bytes, report.delta_share) == (105, 200, 0.525)
    assert (report.pause_ms, report.max_pause_ms, report.total_s) == ({"a": 2.0}, 2.0, 0.75)


def test_report_without_bytes_has_a_share_of_one() -> None:
    assert make_report(state=PushStage.ABORTED).delta_share == 1.0


def test_history_counts_under_the_agreed_names() -> None:
    names = {
        "sent": ("shoal_push_bytes_total", {"kind": "sent"}),
        "dense": ("shoal_push_bytes_total", {"kind": "dense"}),
        "transfers": ("shoal_push_stage_seconds_count", {"stage": "transfer"}),
        "transfer_s": ("shoal_push_stage_seconds_sum", {"stage": "transfer"}),
        "pauses": ("shoal_push_pause_seconds_count", {}),
        "pause_s": ("shoal_push_pause_seconds_sum", {}),
        "equal": ("shoal_push_audits_total", {"result": "equal"}),
        "differs": ("shoal_push_audits_total", {"result": "differs"}),
        "unknown": ("shoal_push_audits_total", {"result": "unknown"}),
    }
    before = {key: read(name, **labels) for key, (name, labels) in names.items()}
    history = PushHistory()
    history.add(make_report(committed("a", sent_bytes=5, pause_ms=2.0), failed("b")), PushReason.STEP)
    servers = [ServerAudit(server_id="a"), ServerAudit(server_id="b", num_differing=2), ServerAudit(server_id="c", error="down")]
    audit = AuditReport(policy_version=1, servers={server.server_id: server for server in servers}, started_unix_s=1.0, duration_s=1.0)
    history.add_audit(audit)
    counted = {key: round(read(name, **labels) - before[key], 6) for key, (name, labels) in names.items()}
    assert counted == {
        "sent": 105,
        "dense": 200,
        "transfers": 1,
        "transfer_s": 0.5,
        "pauses": 1,
        "pause_s": 0.002,
        "equal": 1,
        "differs": 1,
        "unknown": 1,
    }
    assert audit.result == "differs"


def test_history_sums_up_a_run() -> None:
    history = PushHistory()
    assert history.summary()["median_s"] == 0.0
    history.add(make_report(committed("a", sent_bytes=100, pause_ms=4.0), transfer_s=1.75), PushReason.STEP)
    history.add(make_report(failed("a"), state=PushStage.ABORTED), PushReason.STEP)
    history.add(make_report(committed("a", sent_bytes=10, pause_ms=2.0, num_aborted=3), transfer_s=0.75), PushReason.CATCH_UP)
    summary = history.summary()
    assert summary == {
        "num_pushes": 3,
        "num_committed": 2,
        "num_failed_servers": 1,
        "num_aborted_requests": 3,
        "sent_bytes": 210,
        "dense_bytes": 300,
        "delta_share": 0.7,
        "median_s": 1.5,
        "median_pause_ms": 3.0,
        "max_pause_ms": 4.0,
        "num_audits": 0,
        "num_audit_mismatches": 0,
    }
    last = history.last_committed()
    assert last is not None
    assert last.reason is PushReason.CATCH_UP
