"""Ties a process to the one that supervises it, so that nothing outlives a killed supervisor."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SUPERVISED_VARIABLE = "SHOAL_SUPERVISED"
SUPERVISOR_PID_VARIABLE = "SHOAL_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(death_signal: int = signal.SIGKILL) -> bool:
    """Ask the kernel to signal this process when its parent dies, if SHOAL_SUPERVISED=1.

    Call it first thing in `__main__`, in the main thread: the kernel watches the thread of the parent that started
    this process. SHOAL_SUPERVISOR_PID, if set, is the pid of the supervisor (which is a grandparent under torchrun):
    its death before this call is noticed too.

    Args:
        death_signal: signal to receive; SIGKILL since a supervisor killed with -9 left nobody to wait for a drain.

    Returns: True if the process is now tied, False if it is not supervised or the system is not Linux.
    Raises: OSError: the kernel refused.
    """
    if os.environ.get(SUPERVISED_VARIABLE) != "1" or not sys.platform.startswith("linux"):
        return False
    parent = os.getppid()
    set_parent_death_signal(death_signal)
    # The parent may have died between our start and prctl; then no signal ever comes.
    if os.getppid() != parent or not _supervisor_lives():
        os.kill(os.getpid(), death_signal)
    return True


def set_parent_death_signal(death_signal: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies (Linux); also for a child between fork and exec.

    Raises: OSError: the kernel refused.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(number)}")


def _supervisor_lives() -> bool:
    text = os.environ.get(SUPERVISOR_PID_VARIABLE, "")
    if not text.isdigit():
        return True
    try:
        os.kill(int(text), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
