"""A system call filter in classic BPF: what `syscalls` lists is allowed, the rest fails with EPERM.

Source: Linux, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from shoal_reward.code.inside.syscalls import CLONE3, NUMBERS, Condition, conditions

AUDIT_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine -> the architecture that the kernel tells a filter."""

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
REFUSE = 0x00050000 | errno.EPERM
NO_SUCH_CALL = 0x00050000 | errno.ENOSYS

_LOAD, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2

Instruction = tuple[int, int, int, int]
"""Code, steps if true, steps if false, constant."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def filter_program(machine: str, process_id: int) -> list[Instruction]:
    """Write the filter of a machine.

    Args:
        machine: key of AUDIT_ARCHES.
        process_id: of the process that is to be confined.
    """
    column = list(AUDIT_ARCHES).index(machine)
    # Another architecture's calls (int 0x80) have other numbers: nothing can be said about them.
    program = [_load(_ARCH_OFFSET), (_JUMP_EQUAL, 1, 0, AUDIT_ARCHES[machine]), _answer(KILL_PROCESS), _load(_NUMBER_OFFSET)]
    limited = conditions(process_id)
    for name, numbers in NUMBERS.items():
        if (number := numbers[column]) is not None:
            body = [step for condition in limited.get(name, ()) for step in _check(condition)] + [_answer(ALLOW)]
            program += [(_JUMP_EQUAL, 0, len(body), number), *body]
    return [*program, (_JUMP_EQUAL, 0, 1, CLONE3), _answer(NO_SUCH_CALL), _answer(REFUSE)]


def install_filter() -> None:
    """Confine this process and every thread that it will start, for good.

    Raises: OSError: the kernel refuses, or the machine is neither x86_64 nor aarch64.
    """
    machine = platform.machine()
    if machine not in AUDIT_ARCHES:
        raise OSError(errno.ENOSYS, f"there is no system call filter for {machine}; known are {', '.join(AUDIT_ARCHES)}")
    code = b"".join(struct.pack("=HBBI", *step) for step in filter_program(machine, os.getpid()))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    forbid_new_privileges()
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


def _check(condition: Condition) -> list[Instruction]:
    # Arguments are 64 bits wide, both machines little-endian.
    steps = [_load(_ARGUMENTS_OFFSET + 8 * condition.argument + 4 * condition.is_high), (_AND, 0, 0, condition.mask)]
    count = len(condition.values)
    steps += [(_JUMP_EQUAL, count - index, 0, value) for index, value in enumerate(condition.values)]
    return [*steps, _answer(REFUSE)]


def _load(offset: int) -> Instruction:
    return (_LOAD, 0, 0, offset)


def _answer(value: int) -> Instruction:
    return (_RETURN, 0, 0, value)
