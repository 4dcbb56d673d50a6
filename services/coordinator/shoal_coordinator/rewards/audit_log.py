"""Who changed the reward route, when and why: one JSON object a line in <run.folder>/reward_routes.jsonl, which is written ahead.

A line is on disk (fsync) before what it says takes effect, and what is active after a restart is what the lines say. A last line without
its newline was never acknowledged: it is cut off. Any other damage is refused, since nobody could know what is active.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import ConfigError, StateError
from shoal.telemetry.logs import get_logger

log = get_logger(__name__)

LOG_NAME = "reward_routes.jsonl"
SCHEMA_VERSION = 1
COORDINATOR = "coordinator"
"""Who did what nobody asked for by hand."""


class RouteAction(StrEnum):
    """What a line says. OPEN is the first line of every log."""

    OPEN = "open"
    ADD = "add"
    CHECK = "check"
    READY = "ready"
    REJECT = "reject"
    SHADOW = "shadow"
    STOP_SHADOW = "stop_shadow"
    ARM = "arm"
    ACTIVATE = "activate"
    ROLLBACK = "rollback"
    DRAIN = "drain"
    RETIRE = "retire"


class LogEntry(BaseModel):
    """One line: an action on a revision, the stage that the revision has then, and the revision that is active then (0: none)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    seq: int = Field(ge=0)
    unix_s: float
    who: str
    why: str
    action: RouteAction
    revision: int = Field(ge=0)
    stage: str
    active: int = Field(ge=0)
    detail: dict[str, Any] = Field(default_factory=dict)


class AuditLog:
    """The open file; one process holds it at a time. Its methods block: call them in a thread where that matters.

    Args:
        path: the file; created with its folder if it is missing.
        run_id: a log of another run is moved aside, as <name>.<its run>.
    Raises: ConfigError: the file cannot be used; says which line and what to do.
    """

    def __init__(self, path: Path, run_id: str, now_unix_s: float) -> None:
        self.path = path
        # A line is written in a thread; the file must not be closed, and its number given to another, in the middle of it.
        self._writing = threading.Lock()
        self._file = _open_locked(path)
        try:
            self._entries = _replay(path, self._file)
            if self._entries and (other := _run_of(self._entries[0], path)) != run_id:
                self._start_anew(other)
            self._size = os.fstat(self._file).st_size
            self._is_dirty = False
            if not self._entries:
                self.append(_first_entry(run_id, now_unix_s))
                _sync_folder(path.parent)
        except BaseException:  # whatever it is, the file must not stay open, nor its lock be held
            os.close(self._file)
            raise

    @property
    def entries(self) -> tuple[LogEntry, ...]:
        """Every line, oldest first."""
        return tuple(self._entries)

    @property
    def next_seq(self) -> int:
        """Number of the next line."""
        return len(self._entries)

    def append(self, entry: LogEntry) -> None:
        """Write a line and wait until the disk has it.

        Raises: StateError: it does not; the file is as it was.
        """
        line = entry.model_dump_json().encode() + b"\n"
        with self._writing:
            try:
                self._write(line)
            except OSError as error:
                self._try_cut_back()
                raise StateError(
                    f"cannot write {self.path} ({error.strerror}): nothing has changed; make room or repair the disk, then try again"
                ) from error
            self._size += len(line)
            self._is_dirty = False
            self._entries.append(entry)

    def close(self) -> None:
        """Let go of the file, after the line that is being written; closing twice is harmless."""
        with self._writing:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _write(self, line: bytes) -> None:
        if self._is_dirty:
            self._cut_back()
        self._is_dirty = True
        _write_all(self._file, line)
        os.fsync(self._file)

    def _try_cut_back(self) -> None:
        try:
            self._cut_back()
        except OSError as error:
            # The next append tries again before it writes: half a line must not stand in the middle of the file.
            log.error("audit_log_not_cut", path=str(self.path), error=str(error))

    def _cut_back(self) -> None:
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)
        self._is_dirty = False

    def _start_anew(self, other_run: str) -> None:
        aside = _free_name(self.path, other_run)
        log.warning("audit_log_of_other_run", path=str(self.path), other_run=other_run, moved_to=str(aside))
        self.path.rename(aside)
        os.close(self._file)
        self._file = _open_locked(self.path)
        self._entries = []


def _open_locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot open {path} ({error.strerror}): make run.folder writable, or choose another") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise ConfigError(f"{path} is in use by another coordinator: stop that one, or choose another run.folder") from error
    except OSError as error:  # a network file system without locks
        log.warning("audit_log_not_locked", path=str(path), error=str(error))
    return file


def _replay(path: Path, file: int) -> list[LogEntry]:
    with os.fdopen(os.dup(file), "rb") as reader:
        reader.seek(0)
        content = reader.read()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        log.warning("audit_log_torn", path=str(path), cut_bytes=len(content) - whole)
        os.ftruncate(file, whole)
        os.fsync(file)
    lines = content[:whole].split(b"\n")[:-1]
    return [_parse(path, number, line) for number, line in enumerate(lines)]


def _parse(path: Path, seq: int, line: bytes) -> LogEntry:
    try:
        entry = LogEntry.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]
        raise damaged(path, seq, f"{'.'.join(map(str, problem['loc'])) or 'line'}: {problem['msg']}") from error
    if entry.seq != seq:
        raise damaged(path, seq, f"its seq is {entry.seq}, which should be {seq}")
    if (entry.action is RouteAction.OPEN) != (seq == 0):
        raise damaged(path, seq, f"action {entry.action!s} cannot stand here")
    return entry


def damaged(path: Path, seq: int, what: str) -> ConfigError:
    """The error for a line that cannot be used; lines count from 1."""
    return ConfigError(
        f"line {seq + 1} of {path} cannot be used ({what}): bring back the file as it was written; without it nobody knows which reward "
        "was active. To begin anew with the configuration's reward, move the file away"
    )


def _run_of(first: LogEntry, path: Path) -> str:
    detail: Mapping[str, object] = first.detail
    if detail.get("schema_version") != SCHEMA_VERSION:
        raise damaged(path, 0, f"schema_version is {detail.get('schema_version')!r}, this program reads {SCHEMA_VERSION}")
    return str(detail.get("run_id"))


def _first_entry(run_id: str, now_unix_s: float) -> LogEntry:
    return LogEntry(
        seq=0,
        unix_s=now_unix_s,
        who=COORDINATOR,
        why="the run has no log yet",
        action=RouteAction.OPEN,
        revision=0,
        stage="",
        active=0,
        detail={"schema_version": SCHEMA_VERSION, "run_id": run_id},
    )


def _write_all(file: int, line: bytes) -> None:
    """A full disk may take a part of a line."""
    while line:
        line = line[os.write(file, line) :]


def _sync_folder(folder: Path) -> None:
    """A new file's name is on disk only with its folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free_name(path: Path, run_id: str) -> Path:
    safe = "".join(char if char.isalnum() or char in "-_" else "_" for char in run_id)[:64]
    candidate, number = path.with_name(f"{path.name}.{safe}"), 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{safe}.{number}")
    return candidate
