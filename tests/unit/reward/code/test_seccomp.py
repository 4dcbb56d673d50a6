"""The system call filter, run by a small interpreter of BPF for both machines."""

from __future__ import annotations

import struct

import pytest
from shoal_reward.code.inside.confine import ITSELF
from shoal_reward.code.seccomp import ALLOW, AUDIT_ARCHES, KILL_PROCESS, NO_SUCH_CALL, REFUSE, filter_code, filter_program
from shoal_reward.code.syscalls import NUMBERS

OWN = 4711
MACHINES = list(AUDIT_ARCHES)


def verdict(machine: str, call: str | int, *arguments: int, arch: int | None = None) -> int:
    """What the filter says of a call; a name is looked up."""
    numbers = NUMBERS[call] if isinstance(call, str) else (call, call)
    number = numbers[MACHINES.index(machine)]
    assert number is not None
    memory = struct.pack("=IIQ6Q", number, AUDIT_ARCHES[machine] if arch is None else arch, 0, *(*arguments, *[0] * (6 - len(arguments))))
    program, at, accumulator = filter_program(machine, OWN), 0, 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", memory, constant)
        elif code == 0x54:
            accumulator &= constant
        elif code == 0x15:
            at += if_true if accumulator == constant else if_false
        else:
            assert code == 0x06
            return constant


@pytest.mark.parametrize("machine", MACHINES)
def test_plain_calls_are_allowed_and_all_others_refused(machine: str) -> None:
    limited = {"clone", "kill", "tgkill", "prctl", "ioctl", "fcntl", "prlimit64", "socketpair"}
    column = MACHINES.index(machine)
    allowed = {numbers[column] for name, numbers in NUMBERS.items() if numbers[column] is not None and name not in limited}
    with_conditions = {NUMBERS[name][column] for name in limited}
    for number in range(600):
        if number not in with_conditions and number != 435:
            assert verdict(machine, number) == (ALLOW if number in allowed else REFUSE), number
    assert verdict(machine, 435) == NO_SUCH_CALL
    assert verdict(machine, 0x40000000 + 39) == REFUSE


@pytest.mark.parametrize("machine", MACHINES)
def test_another_architecture_is_killed(machine: str) -> None:
    assert verdict(machine, "read", arch=0x40000003) == KILL_PROCESS


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "arguments", "is_allowed"),
    [
        ("clone", (0x3D0F00,), True),
        ("clone", (0x01200011,), False),
        ("clone", (17,), False),
        ("kill", (OWN, 9), True),
        ("kill", (OWN + 1, 9), False),
        ("kill", (0, 9), False),
        ("kill", (0xFFFFFFFF, 9), False),
        ("tgkill", (OWN, 1, 6), True),
        ("tgkill", (1, 1, 6), False),
        ("prctl", (15,), True),
        ("prctl", (16,), True),
        ("prctl", (1, 0), False),
        ("prctl", (4, 1), False),
        ("prctl", (22, 2), False),
        ("ioctl", (0, 0x5421), True),
        ("ioctl", (0, 0x5412), False),
        ("fcntl", (0, 1), True),
        ("fcntl", (0, 1030), True),
        ("fcntl", (0, 8), False),
        ("fcntl", (0, 1031), False),
        ("prlimit64", (0, 7, 0), True),
        ("prlimit64", (0, 7, 1), False),
        ("prlimit64", (0, 7, 1 << 32), False),
        ("socketpair", (1, 0x80801, 0), True),
        ("socketpair", (1, 2, 0), False),
        ("socketpair", (2, 1, 0), False),
    ],
)
def test_arguments_decide(machine: str, call: str, arguments: tuple[int, ...], is_allowed: bool) -> None:
    assert verdict(machine, call, *arguments) == (ALLOW if is_allowed else REFUSE)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_written_filter_leaves_room_for_the_process(machine: str) -> None:
    steps = list(struct.iter_unpack("=HBBI", filter_code(machine)))
    assert steps == filter_program(machine, ITSELF)
    assert sum(step[3] == ITSELF for step in steps) == 2
    assert len(steps) < 4096
    assert all(step[1] < 256 and step[2] < 256 for step in steps)
