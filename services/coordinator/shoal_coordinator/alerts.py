"""What makes the run wait for a human: shown by the status and as a gauge."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shoal.telemetry.logs import get_logger
from shoal.telemetry.metrics import gauge

log = get_logger(__name__)
_ALERT = gauge("coordinator", None, "alert", "1 while the run is paused for a human's attention.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAlert:
    """Why the run waits: what is wrong, whose service (a scorer and its servers), the error it gave."""

    what: str
    service: str
    error: str
    since_unix_s: float = field(default_factory=time.time)


class AlertBoard:
    """Holds the alert of the run, if there is one; used from the event loop alone."""

    def __init__(self) -> None:
        self._current: RunAlert | None = None
        _ALERT.set(0)

    @property
    def current(self) -> RunAlert | None:
        """The alert; None if all is well."""
        return self._current

    def show(self, alert: RunAlert) -> None:
        """Show an alert until it is cleared."""
        self._current = alert
        _ALERT.set(1)
        log.error("run_alert", what=alert.what, service=alert.service, error=alert.error)

    def clear(self) -> None:
        """All is well."""
        self._current = None
        _ALERT.set(0)
