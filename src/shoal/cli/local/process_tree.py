"""Finding and ending descendants through /proc (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that a killed service's children can still be found and ended."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def parent_of(pid: int) -> int | None:
    """The parent's pid, or None if the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[1])


def descendants(root: int) -> list[int]:
    """Every live process below root, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := parent_of(int(entry))) is not None:
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [child for pid in frontier for child in children.get(pid, [])]
        found.extend(frontier)
    return found


def reap() -> list[tuple[int, int]]:
    """Collect every ended child: (pid, exit code; negative is the signal)."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def kill_descendants(root: int, timeout_s: float = 5.0) -> list[int]:
    """SIGKILL everything below root until nothing is left; returns what would not end."""
    deadline = time.monotonic() + timeout_s
    while left := descendants(root):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if root == os.getpid():
            reap()
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return []
