"""Runs the tests of a row against an answer.

A test that the answer breaks (it ends, hangs, or gives too much) fails, and the next one gets fresh processes. A sandbox that does not
start raises: it says nothing about the answer.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING, Any

from shoal_reward.code.cases import CallCase, Case, ProgramCase, ScriptCase
from shoal_reward.code.compare import outputs_agree, values_agree
from shoal_reward.code.inside.wire import encode
from shoal_reward.code.sandbox import Pipes, SandboxedProcess, program_pipe
from shoal_reward.code.settings import CodeSettings
from shoal_reward.code.watch import AnswerError, Watch, write_some

if TYPE_CHECKING:
    from shoal_reward.code.inside.wire import Message

_CHUNK_BYTES = 1 << 16
_NAMES_BYTES = 1 << 20
_VERDICT_BYTES = 1 << 16

RunTest = Callable[[Any, float], bool]
"""Test and seconds for it -> whether it passes; AnswerError: it does not, and the processes cannot be used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """passed: per test that was run; stopping early leaves the last ones out. problem: of the first that failed."""

    passed: tuple[bool, ...]
    problem: str = ""


class _LoadError(AnswerError):
    """The answer does not even load; no test of it can pass."""


def check(source: str, cases: Sequence[Case], settings: CodeSettings, *, is_stopped_by_failure: bool) -> Checked:
    """Run tests one after another.

    Args:
        source: of the answer.
        cases: of one kind.
        settings: limits and tolerance.
        is_stopped_by_failure: leave out what follows a failure.
    Raises: SandboxError: a sandbox cannot be started.
    """
    passed: list[bool] = []
    problems: list[str] = []
    with _Tries(source, cases, settings) as tries:
        for index, case in enumerate(cases):
            try:
                passed.append(tries.run(case, len(cases) - index))
            except AnswerError as error:
                problems.append(f"test {index}: {error}")
                passed.append(False)
            if not passed[-1] and (is_stopped_by_failure or tries.is_hopeless):
                break
    if tries.is_hopeless and not is_stopped_by_failure:
        passed += [False] * (len(cases) - len(passed))
    return Checked(passed=tuple(passed), problem=problems[0] if problems else "")


class _Tries:
    """The processes of an answer, made again after each test that breaks them, within the time of the whole answer."""

    def __init__(self, source: str, cases: Sequence[Case], settings: CodeSettings) -> None:
        self._source = source
        self._open = {ProgramCase: _programs, CallCase: _calls, ScriptCase: _scripts}[type(cases[0])]
        self._settings = settings
        self._remaining_s = settings.limits.answer_s
        self._stack = contextlib.ExitStack()
        self._run: RunTest | None = None
        self.is_hopeless = False

    def __enter__(self) -> _Tries:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, case: Case, num_tests: int) -> bool:
        if self._remaining_s <= 0:
            self.is_hopeless = True
            raise AnswerError(f"the tests before it took the {self._settings.limits.answer_s:.3g} s of the answer")
        try:
            if self._run is None:
                self._run = self._stack.enter_context(self._open(self._source, self._settings, num_tests))
            return self._timed(self._run, case)
        except AnswerError as error:
            self.is_hopeless = isinstance(error, _LoadError)
            self._run = None
            self._stack.close()
            raise

    def _timed(self, run: RunTest, case: Case) -> bool:
        start = time.monotonic()
        try:
            return run(case, min(self._settings.limits.test_s, self._remaining_s))
        finally:
            self._remaining_s -= time.monotonic() - start


@contextlib.contextmanager
def _programs(source: str, settings: CodeSettings, num_tests: int) -> Iterator[RunTest]:
    """A process per test: programs are run from their start."""

    def run(case: ProgramCase, seconds: float) -> bool:
        with contextlib.ExitStack() as stack:
            stdin, to_stdin = stack.enter_context(program_pipe())
            from_stdout, stdout = stack.enter_context(program_pipe())
            pipes = Pipes(stdin=stdin.fileno(), stdout=stdout.fileno())
            process = stack.enter_context(SandboxedProcess("program", settings, num_tests=1, pipes=pipes))
            stdin.close()
            stdout.close()
            watch = process.watch(seconds)
            watch.write(process.requests, {"source": source})
            output = _converse(watch, to_stdin, from_stdout, case.input.encode("utf-8", "replace"), settings.limits.output_bytes)
            if (status := process.wait(watch)) != 0:
                raise AnswerError(f"it ended with status {status}")
        return outputs_agree(output.decode("utf-8", "replace"), case.output, settings.relative_tolerance)

    yield run


def _converse(watch: Watch, to_stdin: FileIO, from_stdout: FileIO, text: bytes, max_bytes: int) -> bytes:
    """Write a program's input while reading its output: it may stop in either until the other is served."""
    view = memoryview(text)
    output = bytearray()
    writer, reader = to_stdin.fileno(), from_stdout.fileno()
    interests = {writer: select.POLLOUT, reader: select.POLLIN}
    for fd in interests:
        os.set_blocking(fd, False)
    while reader in interests:
        ready = watch.wait(interests)
        if writer in ready and not (view := _fed(writer, view)):
            to_stdin.close()
            del interests[writer]
        if reader in ready:
            output += (part := os.read(reader, _CHUNK_BYTES))
            if len(output) > max_bytes:
                raise AnswerError(f"it printed more than {max_bytes} bytes")
            if not part:
                del interests[reader]
    return bytes(output)


def _fed(writer: int, view: memoryview) -> memoryview:
    """What is left of the input; nothing if the program does not want the rest, which is no fault."""
    try:
        return view[write_some(writer, view) :] if view else view
    except AnswerError:
        return view[:0]


@contextlib.contextmanager
def _calls(source: str, settings: CodeSettings, num_tests: int) -> Iterator[RunTest]:
    """One process for all calls; expected values stay in this one."""
    with SandboxedProcess("answer", settings, num_tests=num_tests) as process:
        is_loaded = False

        def run(case: CallCase, seconds: float) -> bool:
            nonlocal is_loaded
            watch = process.watch(seconds)
            if not is_loaded:
                _load(process, watch, source)
                is_loaded = True
            args = [encode(each, _refuse) for each in case.args]
            kwargs = {name: encode(each, _refuse) for name, each in case.kwargs.items()}
            watch.write(process.requests, {"do": "call", "on": {"name": case.function}, "args": args, "kwargs": kwargs})
            reply = watch.read(process.replies, settings.limits.output_bytes)
            watch.look()
            return "value" in reply and _agrees(reply["value"], case.output, settings.relative_tolerance)

        yield run


@contextlib.contextmanager
def _scripts(source: str, settings: CodeSettings, num_tests: int) -> Iterator[RunTest]:
    """Two processes: the tests call the answer through its pipes, and their verdict comes through a pipe that it does not have."""
    # Both start at the same time.
    with SandboxedProcess("answer", settings, num_tests=num_tests, is_awaited=False) as answer:
        joined = Pipes(extra={"answer_requests": answer.requests, "answer_replies": answer.replies})
        with SandboxedProcess("tester", settings, num_tests=num_tests, pipes=joined) as tester:
            answer.await_ready()
            is_loaded = False

            def run(case: ScriptCase, seconds: float) -> bool:
                nonlocal is_loaded
                watch = tester.watch(seconds, answer)
                if not is_loaded:
                    names = _load(answer, watch, source)
                    answer.hand_over()
                    watch.write(tester.requests, {"names": names})
                    is_loaded = True
                watch.write(tester.requests, {"test": case.source, "entry_point": case.entry_point})
                verdict = watch.read(tester.replies, _VERDICT_BYTES)
                watch.look()
                if verdict["is_broken"]:
                    raise AnswerError(verdict["text"])
                return verdict["passed"] is True

            yield run


def _load(process: SandboxedProcess, watch: Watch, source: str) -> Message:
    """Have the answer run as a module; the names that it has.

    Raises: _LoadError: it ends with an error, or does not end.
    """
    try:
        watch.write(process.requests, {"source": source})
        loaded = watch.read(process.replies, _NAMES_BYTES)
    except AnswerError as error:
        raise _LoadError(f"when it was loaded: {error}") from None
    if not isinstance(names := loaded.get("names"), dict):
        raise _LoadError(f"when it was loaded: {loaded.get('raised')}: {loaded.get('text')}")
    return names


def _agrees(value: object, expected: object, relative_tolerance: float) -> bool:
    try:
        return values_agree(value, expected, relative_tolerance)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        # What the process wrote is no value.
        return False


def _refuse(value: object) -> Message:
    raise TypeError(f"a {type(value).__name__} is no plain value")
