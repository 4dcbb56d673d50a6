"""Shows a run to the REST API, and passes on what users ask of it."""

from __future__ import annotations

import math
import time

from shoal_coordinator.alerts import RunAlert
from shoal_coordinator.audit_report import AuditReport, ProbeAgreement, ServerAudit
from shoal_coordinator.fleet import Fleet
from shoal_coordinator.push_history import PushEntry, PushHistory
from shoal_coordinator.push_report import ServerReport, share_of
from shoal_coordinator.registry import Lease, Registry
from shoal_coordinator.rest_models import (
    AlertModel,
    AuditModel,
    Command,
    EvaluationModel,
    ProbeModel,
    PushModel,
    PushServerModel,
    PushSummaryModel,
    ServerAuditModel,
    ServiceModel,
    StatusModel,
    WaitModel,
)
from shoal_coordinator.rewards.book import RouteBook
from shoal_coordinator.run import Run, RunParts
from shoal_coordinator.waiting import Wait


class RunBackend:
    """The `RestBackend` of a real run."""

    def __init__(self, run: Run, parts: RunParts, registry: Registry, book: RouteBook) -> None:
        self._run = run
        self._parts = parts
        self._registry = registry
        self._book = book
        self.grpc_address: str | None = None
        """Where services register; set once it is served."""

    def status(self) -> StatusModel:
        """Where the run is."""
        parts, progress = self._parts, self._run.progress
        return StatusModel(
            run_id=parts.config.run.id,
            state=parts.machine.state,
            state_since_unix_s=parts.machine.since_unix_s,
            step=progress.step,
            total_steps=parts.config.run.steps,
            policy_version=parts.fleet.policy_version,
            waiting_for=[_wait_model(wait) for wait in parts.waits.current()],
            evaluations=[EvaluationModel.model_validate(evaluation.as_json()) for evaluation in progress.evaluations],
            pause_requested=parts.control.pause_requested,
            stop_requested=parts.control.stop_requested,
            error=progress.error,
            queue_depth=progress.queue_depth,
            started_unix_s=progress.started_unix_s,
            wall_s=progress.wall_s,
            run_folder=parts.config.run.folder,
            pushes=_push_summary(parts.history),
            alert=_alert_model(parts.control.alerts.current),
            route_revision=self._book.active_number,
            grpc_address=self.grpc_address,
        )

    def services(self) -> list[ServiceModel]:
        """Registered services."""
        return [_service_model(lease, self._parts.fleet) for lease in self._registry.leases()]

    def steps(self, after: int, limit: int) -> list[dict[str, float | None]]:
        """Metrics of steps after a number."""
        return self._parts.sink.after(after, limit)

    def pushes(self, limit: int) -> list[PushModel]:
        """The last pushes."""
        return [_push_model(entry) for entry in self._parts.history.last(limit)]

    def audits(self, limit: int) -> list[AuditModel]:
        """The last audits."""
        return [_audit_model(report) for report in self._parts.history.last_audits(limit)]

    async def verify_weights(self, timeout_s: float) -> AuditModel:
        """Compare the servers with the trainer. Raises: StateError: nothing to compare. DeadlineError: not within timeout_s."""
        return _audit_model(await self._parts.fleet.audit(timeout_s))

    def command(self, command: Command) -> None:
        """Pause, resume or stop. Raises: StateError: not possible now."""
        self._parts.control.command(command)


def _alert_model(alert: RunAlert | None) -> AlertModel | None:
    if alert is None:
        return None
    return AlertModel(what=alert.what, service=alert.service, error=alert.error, since_unix_s=alert.since_unix_s)


def _wait_model(wait: Wait) -> WaitModel:
    return WaitModel(
        waiter=wait.waiter,
        waits_for=list(wait.waits_for),
        what=wait.what,
        since_unix_s=wait.since_unix_s,
        waited_s=max(0.0, time.time() - wait.since_unix_s),
    )


def _service_model(lease: Lease, fleet: Fleet) -> ServiceModel:
    info = lease.info
    return ServiceModel(
        service_id=info.service_id,
        kind=info.kind,
        address=info.address,
        incarnation=info.incarnation,
        process_id=info.process_id,
        policy_version=fleet.served_version(info),
        state=fleet.state_of(info),
        fenced_because=fleet.fenced_because(info),
        registered_unix_s=lease.registered_unix_s,
        renewed_unix_s=lease.renewed_unix_s,
    )


def _push_model(entry: PushEntry) -> PushModel:
    report = entry.report
    return PushModel(
        push_id=report.push_id,
        policy_version=report.policy_version,
        reason=entry.reason,
        state=report.state,
        servers=list(report.committed_servers),
        failed_servers=report.failed_servers,
        stages_s=dict(report.stages_s),
        sent_bytes=report.sent_bytes,
        dense_bytes=report.dense_bytes,
        delta_share=report.delta_share,
        server_reports=[_push_server_model(server) for server in report.servers.values()],
        pause_ms=report.pause_ms,
        error=report.error,
        started_unix_s=report.started_unix_s,
    )


def _push_server_model(server: ServerReport) -> PushServerModel:
    return PushServerModel(
        server_id=server.server_id,
        stage=server.stage,
        error=server.error,
        dense=server.dense,
        transports=list(server.transports),
        num_buckets=server.num_buckets,
        sent_bytes=server.sent_bytes,
        dense_bytes=server.dense_bytes,
        delta_share=share_of(server.sent_bytes, server.dense_bytes),
        pause_ms=server.pause_ms,
        num_aborted=server.num_aborted,
    )


def _push_summary(history: PushHistory) -> PushSummaryModel | None:
    last = history.last_committed()
    if last is None:
        return None
    totals, report, audits = history.totals, last.report, history.last_audits(1)
    return PushSummaryModel(
        num_pushes=totals.num_pushes,
        num_committed=totals.num_committed,
        num_failed_servers=totals.num_failed_servers,
        policy_version=report.policy_version,
        total_s=report.total_s,
        max_pause_ms=report.max_pause_ms,
        sent_bytes=report.sent_bytes,
        dense_bytes=report.dense_bytes,
        delta_share=report.delta_share,
        num_servers=len(report.committed_servers),
        last_audit=audits[-1].result if audits else None,
    )


def _audit_model(report: AuditReport) -> AuditModel:
    return AuditModel(
        policy_version=report.policy_version,
        is_equal=report.result == "equal",
        servers=[_server_audit_model(server) for server in report.servers.values()],
        started_unix_s=report.started_unix_s,
        duration_s=report.duration_s,
    )


def _server_audit_model(server: ServerAudit) -> ServerAuditModel:
    return ServerAuditModel(
        server_id=server.server_id,
        result=server.result,
        num_parameters=server.num_parameters,
        num_pieces=server.num_pieces,
        num_differing=server.num_differing,
        first_difference=server.first_difference,
        error=server.error,
        probe=None if server.probe is None else _probe_model(server.probe),
        probe_error=server.probe_error,
    )


def _probe_model(probe: ProbeAgreement) -> ProbeModel:
    difference = probe.max_logprob_difference
    return ProbeModel(
        num_tokens=probe.num_tokens,
        max_logprob_difference=difference if math.isfinite(difference) else None,
        greedy_share=probe.greedy_share,
    )
