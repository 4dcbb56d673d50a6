"""Waiting for processes to be gone."""

from __future__ import annotations

import time
from collections.abc import Iterable

from shoal.cli.local.process_tree import parent_of


def alive(pids: Iterable[int]) -> list[int]:
    """Those that still run (zombies do not)."""
    return [pid for pid in pids if parent_of(pid) is not None]


def wait_gone(pids: Iterable[int], timeout_s: float = 20.0) -> list[int]:
    """Wait until none runs; returns those that still do when the time is up."""
    deadline = time.monotonic() + timeout_s
    wanted = list(pids)
    while (left := alive(wanted)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
