"""The weight pushes and audits of a run, for the REST API, the metrics and the report."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.telemetry.metrics import counter, histogram
from shoal.weights.stages import PushStage
from shoal_coordinator.audit_report import AuditReport
from shoal_coordinator.push_report import PushReport, share_of

KEPT_PUSHES = 1_000
KEPT_AUDITS = 100
_PUSHES = counter("coordinator", "weight", "pushes", "Weight pushes by reason and end.", labels=("reason", "state"))
_STAGE_S = histogram("push", "stage", "seconds", "Time of each stage of a weight push.", labels=("stage",))
_PAUSE_S = histogram("push", "pause", "seconds", "Time that a rollout server did not serve during a push.")
_BYTES = counter("push", None, "bytes", "Weight bytes: sent over the links, and dense, which they stand for.", labels=("kind",))
_AUDITS = counter("push", None, "audits", "Comparisons of engines' live weights with the trainer's, by server.", labels=("result",))


class PushReason(StrEnum):
    """Why weights were pushed."""

    STEP = "step"
    CATCH_UP = "catch_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushEntry:
    """A push and why it was made."""

    report: PushReport
    reason: PushReason


@dataclass(slots=True, kw_only=True)
class PushTotals:
    """Sums over all pushes of a run, kept or not."""

    num_pushes: int = 0
    num_committed: int = 0
    num_failed_servers: int = 0
    num_aborted_requests: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    num_audits: int = 0
    num_audit_mismatches: int = 0

    @property
    def delta_share(self) -> float:
        """Bytes sent as a share of those that they stand for."""
        return share_of(self.sent_bytes, self.dense_bytes)


class PushHistory:
    """The last KEPT_PUSHES pushes and KEPT_AUDITS audits, oldest first, and totals."""

    def __init__(self) -> None:
        self._pushes: deque[PushEntry] = deque(maxlen=KEPT_PUSHES)
        self._audits: deque[AuditReport] = deque(maxlen=KEPT_AUDITS)
        self.totals = PushTotals()

    def add(self, report: PushReport, reason: PushReason) -> None:
        """Record a push that has ended."""
        self._pushes.append(PushEntry(report=report, reason=reason))
        totals = self.totals
        totals.num_pushes += 1
        totals.num_committed += report.state is PushStage.COMMITTED
        totals.num_failed_servers += len(report.failed_servers)
        totals.num_aborted_requests += report.num_aborted
        totals.sent_bytes += report.sent_bytes
        totals.dense_bytes += report.dense_bytes
        _PUSHES.labels(reason=reason, state=report.state).inc()
        for stage, seconds in report.stages_s.items():
            _STAGE_S.labels(stage=stage).observe(seconds)
        for pause_ms in report.pause_ms.values():
            _PAUSE_S.observe(pause_ms / 1e3)
        _BYTES.labels(kind="sent").inc(report.sent_bytes)
        _BYTES.labels(kind="dense").inc(report.dense_bytes)

    def add_audit(self, report: AuditReport) -> None:
        """Record an audit that has ended."""
        self._audits.append(report)
        self.totals.num_audits += 1
        for server in report.servers.values():
            self.totals.num_audit_mismatches += server.differs
            _AUDITS.labels(result=server.result).inc()

    def last(self, limit: int) -> list[PushEntry]:
        """The last pushes, newest last."""
        return list(self._pushes)[-limit:]

    def last_audits(self, limit: int) -> list[AuditReport]:
        """The last audits, newest last."""
        return list(self._audits)[-limit:]

    def last_committed(self) -> PushEntry | None:
        """The newest push that reached a server."""
        return next((entry for entry in reversed(self._pushes) if entry.report.state is PushStage.COMMITTED), None)

    def summary(self) -> dict[str, float]:
        """Totals and medians of the kept pushes, for the run's report."""
        totals, committed = self.totals, [entry.report for entry in self._pushes if entry.report.state is PushStage.COMMITTED]
        return {
            "num_pushes": totals.num_pushes,
            "num_committed": totals.num_committed,
            "num_failed_servers": totals.num_failed_servers,
            "num_aborted_requests": totals.num_aborted_requests,
            "sent_bytes": totals.sent_bytes,
            "dense_bytes": totals.dense_bytes,
            "delta_share": totals.delta_share,
            "median_s": _median([report.total_s for report in committed]),
            "median_pause_ms": _median([report.max_pause_ms for report in committed]),
            "max_pause_ms": max((report.max_pause_ms for report in committed), default=0.0),
            "num_audits": totals.num_audits,
            "num_audit_mismatches": totals.num_audit_mismatches,
        }


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
