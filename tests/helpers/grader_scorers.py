"""Scorers that misbehave on demand, for tests of graders: the response says how. Loaded as a file by the service and by graders."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shoal.reward import Row, reward


def _endless(_: str) -> float:
    while True:
        pass


def _hold_memory(_: str) -> float:
    return float(len(bytearray(1 << 40)))


def _segfault(_: str) -> float:
    return float(ctypes.string_at(0)[0])


def _backtrack(_: str) -> float:
    return float(re.match(r"(a+)+$", "a" * 40 + "b") is not None)


def _recurse(_: str) -> float:
    return _recurse(_) + 1.0


def _print(_: str) -> float:
    sys.stdout.write("to standard output\n" * 100)
    sys.stdout.flush()
    os.write(1, b"\x00\x01\x02\x03" * 64)
    assert sys.stdin.read() == ""
    return 1.0


def _fork_and_return(_: str) -> float:
    # Both processes go on as if they were the grader; only one may answer.
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return 1.0 if child else -1.0


def _leave_children(path: str) -> float:
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(60.0)
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(path).write_text(f"{child} {stranger.pid}")
    return 1.0


def _leave_children_and_hang(path: str) -> float:
    _leave_children(path)
    return _endless(path)


def _bomb(path: str) -> float:
    for _ in range(5):
        if os.fork() == 0 and os.getpid() % 3 == 0:
            os.setsid()
    return _endless(path)


def _mark_and_sleep(path: str) -> float:
    Path(path).touch()
    return _sleep("60")


def _alarm(_: str) -> float:
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    return 1.0


def _sleep(seconds: str) -> float:
    time.sleep(float(seconds))
    return 1.0


def _exit(code: str) -> float:
    os._exit(int(code))


def _interrupt(_: str) -> float:
    raise KeyboardInterrupt


DEEDS: dict[str, Callable[[str], float | None]] = {
    "endless": _endless,
    "memory": _hold_memory,
    "segfault": _segfault,
    "backtrack": _backtrack,
    "recurse": _recurse,
    "print": _print,
    "fork": _fork_and_return,
    "children": _leave_children,
    "children_endless": _leave_children_and_hang,
    "bomb": _bomb,
    "mark": _mark_and_sleep,
    "alarm": _alarm,
    "exit": _exit,
    "raise": float,
    "interrupt": _interrupt,
    "sleep": _sleep,
    "pid": lambda _: float(os.getpid()),
    "skip": lambda _: None,
    "nan": lambda _: float("nan"),
}


@reward(name="deeds", version="1")
def deeds(prompt: str, response: str, row: Row) -> float | None:
    """Do what the response says, `deed argument`; the length of the response if it says nothing."""
    deed, _, argument = response.partition(" ")
    return DEEDS[deed](argument) if deed in DEEDS else float(len(response))


@reward(name="deeds_together", version="1", batch=True)
def deeds_together(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float | None]:
    """As deeds, for a batch; each score is the number of samples in the call, as far as a deed says nothing else."""
    return [float(len(responses)) if score is None else score for score in map(_deed_of, responses)]


def _deed_of(response: str) -> float | None:
    deed, _, argument = response.partition(" ")
    return DEEDS[deed](argument) if deed in DEEDS else None


@reward(name="short_list", version="1", batch=True)
def short_list(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """One score, however many samples."""
    return [1.0]


@reward(name="ids", version="1", needs_token_ids=True)
def ids(prompt: str, response: str, row: Row) -> list[float]:
    """The response's ids, plus the sum of the prompt's."""
    prompt_ids, response_ids = row["prompt_ids"], row["response_ids"]
    assert isinstance(prompt_ids, list)
    assert isinstance(response_ids, list)
    return [float(sum(prompt_ids) + token) for token in response_ids]


@reward(name="row", version="1")
def row_size(prompt: str, response: str, row: Row) -> dict[str, float]:
    """Sizes of what arrived."""
    return {"response": float(len(response)), "row": float(len(row)), "nulls": float(response.count("\0"))}


_prepared: list[float] = []


def _prepare_slowly() -> None:
    time.sleep(0.6)
    _prepared.append(1.0)


@reward(name="prepared", version="1", prepare=_prepare_slowly)
def prepared(prompt: str, response: str, row: Row) -> float:
    """How often prepare ran in this process."""
    return float(len(_prepared))


def _prepare_in_vain() -> None:
    raise RuntimeError("no weights in sight")


@reward(name="unprepared", version="1", prepare=_prepare_in_vain)
def unprepared(prompt: str, response: str, row: Row) -> float:
    """Never called."""
    return 1.0


def _prepare_for_ever() -> None:
    _endless("")


@reward(name="never_prepared", version="1", prepare=_prepare_for_ever)
def never_prepared(prompt: str, response: str, row: Row) -> float:
    """Never called."""
    return 1.0
