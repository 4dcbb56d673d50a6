"""Starts, feeds and ends sandboxed processes: one interpreter each, without rights, tied to this process's life.

What confines them runs inside (`inside/boot.py`); time, output and files are bounded from here. docs/code-sandbox.md says which
mechanism holds what.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType

from shoal.errors import InternalError
from shoal_reward.code.seccomp import AUDIT_ARCHES, filter_code
from shoal_reward.code.settings import CodeSettings
from shoal_reward.code.watch import AnswerError, Watch

_LOG = logging.getLogger(__name__)
_BOOT = str(Path(__file__).parent / "inside" / "boot.py")
_PREFIX = "shoal-code-"
_OPEN_FILES = 64
_MESSAGE_BYTES = 64 << 20
"""Of a message to a sandboxed process: sources and tests are bounded where they come from."""

# Above what systems give to people, services and containers, below the end of the 31 bits that every tool takes.
_FIRST_USER = 1_879_048_192
_USERS_PER_PROCESS = 64
_NOBODY = 65534
_counter = itertools.count()


class SandboxError(InternalError):
    """A sandbox could not be started: no answer is to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipes:
    """Descriptors that a process gets beside its own pipes. extra: name in its plan -> descriptor; stdin, stdout: None is nothing."""

    stdin: int | None = None
    stdout: int | None = None
    extra: Mapping[str, int] | None = None


NO_PIPES = Pipes()


class SandboxedProcess:
    """One interpreter that plays a role: `program`, `answer` or `tester`. Leaving the `with` ends it and removes its folder.

    requests: pipe to it. replies: pipe from it. folder: the only one that it can write to. holds: what confines it.
    """

    def __init__(self, role: str, settings: CodeSettings, *, num_tests: int, pipes: Pipes = NO_PIPES, is_awaited: bool = True) -> None:
        """Start it and wait until it is confined.

        Args:
            role: a module of `inside` with a `play`.
            settings: its limits.
            num_tests: that it may run; each has the processor time of one.
            pipes: more descriptors for it.
            is_awaited: wait here; otherwise `await_ready` must be called before anything is asked of it.
        Raises: SandboxError: it cannot be started.
        """
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._undo = contextlib.ExitStack()
        try:
            self._open()
            self._start(role, num_tests, pipes)
            self.holds = self.await_ready() if is_awaited else {}
        except OSError as error:
            self.close()
            raise SandboxError(f"the sandbox of an answer could not be started: {error}") from error
        except BaseException:  # an interrupt included: no process of an answer may be left
            self.close()
            raise

    def __enter__(self) -> SandboxedProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def await_ready(self) -> dict[str, object]:
        """Wait until it is confined.

        Returns: what confines it.
        Raises: SandboxError: it is not, or not in time.
        """
        try:
            message = self.watch(self._settings.limits.start_s).read(self.replies, _MESSAGE_BYTES)
        except AnswerError as error:
            raise SandboxError(f"the sandbox of an answer could not be started: {error}; is there memory and time left?") from None
        if "ready" not in message:
            raise SandboxError(f"the sandbox of an answer could not be started: {message.get('failed')}")
        holds: dict[str, object] = message["ready"]
        _say_what_is_missing(bool(holds["landlock"]) or not self._settings.use_landlock, bool(holds["seccomp"]))
        return holds

    def watch(self, seconds: float, *others: SandboxedProcess) -> Watch:
        """Bound what follows. Args: seconds: from now. others: whose folders are looked at too."""
        return Watch(folders=[self.folder, *(other.folder for other in others)], limits=self._settings.limits, seconds=seconds)

    def hand_over(self) -> None:
        """Leave its pipes to another process, which was started with them and waits where this one polls."""
        for fd in (self.requests, self.replies):
            os.set_blocking(fd, True)

    def wait(self, watch: Watch) -> int:
        """Wait until it has ended; its exit status, negative for a signal.

        Raises: AnswerError: it does not end in time, or its folder holds too much.
        """
        assert self._process is not None  # noqa: S101 - started
        try:
            status = self._process.wait(watch.remaining_s())
        except subprocess.TimeoutExpired:
            raise AnswerError("it gave its output, but did not end in time") from None
        watch.look()
        return status

    def close(self) -> None:
        """End it with everything of it, and remove its folder; may be called again."""
        # The number of a process that was waited for may by then be somebody else's.
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._undo.close()

    def _open(self) -> None:
        self.folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        self._undo.callback(_remove, self.folder)
        self._user = _next_user() if os.getuid() == 0 else None
        if self._user is not None:
            _give(self.folder, self._user)

    def _start(self, role: str, num_tests: int, pipes: Pipes) -> None:
        theirs_in, requests = self._undo.enter_context(_pipe())
        replies, theirs_out = self._undo.enter_context(_pipe())
        self.requests, self.replies = requests.fileno(), replies.fileno()
        extra = dict(pipes.extra or {})
        plan = self._plan(role, num_tests) | {"requests": theirs_in.fileno(), "replies": theirs_out.fileno()} | extra
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and our own file
            [sys.executable, "-I", "-S", "-B", _BOOT, json.dumps(plan)],
            stdin=subprocess.DEVNULL if pipes.stdin is None else pipes.stdin,
            stdout=subprocess.DEVNULL if pipes.stdout is None else pipes.stdout,
            stderr=subprocess.DEVNULL,
            env={},
            cwd=self.folder,
            pass_fds=[theirs_in.fileno(), theirs_out.fileno(), *extra.values()],
            start_new_session=True,
        )
        for end in (theirs_in, theirs_out):
            end.close()
        for fd in (self.requests, self.replies):
            os.set_blocking(fd, False)

    def _plan(self, role: str, num_tests: int) -> dict[str, object]:
        limits = self._settings.limits
        own = 0 if self._user is not None else _tasks_of(os.getuid())
        return {
            "role": role,
            "parent": os.getpid(),
            "user": self._user,
            "folder": self.folder,
            "library_folders": list(self._settings.library_folders),
            "landlock": self._settings.use_landlock,
            "is_weaker_allowed": self._settings.allow_weaker_sandbox,
            "max_request_bytes": _MESSAGE_BYTES,
            "max_reply_bytes": limits.output_bytes,
            "filter": _filter_in_hex(),
            "tasks_without_filter": own + 1,
            "limits": {
                "cpu_s": limits.cpu_s * num_tests,
                "memory_bytes": limits.memory_bytes,
                "file_bytes": limits.file_bytes,
                "open_files": _OPEN_FILES,
                "tasks": own + limits.threads,
                "core_bytes": 0,
            },
        }


@contextlib.contextmanager
def program_pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """A pipe (read, write), closed at the end; the sandbox's user may open it again by /dev/stdin and /dev/stdout."""
    with _pipe() as ends:
        if os.getuid() == 0:
            for end in ends:
                os.fchmod(end.fileno(), 0o666)
        yield ends


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[FileIO, FileIO]]:
    # File objects, since a number that is closed twice may by then be somebody else's.
    reader, writer = os.pipe()
    with FileIO(reader, "rb") as read_end, FileIO(writer, "wb") as write_end:
        yield read_end, write_end


def remove_left_behind() -> None:
    """Remove the folders of sandboxes whose starter was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and not folder.is_symlink():
            _remove(str(folder))


def _remove(folder: str) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except (OSError, RecursionError) as error:
        _LOG.warning("the folder of a sandbox could not be removed", extra={"folder": folder, "error": repr(error)})


def _give(folder: str, user: int) -> None:
    try:
        os.chown(folder, user, user)
    except PermissionError as error:
        raise OSError(f"root may not change its user here (cap_drop?), run the service as a user other than root ({error})") from error


def _next_user() -> int:
    """A user id that no other sandbox has, so that none can signal, read or starve another; nobody's where ids are few.

    Raises: OSError: this user namespace has neither.
    """
    own = _FIRST_USER + os.getpid() % (1 << 21) * _USERS_PER_PROCESS + next(_counter) % _USERS_PER_PROCESS
    for user in (own, _NOBODY):
        if any(first <= user < first + count for first, count in _mapped_users()):
            return user
    raise OSError("this user namespace has no id for an unprivileged user: run the service as a user other than root")


@functools.lru_cache(maxsize=1)
def _filter_in_hex() -> str:
    # The kernel refuses an empty one.
    return filter_code(platform.machine()).hex() if platform.machine() in AUDIT_ARCHES else ""


@functools.lru_cache(maxsize=1)
def _mapped_users() -> Sequence[tuple[int, int]]:
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    return [(int(first), int(count)) for first, _, count in (line.split() for line in lines)]


def _tasks_of(user: int) -> int:
    """Threads of a user, for a limit that counts all of them."""
    count = 0
    for process in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if process.name.isdigit() and process.stat().st_uid == user:
                count += len(os.listdir(f"/proc/{process.name}/task"))
    return count


@functools.lru_cache(maxsize=4)
def _say_what_is_missing(has_landlock: bool, has_filter: bool) -> None:
    """Once per process and finding."""
    if not has_landlock:
        _LOG.warning("code sandbox without Landlock: answers can read every file that their user can; see docs/code-sandbox.md")
    if not has_filter:
        _LOG.warning("code sandbox without a system call filter: answers can use the network; see docs/code-sandbox.md")
