"""Every command of the book, every one that is refused, pins, and what a coordinator that starts again finds."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from shoal_coordinator.rewards.audit_log import LOG_NAME, AuditLog, LogEntry
from shoal_coordinator.rewards.book import MAX_OPEN_REVISIONS, RouteBook
from shoal_coordinator.rewards.gates import Gates
from shoal_coordinator.rewards.route_stages import TRANSITIONS, RouteStage

from shoal.errors import CapacityError, InvalidRequestError, NotFoundError, StateError
from tests.helpers.route_fakes import WHO, WHY, add_in, begin, component, open_book

GATES = Gates(min_samples=10, max_p99_ms=5.0)

Command = Callable[[RouteBook, int], Awaitable[object]]

COMMANDS: dict[str, tuple[Command, frozenset[RouteStage]]] = {
    "check": (lambda book, number: book.note_checked(number, [component()]), frozenset({RouteStage.REGISTERED})),
    "ready": (lambda book, number: book.note_ready(number), frozenset({RouteStage.CHECKED})),
    "reject": (lambda book, number: book.reject(number, "bad"), frozenset({RouteStage.REGISTERED, RouteStage.CHECKED})),
    "shadow": (lambda book, number: book.shadow(number, 0.1, who=WHO, why=WHY), frozenset({RouteStage.READY, RouteStage.SHADOW})),
    "stop_shadow": (lambda book, number: book.stop_shadow(number, who=WHO, why=WHY), frozenset({RouteStage.SHADOW})),
    "arm": (lambda book, number: book.arm(number, GATES, who=WHO, why=WHY), frozenset({RouteStage.SHADOW})),
    "activate": (
        lambda book, number: book.activate(number, who=WHO, why=WHY),
        frozenset({RouteStage.READY, RouteStage.SHADOW, RouteStage.DRAINING, RouteStage.DRAINED}),
    ),
    "retire": (
        lambda book, number: book.retire(number, who=WHO, why=WHY),
        frozenset(stage for stage in RouteStage if RouteStage.RETIRED in TRANSITIONS[stage]),
    ),
}


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / LOG_NAME).read_text().splitlines()]


@pytest.mark.parametrize("stage", list(RouteStage))
@pytest.mark.parametrize("name", list(COMMANDS))
async def test_book_carries_out_what_the_stage_allows_and_refuses_the_rest(tmp_path: Path, name: str, stage: RouteStage) -> None:
    book = await begin(tmp_path)
    number = 1 if stage is RouteStage.ACTIVE else await add_in(book, stage)
    pin = book.pin()  # keeps what is active from being drained
    before, records = lines(tmp_path), book.records()
    command, allowed = COMMANDS[name]
    if stage in allowed:
        await command(book, number)
        assert len(lines(tmp_path)) == len(before) + 1
        assert lines(tmp_path)[-1]["action"] == name
        assert lines(tmp_path)[-1]["stage"] == book.stage(number)
    else:
        with pytest.raises(StateError, match=f"revision {number} of the reward route"):
            await command(book, number)
        assert (lines(tmp_path), book.records()) == (before, records)
    pin.release()
    book.close()
    assert open_book(tmp_path).records() == book.records()


@pytest.mark.parametrize("name", list(COMMANDS))
async def test_book_refuses_a_revision_that_does_not_exist(tmp_path: Path, name: str) -> None:
    book = await begin(tmp_path)
    with pytest.raises(NotFoundError, match="no revision 9; there is: 1"):
        await COMMANDS[name][0](book, 9)


async def test_book_pins_groups_to_what_was_active_when_they_were_issued(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    second = await add_in(book, RouteStage.READY)
    old, other = book.pin(), book.pin()
    await book.activate(second, who=WHO, why=WHY)
    new = book.pin()
    assert (old.revision.number, new.revision.number, book.active.number) == (1, 2, 2)
    assert book.num_open_groups(1) == 2
    old.release()
    old.release()
    await book.drain()
    assert (book.num_open_groups(1), book.stage(1)) == (1, RouteStage.DRAINING)
    other.release()
    await book.drain()
    assert book.stage(1) is RouteStage.DRAINED
    assert lines(tmp_path)[-1]["action"] == "drain"


async def test_book_wakes_whoever_waits_when_the_last_pin_is_released(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    first, second = book.pin(), book.pin()
    waiting = asyncio.create_task(book.wait_for_change())
    await asyncio.sleep(0)
    first.release()
    await asyncio.sleep(0)
    assert not waiting.done()
    second.release()
    await asyncio.wait_for(waiting, 5.0)


async def test_book_lets_a_waiter_be_cancelled_at_the_moment_of_a_change(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    pin = book.pin()
    waiting = asyncio.create_task(book.wait_for_change(10.0))
    await asyncio.sleep(0)
    pin.release()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_book_without_a_revision_has_nothing_to_pin(tmp_path: Path) -> None:
    book = open_book(tmp_path)
    with pytest.raises(StateError, match="no revision of the reward route is active yet"):
        book.pin()
    assert (book.active_number, book.previous_number, book.shadows()) == (0, 0, ())
    with pytest.raises(StateError, match="nothing to roll back to"):
        await book.rollback(who=WHO, why=WHY)


async def test_book_rolls_back_to_what_was_active_before_and_back_again(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    for _ in range(2):
        await book.activate(await add_in(book, RouteStage.READY), who=WHO, why=WHY)
    assert (await book.rollback(who=WHO, why=WHY)).number == 2
    assert (await book.rollback(who=WHO, why=WHY)).number == 3
    await book.activate(1, who=WHO, why="further back")
    assert book.previous_number == 3
    book.close()
    again = open_book(tmp_path)
    assert (again.active_number, again.previous_number) == (1, 3)


async def test_book_does_not_roll_back_to_what_is_retired(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    await book.activate(await add_in(book, RouteStage.READY), who=WHO, why=WHY)
    await book.retire(1, who=WHO, why=WHY)
    with pytest.raises(StateError, match=r"revision 1 .* cannot go from retired to active"):
        await book.rollback(who=WHO, why=WHY)
    assert book.active_number == 2


async def test_book_swaps_in_one_line(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    second = await add_in(book, RouteStage.SHADOW)
    pin = book.pin()
    seen: list[tuple[int, list[RouteStage]]] = []
    book.subscribe(lambda entry: seen.append((entry.active, [record.stage for record in book.records()])))
    before = len(lines(tmp_path))
    await book.activate(second, who=WHO, why=WHY)
    assert len(lines(tmp_path)) == before + 1
    assert seen == [(2, [RouteStage.DRAINING, RouteStage.ACTIVE])]
    pin.release()


async def test_book_shadows_by_share_until_it_stops(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    number = await add_in(book, RouteStage.SHADOW)
    await book.arm(number, GATES, who="ci", why="gates")
    since = book.record(number).stage_since_unix_s
    await book.shadow(number, 0.25, who=WHO, why="less")
    assert book.shadows() == ((book.revision(number), 0.25),)
    assert (book.record(number).gates, book.record(number).armed_by) == (GATES, ("ci", "gates"))
    assert book.record(number).stage_since_unix_s == since
    await book.stop_shadow(number, who=WHO, why=WHY)
    record = book.record(number)
    assert (book.shadows(), record.gates, record.shadow_share, record.stage) == ((), None, None, RouteStage.READY)


@pytest.mark.parametrize("share", [-0.1, 0.0, 1.1, float("nan")])
async def test_book_refuses_a_share_that_is_none(tmp_path: Path, share: float) -> None:
    book = await begin(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"share is .*; give a number above 0"):
        await book.shadow(await add_in(book, RouteStage.READY), share, who=WHO, why=WHY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"who": ""}, "who has 0 characters"),
        ({"why": "   "}, "why has 3 characters"),
        ({"who": "a" * 65}, "who has 65 characters"),
        ({"why": "a" * 501}, "why has 501 characters"),
        ({"who": "a\nb"}, "control characters"),
        ({"why": "\x1b[31m"}, "control characters"),
        ({"why": "\ud800"}, "control characters"),
        ({"label": "a\tb"}, "label .* control characters"),
        ({"components": []}, "components has 0 entries"),
        ({"components": [component(weight=float("inf"))]}, "component 1 .'math'. cannot be weighed: weight is inf"),
        ({"components": [component(weight=-1e39)]}, "weight is -1e.39: float32 cannot hold it"),
        ({"components": [component(parts={"a": float("nan")})]}, "weight is nan"),
        ({"components": [component(parts={"a\n": 1.0})]}, "name of its parts .* control characters"),
        ({"components": [component(parts={"": 1.0})]}, "name of its parts has 0 characters"),
        ({"components": [component(sources=("a\0",))]}, "name of its sources .* control characters"),
        ({"components": [component(sources=("a" * 129,))]}, "name of its sources has 129 characters"),
        ({"components": [component(scorer="m\x1b[31m")]}, "is no name of a scorer"),
        ({"components": [component(scorer="mäth")]}, "is no name of a scorer"),
        ({"components": [component(version="../1")]}, "has version '../1'; give a letter or digit"),
        ({"components": [component(timeout_s=0.0)]}, "timeout_s 0.0"),
        ({"components": [component(scorer="")]}, "names no scorer"),
        ({"components": [component(is_required=False)]}, "no component is required"),
        ({"components": [component(), component(weight=2.0)]}, "component 2 .* the same rows twice"),
        ({"components": [component(sources=("a", "b")), component(sources=("b",))]}, "the same rows twice"),
        ({"addresses": ["a:1"] * 65}, "addresses has 65 entries"),
    ],
)
async def test_book_refuses_a_revision_that_cannot_be(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    book = open_book(tmp_path)
    good: dict[str, object] = {"label": "l", "components": [component()], "who": WHO, "why": WHY}
    with pytest.raises(InvalidRequestError, match=message):
        await book.add(**(good | fields))  # type: ignore[arg-type]
    assert (len(lines(tmp_path)), book.records()) == (1, ())


async def test_book_takes_one_scorer_for_different_rows(tmp_path: Path) -> None:
    book = open_book(tmp_path)
    components = [component(sources=("a",)), component(sources=("b",), weight=2.0), component(version="2")]
    assert (await book.add("l", components, who=WHO, why=WHY)).components == tuple(components)


async def test_book_bounds_open_revisions(tmp_path: Path) -> None:
    book = open_book(tmp_path)
    for _ in range(MAX_OPEN_REVISIONS):
        await add_in(book, RouteStage.REGISTERED)
    with pytest.raises(CapacityError, match="retire some"):
        await add_in(book, RouteStage.REGISTERED)
    await book.retire(1, who=WHO, why=WHY)
    assert await add_in(book, RouteStage.REGISTERED) == MAX_OPEN_REVISIONS + 1


async def test_book_asks_static_servers_until_their_revisions_are_over(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    for addresses in (["b:2", "a:1"], ["a:1"]):
        await book.add("l", [component()], addresses=addresses, who=WHO, why=WHY)
    assert book.addresses() == ("a:1", "b:2")
    await book.retire(2, who=WHO, why=WHY)
    assert book.addresses() == ("a:1",)
    await book.reject(3, "bad")
    assert book.addresses() == ()


async def test_book_lets_one_of_two_activations_at_once_win(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    number = await add_in(book, RouteStage.READY)
    both = await asyncio.gather(*(book.activate(number, who=who, why=WHY) for who in ("a", "b")), return_exceptions=True)
    assert [type(result) for result in both] == [type(None), StateError]
    assert (book.active_number, [line["who"] for line in lines(tmp_path)].count("a")) == (number, 1)


async def test_book_is_what_its_log_says_after_commands_at_once(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    numbers = [await add_in(book, RouteStage.READY) for _ in range(4)]
    work = [book.activate(number, who=WHO, why=WHY) for number in numbers] + [book.rollback(who=WHO, why=WHY) for _ in range(3)]
    work += [book.retire(number, who=WHO, why=WHY) for number in numbers]
    await asyncio.gather(*work, return_exceptions=True)
    active = [record.revision.number for record in book.in_stage(RouteStage.ACTIVE)]
    assert active == [book.active_number]
    book.close()
    assert open_book(tmp_path).records() == book.records()


class GatedLog(AuditLog):
    """Waits for `gate` in the middle of every line; fails with `error` then if there is one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / LOG_NAME, "run", 0.0)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.error: StateError | None = None

    def append(self, entry: LogEntry) -> None:
        if entry.seq:
            self.entered.set()
            assert self.gate.wait(10.0)
            if self.error is not None:
                raise self.error
        super().append(entry)


async def test_book_activates_only_once_the_line_is_on_disk(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    number = await add_in(book, RouteStage.READY)
    book.close()
    log = GatedLog(tmp_path)
    book = RouteBook(log)
    activating = asyncio.create_task(book.activate(number, who=WHO, why=WHY))
    await asyncio.to_thread(log.entered.wait, 10.0)
    assert (book.active_number, book.pin().revision.number) == (1, 1)
    log.gate.set()
    await activating
    assert book.active_number == number


async def test_book_finishes_a_change_whose_caller_has_gone(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    number = await add_in(book, RouteStage.READY)
    book.close()
    log = GatedLog(tmp_path)
    book = RouteBook(log)
    activating = asyncio.create_task(book.activate(number, who=WHO, why=WHY))
    await asyncio.to_thread(log.entered.wait, 10.0)
    changed = asyncio.create_task(book.wait_for_change(10.0))
    activating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await activating
    log.gate.set()
    await changed
    assert book.active_number == number == lines(tmp_path)[-1]["active"]


async def test_book_changes_nothing_when_the_disk_fails(tmp_path: Path) -> None:
    book = await begin(tmp_path)
    number = await add_in(book, RouteStage.SHADOW)
    book.close()
    log = GatedLog(tmp_path)
    log.error = StateError("cannot write: No space left on device")
    log.gate.set()
    book = RouteBook(log)
    told: list[LogEntry] = []
    book.subscribe(told.append)
    records = book.records()
    with pytest.raises(StateError, match="No space left"):
        await book.activate(number, who=WHO, why=WHY)
    assert (book.records(), book.active_number, told) == (records, 1, [])
    log.error = None
    await book.activate(number, who=WHO, why=WHY)
    assert book.active_number == number


async def long_history(folder: Path) -> None:
    """Every action at least once."""
    book = await begin(folder)
    second = await add_in(book, RouteStage.SHADOW)
    await book.arm(second, GATES, who=WHO, why="é " + WHY)
    pin = book.pin()
    await book.activate(second, who=WHO, why=WHY, gates=GATES)
    pin.release()
    await book.drain()
    await book.rollback(who=WHO, why=WHY)
    await add_in(book, RouteStage.REJECTED)
    fourth = await add_in(book, RouteStage.SHADOW)
    await book.stop_shadow(fourth, who=WHO, why=WHY)
    await book.activate(fourth, who=WHO, why=WHY)
    await book.retire(second, who=WHO, why=WHY)
    await book.rollback(who=WHO, why=WHY)
    book.close()


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
async def test_book_cut_at_any_byte_is_what_the_complete_lines_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    await long_history(tmp_path / "whole")
    content = (tmp_path / "whole" / LOG_NAME).read_bytes()
    actives = [json.loads(line)["active"] for line in content.splitlines()]
    assert {json.loads(line)["action"] for line in content.splitlines()} >= {*COMMANDS, "open", "add", "drain", "rollback"}
    # Thousands of files: what the disk does is tested elsewhere.
    monkeypatch.setattr(os, "fsync", lambda file: None)
    stages_at: dict[int, list[RouteStage]] = {}
    borders = {at + shift for at, byte in enumerate(content) if byte == ord("\n") for shift in (-1, 0, 1)}
    for size in sorted({*range(0, len(content), every), *borders}):
        folder = tmp_path / "cut"
        folder.mkdir()
        (folder / LOG_NAME).write_bytes(content[:size])
        book = open_book(folder)
        book.close()
        num_lines = content[:size].count(b"\n")
        assert book.active_number == (actives[num_lines - 1] if num_lines else 0), size
        stages = [record.stage for record in book.records()]
        assert stages_at.setdefault(num_lines, stages) == stages
        assert stages.count(RouteStage.ACTIVE) == bool(book.active_number)
        shutil.rmtree(folder)


async def test_book_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    await long_history(tmp_path)
    path = tmp_path / LOG_NAME
    path.write_bytes(path.read_bytes()[:-7])
    book = open_book(tmp_path)
    num_lines = len(lines(tmp_path))
    assert book.active_number == 4
    await book.rollback(who=WHO, why=WHY)
    book.close()
    assert len(lines(tmp_path)) == num_lines + 1
    assert open_book(tmp_path).active_number == book.active_number == 1


async def test_book_cuts_what_many_servers_have_to_say(tmp_path: Path) -> None:
    """Else the names of forty replicas that passed would get their revision rejected."""
    book = open_book(tmp_path)
    number = (await book.add("l", [component()], who=WHO, why=WHY)).number
    await book.note_checked(number, [component()], why=f"passed by {'reward-0123456789, ' * 40}")
    entry = book.entries(1)[0]
    assert (entry.action, len(entry.why), entry.why[-4:]) == ("check", 500, " ...")
    assert book.stage(number) is RouteStage.CHECKED
