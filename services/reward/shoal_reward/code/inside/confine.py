"""Takes the system call filter that `shoal_reward.code.seccomp` wrote."""

from __future__ import annotations

import ctypes
import os
import struct

ITSELF = 0xFFFFFFFE
"""Stands in a filter for the number of the process that takes it; no process has it."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_INSTRUCTION = "=HBBI"


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def install_filter(code: bytes) -> None:
    """Confine this process and every thread that it will start, for good.

    Raises: OSError: the kernel refuses.
    """
    own = os.getpid()
    steps = [(*step[:3], own if step[3] == ITSELF else step[3]) for step in struct.iter_unpack(_INSTRUCTION, code)]
    code = b"".join(struct.pack(_INSTRUCTION, *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(steps), ctypes.cast(buffer, ctypes.c_void_p))
    if _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program)):
        raise OSError(ctypes.get_errno(), "the kernel does not take a system call filter")


def forbid_new_privileges() -> None:
    """Nothing that this process starts gains rights; the kernel wants that before it takes a filter.

    Raises: OSError: the kernel refuses.
    """
    if _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS failed")


def _prctl(option: int, first: int, second: int) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
    return int(library.prctl(option, first, second, 0, 0))
