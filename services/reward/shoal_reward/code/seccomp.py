"""A system call filter in classic BPF: what `syscalls` lists is allowed, the rest fails with EPERM.

Source: Linux, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import errno
import struct

from shoal_reward.code.inside.confine import ITSELF
from shoal_reward.code.syscalls import CLONE3, NUMBERS, Condition, conditions

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


def filter_code(machine: str) -> bytes:
    """The filter as the kernel reads it; ITSELF stands where the number of the process belongs, which fills it in.

    Args:
        machine: key of AUDIT_ARCHES.
    """
    return b"".join(struct.pack("=HBBI", *step) for step in filter_program(machine, ITSELF))


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
