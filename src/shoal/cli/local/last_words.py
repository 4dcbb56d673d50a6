"""Why a service ended, from the end of its log."""

from __future__ import annotations

import json
import re
from pathlib import Path

_TAIL_BYTES = 1 << 16
_MAX_CHARS = 600
_EXCEPTION = re.compile(r"(?<![\w.])((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)(?:: .*)?)$")
# What launchers say about the failure of another process.
_SECONDHAND = ("ChildFailedError", "Engine core initialization failed", "BrokenPipeError", "KeyboardInterrupt")


def last_words(log: Path) -> str:
    """The most telling line: the last structured error, else the last exception that is not about another process, else the last line.

    Returns: one line without secrets' quoting or colour; empty if the log is empty or missing.
    """
    lines = _tail(log)
    for find in (_structured_error, _exception):
        for line in reversed(lines):
            if found := find(line):
                return found[:_MAX_CHARS]
    return lines[-1][:_MAX_CHARS] if lines else ""


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
    if not line.startswith("{"):
        return ""
    try:
        event = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(event, dict) or event.get("level") != "error":
        return ""
    trace = str(event.get("exception", "")).splitlines()
    return str(event.get("error") or (trace[-1] if trace else "") or event.get("event", "")).replace("\n", "; ")


def _exception(line: str) -> str:
    found = _EXCEPTION.search(line)
    if found is None or any(text in line for text in _SECONDHAND):
        return ""
    return found[1]
