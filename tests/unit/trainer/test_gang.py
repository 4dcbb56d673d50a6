"""Rank 0 and a follower over a real store, with scripted handlers: answers, failures, deadlines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
from shoal_trainer import gang as gang_module
from shoal_trainer.command_store import CommandStore
from shoal_trainer.distributed import PeerError
from shoal_trainer.gang import Gang, Handler, follow
from torch._C._distributed_c10d import TCPStore

from shoal.errors import DeadlineError, InternalError, InvalidRequestError, StateError, UnavailableError

TIMEOUT = timedelta(seconds=10)


class Pair:
    """A gang of two: rank 0 in the test's event loop, rank 1 in a thread."""

    def __init__(self, own: Mapping[str, Handler], other: Mapping[str, Handler], independent: frozenset[str]) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        self.compute = ThreadPoolExecutor(1)
        self.broken = threading.Event()
        self.gang = Gang(
            own, CommandStore(self.store, 2), 2, self.compute, answer_timeout_s=0.6, independent=independent, on_broken=self.broken.set
        )
        self.follower_error: BaseException | None = None
        client = TCPStore("127.0.0.1", self.store.port, is_master=False, timeout=TIMEOUT)
        self._thread = threading.Thread(target=self._follow, args=(other, CommandStore(client, 2)), daemon=True)
        self._thread.start()

    def _follow(self, handlers: Mapping[str, Handler], store: CommandStore) -> None:
        try:
            follow(handlers, store, 1)
        except (UnavailableError, InternalError) as error:
            self.follower_error = error

    def join(self) -> None:
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "FAILURE_GRACE_S", 0.4)


@contextmanager
def pair(own: Handler, other: Handler, *, independent: bool = False) -> Iterator[Pair]:
    """Both ranks know one command, `work`."""
    names = frozenset({"work"}) if independent else frozenset()
    ranks = Pair({"work": own}, {"work": other}, names)
    try:
        yield ranks
    finally:
        ranks.compute.shutdown(wait=False)


def raising(error: Exception) -> Handler:
    def handler(_payload: bytes) -> bytes:
        raise error

    return handler


def stuck(release: threading.Event) -> Handler:
    def handler(_payload: bytes) -> bytes:
        release.wait(10)
        return b"late"

    return handler


async def test_gang_answers_with_every_ranks_result_and_deletes_its_keys() -> None:
    with pair(lambda payload: b"0" + payload, lambda payload: b"1" + payload) as ranks:
        keys_before = ranks.store.num_keys()
        for payload in (b"a", b"line\nbreak\x00", b""):
            assert await ranks.gang.run("work", payload, 5) == [b"0" + payload, b"1" + payload]
        assert ranks.store.num_keys() == keys_before


async def test_gang_raises_a_followers_shoal_error_and_goes_on() -> None:
    answers: list[Callable[[bytes], bytes]] = [raising(StateError("not now")), lambda payload: b"fine"]
    with pair(lambda payload: b"own", lambda payload: answers.pop(0)(payload)) as ranks:
        with pytest.raises(StateError, match="rank 1: not now"):
            await ranks.gang.run("work", b"", 5)
        assert await ranks.gang.run("work", b"", 5) == [b"own", b"fine"]
        assert not ranks.broken.is_set()


async def test_gang_names_the_rank_that_failed_rather_than_the_one_that_followed() -> None:
    with pair(raising(PeerError("gave up")), raising(StateError("no record"))) as ranks:
        with pytest.raises(StateError, match="rank 1: no record"):
            await ranks.gang.run("work", b"", 5)
        assert not ranks.broken.is_set()


@pytest.mark.parametrize("failing_rank", [0, 1])
async def test_gang_is_broken_by_a_fault_on_any_rank(failing_rank: int) -> None:
    fault, fine = raising(RuntimeError("out of memory")), lambda payload: b"ok"
    own, other = (fault, fine) if failing_rank == 0 else (fine, fault)
    with pair(own, other) as ranks:
        with pytest.raises(InternalError, match=f"rank {failing_rank}: RuntimeError: out of memory"):
            await ranks.gang.run("work", b"", 5)
        assert ranks.broken.is_set()
        with pytest.raises(InternalError, match="broken"):
            await ranks.gang.run("work", b"", 5)
        if failing_rank == 1:
            ranks.join()
            assert isinstance(ranks.follower_error, InternalError)


async def test_gang_does_not_wait_for_a_rank_that_is_stuck_after_another_failed() -> None:
    release = threading.Event()
    with pair(stuck(release), raising(RuntimeError("boom"))) as ranks:
        with pytest.raises(InternalError, match="rank 1: RuntimeError: boom"):
            await ranks.gang.run("work", b"", 9)
        assert ranks.broken.is_set()
        release.set()


async def test_gang_is_broken_by_a_rank_that_gives_no_answer() -> None:
    release = threading.Event()
    with pair(lambda payload: b"own", stuck(release)) as ranks:
        with pytest.raises(InternalError, match="rank 1 gave no answer"):
            await ranks.gang.run("work", b"", 9)
        assert ranks.broken.is_set()
        release.set()


async def test_gang_waits_for_the_others_when_a_command_has_no_collective() -> None:
    release = threading.Event()
    with pair(stuck(release), raising(StateError("refused")), independent=True) as ranks:
        running = asyncio.create_task(ranks.gang.run("work", b"", 9))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.5, release.set)
        with pytest.raises(StateError, match="refused"):
            await running
        assert not ranks.broken.is_set()


async def test_gang_lets_a_command_finish_whose_caller_gave_up() -> None:
    release = threading.Event()
    with pair(stuck(release), lambda payload: b"other") as ranks:
        with pytest.raises(DeadlineError, match="goes on"):
            await ranks.gang.run("work", b"", 0.1)
        with pytest.raises(DeadlineError, match="before it"):
            await ranks.gang.run("work", b"", 0.1)
        release.set()
        await ranks.gang.drain()
        assert await ranks.gang.run("work", b"", 5) == [b"late", b"other"]


async def test_gang_refuses_an_unknown_command_and_goes_on() -> None:
    with pair(lambda payload: b"own", lambda payload: b"other") as ranks:
        with pytest.raises(InvalidRequestError, match="no command 'play'"):
            await ranks.gang.run("play", b"", 5)
        assert await ranks.gang.run("work", b"", 5) == [b"own", b"other"]


async def test_gang_of_one_needs_no_store() -> None:
    with ThreadPoolExecutor(1) as compute:
        gang = Gang({"work": lambda payload: payload * 2}, None, 1, compute, answer_timeout_s=1)
        assert await gang.run("work", b"ab", 5) == [b"abab"]
