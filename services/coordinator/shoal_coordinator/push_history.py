"""The weight pushes of a run, for the REST API, the metrics and the report."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from shoal.telemetry.metrics import counter, histogram
from shoal.weights.stages import PushStage
from shoal_coordinator.push import PushReport

KEPT_PUSHES = 1_000
_PUSHES = counter("coordinator", "weight", "pushes", "Weight pushes by reason and end.", labels=("reason", "state"))
_STAGE_S = histogram("push", "stage", "seconds", "Time of each stage of a weight push.", labels=("stage",))
_PAUSE_S = histogram("push", "pause", "seconds", "Time that a rollout server did not serve during a push.")
_BYTES = counter("push", "moved", "bytes", "Weight bytes moved.")


class PushReason(StrEnum):
    """Why weights were pushed."""

    STEP = "step"
    CATCH_UP = "catch_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushEntry:
    """A push and why it was made."""

    report: PushReport
    reason: PushReason

    @property
    def max_pause_ms(self) -> float:
        """Longest time that a server did not serve; 0 if none was committed."""
        return max(self.report.pause_ms.values(), default=0.0)


class PushHistory:
    """The last KEPT_PUSHES pushes, oldest first."""

    def __init__(self) -> None:
        self._entries: deque[PushEntry] = deque(maxlen=KEPT_PUSHES)

    def add(self, report: PushReport, reason: PushReason) -> None:
        """Record a push that has ended."""
        self._entries.append(PushEntry(report=report, reason=reason))
        _PUSHES.labels(reason=reason, state=report.state).inc()
        for stage, seconds in report.stages_s.items():
            _STAGE_S.labels(stage=stage).observe(seconds)
        for pause_ms in report.pause_ms.values():
            _PAUSE_S.observe(pause_ms / 1e3)
        _BYTES.inc(report.num_bytes)

    def last(self, limit: int) -> list[PushEntry]:
        """The last pushes, newest last."""
        return list(self._entries)[-limit:]

    def last_committed(self) -> PushEntry | None:
        """The newest push that reached a server."""
        return next((entry for entry in reversed(self._entries) if entry.report.state is PushStage.COMMITTED), None)
