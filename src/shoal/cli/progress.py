"""Live progress of a run: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shoal.cli.one_line import one_line

Step = dict[str, Any]

_ROWS = 12
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("step", "step", "{:.0f}"),
    ("version", "policy_version", "{:.0f}"),
    ("reward", "reward", "{:.3f}"),
    ("kl", "kl", "{:.4f}"),
    ("length", "response_length", "{:.1f}"),
    ("rollout s", "rollout_s", "{:.2f}"),
    ("train s", "train_s", "{:.2f}"),
    ("push s", "push_s", "{:.2f}"),
    ("step s", "step_s", "{:.2f}"),
    ("tok/s", "tokens_per_s", "{:.0f}"),
)


class ProgressView(Protocol):
    """Where progress goes."""

    def __enter__(self) -> ProgressView: ...

    def __exit__(self, *_: object) -> None: ...

    def message(self, text: str) -> None:
        """Say something once."""

    def update(self, status: dict[str, Any], steps: list[Step]) -> None:
        """Show the newest status and the steps that are new since the last call."""


def open_view(console: Console) -> ProgressView:
    """A live table if the console is a terminal, else plain lines."""
    return _LiveView(console) if console.is_terminal else _PlainView(console)


def cells(step: Step) -> list[str]:
    """The shown columns of a step as text; "-" where a metric is missing."""
    values = {**step, "train_s": sum(float(step.get(name) or 0.0) for name in ("forward_s", "advantages_s", "update_s"))}
    return ["-" if values.get(key) is None else pattern.format(values[key]) for _, key, pattern in _COLUMNS]


def waiting_text(status: dict[str, Any]) -> str:
    """State and, if something is waited for, what and since when."""
    state = str(status.get("state", "unknown")).replace("_", " ").lower()
    waited: dict[str, list[float]] = {}
    for wait in status.get("waiting_for") or ():
        waited.setdefault(f"{wait['waiter']} waits for {_names(wait)}", []).append(float(wait["waited_s"]))
    return "; ".join([state, *(f"{text} ({_times(len(each))}{max(each):.0f} s)" for text, each in waited.items())])


def _times(number: int) -> str:
    return "" if number == 1 else f"{number} times, "


def alert_text(status: dict[str, Any]) -> str:
    """Why the run paused by itself, since when, and how to go on; empty if it did not."""
    alert = status.get("alert")
    if not alert:
        return ""
    since = duration_text(max(0.0, time.time() - float(alert["since_unix_s"])))
    service = f", {alert['service']}" if alert.get("service") else ""
    advice = "repair it, or change the reward (shoal reward rollback, activate); then: shoal resume"
    return one_line(f"ALERT for {since}: {alert['what']}{service}: {alert['error']} - {advice}")


def duration_text(duration_s: float) -> str:
    """Seconds as a person says them: 42 s, 3 min, 2.5 h."""
    if duration_s < 120:
        return f"{duration_s:.0f} s"
    return f"{duration_s / 60:.0f} min" if duration_s < 7200 else f"{duration_s / 3600:.1f} h"


def _names(wait: dict[str, Any]) -> str:
    names = ", ".join(wait.get("waits_for") or ())
    return f"{names}: {wait['what']}" if names else str(wait["what"])


class _PlainView:
    """A line for each step and state, for output that is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_state = ""
        self._last_alert: object = None

    def __enter__(self) -> _PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def message(self, text: str) -> None:
        """See `ProgressView.message`."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def update(self, status: dict[str, Any], steps: list[Step]) -> None:
        """See `ProgressView.update`."""
        for step in steps:
            pairs = [f"{title}={value}" for (title, _, _), value in zip(_COLUMNS, cells(step), strict=True)]
            self.message(" ".join(pair.replace(" s=", "_s=") for pair in pairs))
        state = str(status.get("state", ""))
        if state != self._last_state and state not in ("rolling_out", "training", "pushing"):
            self.message(f"state: {waiting_text(status)}")
        self._last_state = state
        if (alert := status.get("alert")) != self._last_alert and alert:
            self._console.print(alert_text(status), highlight=False, soft_wrap=True, markup=False)
        self._last_alert = alert


class _LiveView:
    """A table of the last steps that is drawn again in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: deque[Step] = deque(maxlen=_ROWS)
        self._status: dict[str, Any] = {}
        self._bar = Progress(TextColumn("training"), BarColumn(bar_width=40), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self._task = self._bar.add_task("training", total=None)
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)
        self._started = time.monotonic()

    def __enter__(self) -> _LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def message(self, text: str) -> None:
        """See `ProgressView.message`."""
        self._console.print(text, highlight=False)

    def update(self, status: dict[str, Any], steps: list[Step]) -> None:
        """See `ProgressView.update`."""
        self._status = status
        self._rows.extend(steps)
        self._bar.update(self._task, completed=status.get("step", 0), total=status.get("total_steps"))

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for title, _, _ in _COLUMNS:
            table.add_column(title, justify="right")
        for step in self._rows:
            table.add_row(*cells(step))
        alert = [Text(text, style="bold red")] if (text := alert_text(self._status)) else []
        return Group(self._bar, Text(waiting_text(self._status), style="dim"), *alert, table)
