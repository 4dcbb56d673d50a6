"""Resource limits and user of a sandboxed process."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping

_NAMES = {
    "cpu_s": resource.RLIMIT_CPU,
    "memory_bytes": resource.RLIMIT_AS,
    "file_bytes": resource.RLIMIT_FSIZE,
    "open_files": resource.RLIMIT_NOFILE,
    "tasks": resource.RLIMIT_NPROC,
    "core_bytes": resource.RLIMIT_CORE,
}


def apply_limits(limits: Mapping[str, int]) -> None:
    """Set limits, soft and hard; one that was already lower stays.

    Args:
        limits: cpu_s, memory_bytes (address space), file_bytes (of one file), open_files, tasks (of the user), core_bytes.
    """
    for name, value in limits.items():
        _, hard = resource.getrlimit(_NAMES[name])
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(_NAMES[name], (bound, bound))


def become(user: int) -> None:
    """Give up root for a user without a name and without groups; with it go all capabilities.

    The interpreter may stand where that user may not go (below /root, say): its folders are then reached through open descriptors.
    Raises: OSError: not allowed.
    """
    held = {folder: os.open(folder, os.O_PATH) for folder in dict.fromkeys(sys.path) if os.path.isdir(folder)}
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    moved = {folder: f"/proc/self/fd/{fd}" for folder, fd in held.items() if not os.access(os.path.join(folder, "."), os.R_OK)}
    for folder, fd in held.items():
        if folder not in moved:
            os.close(fd)
    _move_imports(moved)


def _move_imports(moved: Mapping[str, str]) -> None:
    sys.path[:] = [moved.get(folder, folder) for folder in sys.path]
    for module in list(sys.modules.values()):
        if isinstance(places := getattr(module, "__path__", None), list):
            module.__path__ = [_moved(place, moved) for place in places]


def _moved(place: str, moved: Mapping[str, str]) -> str:
    # Longest first: lib/python3.11 is also the start of lib/python3.11/lib-dynload.
    for folder in sorted(moved, key=len, reverse=True):
        if place.startswith(folder + "/"):
            return moved[folder] + place[len(folder) :]
    return place
