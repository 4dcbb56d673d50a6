"""The audit log: what is on disk, damage, other runs, disks that fail."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from shoal_coordinator.rewards.audit_log import LOG_NAME, AuditLog, LogEntry, RouteAction
from shoal_coordinator.rewards.book import RouteBook
from shoal_coordinator.rewards.route_stages import RouteStage

from shoal.errors import ConfigError, StateError
from tests.helpers.route_fakes import add_in, begin, open_book


def entry(seq: int) -> LogEntry:
    return LogEntry(seq=seq, unix_s=1.5, who="ada", why="ünïcode", action=RouteAction.ADD, revision=seq, stage="registered", active=0)


def open_log(folder: Path, run_id: str = "run") -> AuditLog:
    return AuditLog(folder / LOG_NAME, run_id, 1.0)


def test_audit_log_begins_with_the_run_and_makes_its_folder(tmp_path: Path) -> None:
    log = open_log(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / LOG_NAME).read_bytes() == log.entries[0].model_dump_json().encode() + b"\n"
    assert log.entries[0].detail == {"schema_version": 1, "run_id": "run"}
    assert (log.next_seq, log.entries[0].action) == (1, "open")


def test_audit_log_reads_back_what_it_wrote(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for seq in (1, 2, 3):
        log.append(entry(seq))
    log.close()
    log.close()
    again = open_log(tmp_path)
    assert again.entries == log.entries
    assert [json.loads(line)["seq"] for line in (tmp_path / LOG_NAME).read_text().splitlines()] == [0, 1, 2, 3]


def test_audit_log_syncs_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, synced = open_log(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    log.append(entry(1))
    assert synced == [(tmp_path / LOG_NAME).stat().st_size]


def test_audit_log_is_held_by_one_process(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    with pytest.raises(ConfigError, match="in use by another coordinator"):
        open_log(tmp_path)
    log.close()
    open_log(tmp_path).close()


def test_audit_log_that_was_closed_takes_no_line(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.close()
    with pytest.raises(StateError, match="Bad file descriptor"):
        log.append(entry(1))
    assert open_log(tmp_path).next_seq == 1


def test_audit_log_without_locks_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    open_log(tmp_path).append(entry(1))
    assert "audit_log_not_locked" in caplog.text


def test_audit_log_of_another_run_is_moved_aside(tmp_path: Path) -> None:
    for run_id in ("../first", "second", "../first", "second"):
        log = open_log(tmp_path, run_id)
        assert (len(log.entries), log.entries[0].detail["run_id"]) == (1, run_id)
        log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [LOG_NAME, f"{LOG_NAME}.___first", f"{LOG_NAME}.___first.2", f"{LOG_NAME}.second"]
    )


def test_audit_log_cuts_off_a_line_without_its_end(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(entry(1))
    log.close()
    path = tmp_path / LOG_NAME
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"seq":2,"unix')
    again = open_log(tmp_path)
    assert (again.entries, path.read_bytes()) == (log.entries, whole)
    again.append(entry(2))
    assert path.read_bytes().count(b"\n") == 3


def drop_line(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join([*lines[:2], *lines[3:]])


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no JSON": (lambda content: content.replace(b'{"seq":2', b'{"seq"!2'), "line 3 of .*Invalid JSON"),
    "blank line": (lambda content: content.replace(b'{"seq":2', b'\n{"seq":2'), "line 3 of"),
    "binary": (lambda content: content.replace(b'{"seq":2', b"\xff\x00"), "line 3 of"),
    "missing line": (drop_line, "line 3 of .*its seq is 3, which should be 2"),
    "unknown field": (lambda content: content.replace(b'{"seq":2', b'{"x":1,"seq":2'), "line 3 of .*x: Extra inputs"),
    "unknown action": (lambda content: content.replace(b'"action":"ready"', b'"action":"eat"'), "line 4 of .*action"),
    "forbidden stage": (lambda content: content.replace(b'"action":"ready"', b'"action":"drain"'), "line 4 of .*stage is ready"),
    "other stage": (lambda content: content.replace(b'"stage":"ready"', b'"stage":"active"'), "line 4 of .*stage is active"),
    "no stage": (lambda content: content.replace(b'"stage":"ready"', b'"stage":"x"'), "line 4 of .*'x' is not a valid RouteStage"),
    "other active": (
        lambda content: content.replace(b'"stage":"active","active":1', b'"stage":"active","active":0'),
        "line 5 of .*active is 0",
    ),
    "other revision": (lambda content: content.replace(b'"ready","revision":1', b'"ready","revision":7'), "line 4 of .*no revision 7"),
    "bad detail": (lambda content: content.replace(b'"weight":1.0', b'"weight":"x"', 1), "line 2 of .*in its detail"),
    "missing detail": (lambda content: content.replace(b'"label":"label",', b"", 1), "line 2 of .*in its detail"),
    "other schema": (lambda content: content.replace(b'"schema_version":1', b'"schema_version":9'), "line 1 of .*schema_version is 9"),
    "no first line": (lambda content: content.split(b"\n", 1)[1], "line 1 of .*its seq is 1"),
    "second first line": (lambda content: content.replace(b'"action":"ready"', b'"action":"open"'), "line 4 of .*cannot stand here"),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
async def test_audit_log_refuses_damage_and_names_the_line(tmp_path: Path, damage: str) -> None:
    (await begin(tmp_path)).close()
    path = tmp_path / LOG_NAME
    change, message = DAMAGE[damage]
    damaged = change(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match=message):
        RouteBook.open(tmp_path, "run")
    assert path.read_bytes() == damaged, "nobody repairs it by guessing"


def test_audit_log_says_what_to_do_where_it_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot open .*make run\.folder writable"):
        open_log(tmp_path / "file")


class FailingDisk:
    """Fails writes after some bytes, or syncs, while `error` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, error: int) -> None:
        self.is_broken = True
        real_write, real_sync, real_cut = os.write, os.fsync, os.ftruncate

        def write(file: int, line: bytes) -> int:
            if self.is_broken and call == "write":
                if len(line) > 20:
                    return real_write(file, line[:20])
                raise OSError(error, os.strerror(error))
            return real_write(file, line)

        def sync(file: int) -> None:
            if self.is_broken and call in ("sync", "cut"):
                raise OSError(error, os.strerror(error))
            real_sync(file)

        def cut(file: int, size: int) -> None:
            if self.is_broken and call == "cut":
                raise OSError(error, os.strerror(error))
            real_cut(file, size)

        monkeypatch.setattr(os, "write", write)
        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "ftruncate", cut)


@pytest.mark.parametrize(("call", "error"), [("write", errno.ENOSPC), ("sync", errno.EIO), ("cut", errno.EIO)])
async def test_audit_log_on_a_failing_disk_refuses_and_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    book = await begin(tmp_path)
    number = await add_in(book, RouteStage.READY)
    whole, records = (tmp_path / LOG_NAME).read_bytes(), book.records()
    disk = FailingDisk(monkeypatch, call, error)
    for _ in range(2):
        with pytest.raises(StateError, match=f"{os.strerror(error)}.*nothing has changed"):
            await book.activate(number, who="ada", why="try")
        assert (book.records(), book.active_number) == (records, 1)
    if call != "cut":
        assert (tmp_path / LOG_NAME).read_bytes() == whole
    disk.is_broken = False
    await book.activate(number, who="ada", why="again")
    assert (tmp_path / LOG_NAME).read_bytes().startswith(whole)
    assert (tmp_path / LOG_NAME).read_bytes().count(b"\n") == whole.count(b"\n") + 1
    book.close()
    assert open_book(tmp_path).active_number == number
