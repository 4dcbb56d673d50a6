"""Ends a process and all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_MAX_ROUNDS = 100


def kill_tree(leader: int) -> None:
    """Kill a session's leader, its process group, and descendants that left the group. The leader must not have been reaped yet.

    The leader adopts orphans (it is a subreaper), so it is stopped while they are sought, and killed last.
    """
    _signal_group(leader, signal.SIGSTOP)
    killed: set[int] = set()
    for _ in range(_MAX_ROUNDS):
        found = _descendants(leader) - killed
        if not found:
            break
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        killed |= found
    _signal_group(leader, signal.SIGKILL)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _descendants(process: int) -> set[int]:
    found: set[int] = set()
    unseen = [process]
    while unseen:
        children = _children(unseen.pop()) - found
        found |= children
        unseen += children
    return found


def _children(process: int) -> set[int]:
    children: set[int] = set()
    # A process or thread may end while it is looked at.
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                children.update(map(int, (thread / "children").read_text().split()))
    return children
