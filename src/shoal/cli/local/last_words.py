"""Why a service ended, from the end of its log."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

_TAIL_BYTES = 1 << 16
_MAX_CHARS = 600
_EXCEPTION = re.compile(r"(?<![\w.])((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)(?:: .*)?)$")
# What launchers say about the failure of another process.
_SECONDHAND = ("ChildFailedError", "Engine core initialization failed", "BrokenPipeError", "KeyboardInterrupt")


def last_words(log: Path) -> str:
    """The most telling line: the last structured error, else the last exception that is not about another process, else the last line.

    Returns: one line without colour codes; empty if the log is empty or missing.
    """
    lines = _tail(log)
    said, cause = _last(lines, _structured_error), _last(lines, _exception)
    if said and cause and any(text in said for text in _SECONDHAND):
        return f"{cause[:_MAX_CHARS]} ({said[:_MAX_CHARS]})"
    return (said or cause or (lines[-1] if lines else ""))[:_MAX_CHARS]


def _last(lines: list[str], find: Callable[[str], str]) -> str:
    return next((found for line in reversed(lines) if (found := find(line))), "")


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return [line.strip() for line in plain.splitlines() if line.strip()]


def _structured_error(line: str) -> str:
    try:
        event = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(event, dict) or event.get("level") != "error":
        return ""
    trace = str(event.get("exception", "")).splitlines()
    return str(event.get("error") or (trace[-1] if trace else "") or event.get("event", "")).replace("\n", "; ")


def _exception(line: str) -> str:
    found = None if line.startswith("{") else _EXCEPTION.search(line)
    if found is None or any(text in line for text in _SECONDHAND):
        return ""
    return found[1]
