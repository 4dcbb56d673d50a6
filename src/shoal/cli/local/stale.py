"""Staging files of runs that were killed altogether, the supervisor included: found by name, told apart by their lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from shoal.weights.staging_names import STAGING_FILE


def remove_stale_staging(folder: str) -> list[str]:
    """Remove the staging files of this user that no process holds.

    An engine worker keeps an exclusive lock on its staging file for as long as it lives, and the kernel takes the lock back
    however the worker ends.

    Args:
        folder: push.shm_dir; one that does not exist has nothing stale.
    Returns: the names that were removed, sorted.
    """
    with contextlib.suppress(FileNotFoundError):
        return [name for name in sorted(os.listdir(folder)) if STAGING_FILE.fullmatch(name) and _remove_unless_held(Path(folder, name))]
    return []


def _remove_unless_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(descriptor).st_nlink:
            # Another sweep was quicker; the path may name a new file by now.
            return False
        path.unlink()
    except OSError:
        # Held, or gone meanwhile.
        return False
    finally:
        os.close(descriptor)
    return True
