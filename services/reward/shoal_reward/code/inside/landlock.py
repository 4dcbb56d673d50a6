"""Landlock: a process gives up all of the file system but some folders, also as root, for good.

Source: Linux, Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_REG = 1 << 8
TRUNCATE = 1 << 14
_FILE_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP_RIGHTS = 3
_SCOPES = 3
_FOLDER_ONLY = READ_DIR | REMOVE_DIR | REMOVE_FILE | MAKE_REG


def abi() -> int:
    """Version of Landlock that the kernel offers; 0 where it is off, unknown or forbidden."""
    return max(0, _call(_CREATE_RULESET, None, 0, _VERSION_FLAG))


class Ruleset:
    """Collects what stays allowed; `apply` gives up the rest. Folders are opened at once, so it may be filled with rights that go away."""

    def __init__(self, version: int) -> None:
        """Args: version: of Landlock, at least 1."""
        self._handled = _FILE_RIGHTS_BY_ABI[max(known for known in _FILE_RIGHTS_BY_ABI if known <= version)]
        attributes = struct.pack("=QQQ", self._handled, _TCP_RIGHTS if version >= 4 else 0, _SCOPES if version >= 6 else 0)
        # An older kernel wants the shorter structure.
        size = 24 if version >= 6 else 16 if version >= 4 else 8
        self._fd = _checked("landlock_create_ruleset", _call(_CREATE_RULESET, attributes, size, 0))

    def allow_reading(self, paths: Sequence[str]) -> None:
        """Allow to read files, and folders with everything below; paths that do not exist are left out."""
        for path in paths:
            self._allow(path, READ_FILE | READ_DIR)

    def allow_files_in(self, folder: str) -> None:
        """Allow to read, write, make and remove regular files below a folder; no folders, links, sockets or devices."""
        self._allow(folder, READ_FILE | READ_DIR | WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE)

    def allow_writing(self, path: str) -> None:
        """Allow to read and write one file that exists."""
        self._allow(path, READ_FILE | WRITE_FILE | TRUNCATE)

    def apply(self) -> None:
        """Confine this process and every thread that it will start.

        Raises: OSError: the kernel refuses; new privileges must have been forbidden.
        """
        _checked("landlock_restrict_self", _call(_RESTRICT_SELF, self._fd, 0))
        os.close(self._fd)

    def _allow(self, path: str, rights: int) -> None:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        try:
            wanted = rights & self._handled & (~0 if os.path.isdir(path) else ~_FOLDER_ONLY)
            _checked("landlock_add_rule", _call(_ADD_RULE, self._fd, _PATH_BENEATH, struct.pack("=Qi", wanted, fd), 0))
        finally:
            os.close(fd)


def _call(number: int, *arguments: int | bytes | None) -> int:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    return int(syscall(ctypes.c_long(number), *(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)))


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what} failed: {os.strerror(number)}")
    return result
