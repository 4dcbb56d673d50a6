"""System calls that a sandboxed process may make, and conditions on their arguments; everything else is refused.

A name maps to its numbers on x86_64 and aarch64; None where the architecture has no such call.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

NUMBERS: MappingProxyType[str, tuple[int | None, int | None]] = MappingProxyType(
    {
        # files: which ones is up to the user id and to Landlock; neither folders nor links can be made
        "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
        "lseek": (8, 62), "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
        "open": (2, None), "openat": (257, 56), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79),
        "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48),
        "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getdents": (78, None), "getdents64": (217, 61),
        "getcwd": (79, 17), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
        "renameat2": (316, 276), "truncate": (76, 45), "ftruncate": (77, 46), "fsync": (74, 82), "fdatasync": (75, 83),
        "fallocate": (285, 47), "fadvise64": (221, 223), "sendfile": (40, 71), "flock": (73, 32), "umask": (95, 166),
        # waiting
        "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
        "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
        "epoll_pwait": (281, 22), "eventfd2": (290, 19), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
        # memory
        "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233), "msync": (26, 227),
        "brk": (12, 214), "membarrier": (324, 283), "mincore": (27, 232),
        # signals to itself
        "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
        "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None),
        "alarm": (37, None), "setitimer": (38, 103), "getitimer": (36, 102), "kill": (62, 129), "tgkill": (234, 131),
        # threads
        "clone": (56, 220), "futex": (202, 98), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
        "set_tid_address": (218, 96), "rseq": (334, 293), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
        "gettid": (186, 178), "exit": (60, 93), "exit_group": (231, 94), "restart_syscall": (219, 128), "arch_prctl": (158, None),
        "prctl": (157, 167),
        # clocks and facts
        "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
        "getrusage": (98, 165), "sysinfo": (99, 179), "uname": (63, 160), "getrandom": (318, 278), "getpid": (39, 172),
        "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
        "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "getpgrp": (111, None), "getpgid": (121, 155),
        "getsid": (124, 156), "getrlimit": (97, 163), "prlimit64": (302, 261),
        # the pair of connected sockets with which asyncio wakes itself
        "socketpair": (53, 199), "sendto": (44, 206), "recvfrom": (45, 207), "shutdown": (48, 210), "getsockopt": (55, 209),
        "ioctl": (16, 29), "fcntl": (72, 25),
    }
)  # fmt: skip
CLONE3 = 435
"""Its flags are in memory, where a filter cannot look: it is said not to exist, so that the C library falls back to clone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A 32-bit half of an argument, under a mask, must be one of the values."""

    argument: int
    is_high: bool = False
    mask: int = 0xFFFFFFFF
    values: tuple[int, ...]


_CLONE_THREAD = 0x00010000
_PR_NAME = (15, 16)
_PR_SET_VMA = 0x53564D41
_FIONREAD, _FIONBIO, _FIOCLEX, _FIONCLEX, _TCGETS, _TIOCGWINSZ = 0x541B, 0x5421, 0x5451, 0x5450, 0x5401, 0x5413
_AF_UNIX, _SOCK_STREAM = 1, 1


def conditions(process_id: int) -> dict[str, tuple[Condition, ...]]:
    """Conditions by name of the call; all must hold.

    Args:
        process_id: of the process that is to be confined: it may signal itself alone.
    """
    itself = (Condition(argument=0, values=(process_id,)),)
    return {
        "clone": (Condition(argument=0, mask=_CLONE_THREAD, values=(_CLONE_THREAD,)),),
        "kill": itself,
        "tgkill": itself,
        # Above all not PR_SET_PDEATHSIG: with it an answer would outlive its grader.
        "prctl": (Condition(argument=0, values=(*_PR_NAME, _PR_SET_VMA)),),
        "ioctl": (Condition(argument=1, values=(_FIONREAD, _FIONBIO, _FIOCLEX, _FIONCLEX, _TCGETS, _TIOCGWINSZ)),),
        # Duplicates, flags and locks; not F_SETOWN and F_SETSIG, which send signals to others.
        "fcntl": (Condition(argument=1, values=(0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)),),
        # Limits can be read, not set: the new limit is a null pointer.
        "prlimit64": (Condition(argument=2, values=(0,)), Condition(argument=2, is_high=True, values=(0,))),
        # A stream is connected for good; a datagram socket could be turned to another address.
        "socketpair": (Condition(argument=0, values=(_AF_UNIX,)), Condition(argument=1, mask=0xF, values=(_SOCK_STREAM,))),
    }
