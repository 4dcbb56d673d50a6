"""What makes the run wait for a human: shown by the status and as a gauge."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from shoal.errors import ShoalError
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
        # Without the error, which may quote a response: the status has it.
        log.error("run_alert", what=alert.what, service=alert.service)

    def clear(self) -> None:
        """All is well."""
        self._current = None
        _ALERT.set(0)


class StoppedWhilePausedError(ShoalError):
    """A stop was requested while the run waited for a human; the run ends without what it waited for."""


class Attention(Protocol):
    """How work in the midst of a step or an evaluation gets a human's attention (`shoal_coordinator.control.RunControl`)."""

    async def wait_for_resume(self, alert: RunAlert) -> None:
        """Show the alert and stay PAUSED until the run is resumed.

        Raises: StoppedWhilePausedError: it is stopped instead.
        """
        ...
