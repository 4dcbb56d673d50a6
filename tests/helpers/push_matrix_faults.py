"""Faults that strike at the entry of a stage's handler, at most once each.

A test arms one fault in a file; every process of the cluster looks for it wherever a stage begins, and the one that it names claims it.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

ARMED, STRUCK = "fault.json", "fault.struck.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens where.

    at: process and stage, such as "rollout-0:verify".
    kind: "signal" or the name of a corruption that the process knows.
    process_id, signal_number: who gets which signal; the process itself, or another one whose stage this is not.
    """

    at: str
    kind: str
    process_id: int = 0
    signal_number: int = 0


class FaultBox:
    """The armed fault as one process sees it."""

    def __init__(self, folder: Path, process: str) -> None:
        self._folder = folder
        self._process = process

    def enter(self, stage: str) -> str:
        """Meet what is armed here: signals are sent at once; answers the name of a corruption, or "" if there is none."""
        fault = self._claim(f"{self._process}:{stage}")
        if fault is None:
            return ""
        if fault.kind != "signal":
            return fault.kind
        os.kill(fault.process_id, signal.Signals(fault.signal_number))
        return ""

    def is_armed(self, stage: str) -> bool:
        """Whether a fault waits here."""
        try:
            at = json.loads((self._folder / ARMED).read_text())["at"]
        except FileNotFoundError:
            return False
        return bool(at == f"{self._process}:{stage}")

    def _claim(self, at: str) -> Fault | None:
        armed = self._folder / ARMED
        try:
            fault = Fault(**json.loads(armed.read_text()))
            if fault.at != at:
                return None
            # Of two handlers that see it, one renames it.
            armed.rename(self._folder / STRUCK)
        except FileNotFoundError:
            return None
        return fault


def arm(folder: Path, fault: Fault) -> None:
    """Arm a fault; one at a time."""
    (folder / STRUCK).unlink(missing_ok=True)
    part = folder / "fault.part"
    part.write_text(json.dumps(asdict(fault)))
    part.rename(folder / ARMED)


def has_struck(folder: Path) -> bool:
    """Whether the armed fault was met."""
    return (folder / STRUCK).exists()


def flip_byte(path: str) -> None:
    """Change the first byte of a staging file."""
    with open(path, "r+b") as staging:
        first = staging.read(1)
        staging.seek(0)
        staging.write(bytes([first[0] ^ 1]))
