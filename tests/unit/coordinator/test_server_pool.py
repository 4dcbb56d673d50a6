"""Choosing servers."""

from __future__ import annotations

import asyncio

import pytest
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.waiting import WaitBoard

from shoal.errors import UnavailableError


async def test_pick_prefers_the_least_outstanding_then_the_id() -> None:
    pool: ServerPool[str] = ServerPool("server", WaitBoard())
    pool.add("b", "client b")
    pool.add("a", "client a")
    first = await pool.pick(1.0)
    assert (first.server_id, first.client) == ("a", "client a")
    with pool.working(first, 5):
        assert (await pool.pick(1.0)).server_id == "b"
    assert (await pool.pick(1.0)).server_id == "a"


async def test_pick_avoids_failed_servers_only_for_a_while() -> None:
    pool: ServerPool[str] = ServerPool("server", WaitBoard())
    pool.add("a", "")
    assert (await pool.pick(5.0, avoid=["a"], patience_s=0.01)).server_id == "a"
    pool.add("b", "")
    assert (await pool.pick(5.0, avoid=["a"], patience_s=60.0)).server_id == "b"


async def test_pick_shows_on_the_board_what_it_waits_for() -> None:
    board = WaitBoard()
    pool: ServerPool[str] = ServerPool("reward server", board)
    picking = asyncio.create_task(pool.pick(5.0))
    await asyncio.sleep(0)
    (wait,) = board.current()
    assert (wait.waiter, wait.waits_for) == ("dispatcher", ("reward server",))
    pool.add("a", "")
    assert (await picking).server_id == "a"
    assert board.current() == ()


async def test_pick_without_servers_ends_with_the_deadline() -> None:
    pool: ServerPool[str] = ServerPool("reward server", WaitBoard())
    with pytest.raises(UnavailableError, match=r"no reward server .* 0\.01 s"):
        await pool.pick(0.01)


async def test_removed_and_replaced_servers_are_told() -> None:
    pool: ServerPool[str] = ServerPool("server", WaitBoard())
    pool.add("a", "old")
    old = await pool.pick(1.0)
    pool.add("a", "new")
    assert old.gone.is_set()
    assert (await pool.pick(1.0)).client == "new"
    pool.remove("a")
    pool.remove("a")
    assert pool.server_ids() == ()


async def test_pick_takes_only_servers_that_suit() -> None:
    pool: ServerPool[str] = ServerPool("server", WaitBoard())
    pool.add("a", "maths")
    pool.add("b", "code")
    assert (await pool.pick(1.0, suits=lambda server: server.client == "code")).server_id == "b"
    assert pool.choose(suits=lambda server: server.client == "poems") is None
    chosen = pool.choose(["a"])
    assert chosen is not None
    assert chosen.server_id == "b"


async def test_pick_looks_again_at_servers_that_may_suit_later() -> None:
    pool: ServerPool[list[str]] = ServerPool("server", WaitBoard())
    offers: list[str] = []
    pool.add("a", offers)
    picking = asyncio.create_task(pool.pick(5.0, suits=lambda server: "code" in server.client))
    await asyncio.sleep(0)
    offers.append("code")
    assert (await picking).server_id == "a"


async def test_pick_without_a_server_that_suits_says_which_there_are() -> None:
    pool: ServerPool[str] = ServerPool("reward server", WaitBoard())
    pool.add("a", "")
    with pytest.raises(UnavailableError, match=r"no reward server was fit for the work for 0\.01 s; there is: a"):
        await pool.pick(0.01, suits=lambda server: False)
