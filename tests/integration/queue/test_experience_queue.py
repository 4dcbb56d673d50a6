"""The experience queue against a real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from shoal.errors import CapacityError, ConfigError, InvalidRequestError, UnavailableError
from shoal.queue import keys
from shoal.queue.experience import ExperienceQueue
from shoal.queue.records import RecordReader
from shoal.types import ExperienceRecord
from tests.helpers.experience import make_group, make_record
from tests.helpers.valkey import ValkeyServer, free_port, running_valkey

TAKE_S = 5.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with running_valkey(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def raw(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
async def queue(server: ValkeyServer, raw: redis.Redis) -> AsyncIterator[ExperienceQueue]:
    connected = await ExperienceQueue.connect(server.url, "run", max_pending_groups=4)
    yield connected
    await connected.close()


async def test_queue_gives_groups_in_order_with_lengths_and_rewards(queue: ExperienceQueue) -> None:
    assert await queue.put_groups([make_group("a"), make_group("b", 3)]) == 5
    first, second = await queue.take_groups(2, TAKE_S)
    assert (first.group_id, second.group_id) == ("a", "b")
    assert [ref.key for ref in first.refs] == ["shoal:run:record:a:0:0", "shoal:run:record:a:1:0"]
    assert [(ref.num_prompt_tokens, ref.num_response_tokens, ref.reward) for ref in second.refs] == [(3, 1, 1.0), (3, 2, 1.0), (3, 3, 1.0)]
    assert second.num_deliveries == 1


async def test_put_group_twice_adds_nothing(queue: ExperienceQueue) -> None:
    assert await queue.put_group(make_group("a")) == 2
    assert await queue.put_group(make_group("a")) == 0
    assert await queue.depth() == 1


async def test_put_group_adds_only_the_missing_records_of_a_group(queue: ExperienceQueue) -> None:
    await queue.put_group(make_group("a", 2))
    assert await queue.put_group(make_group("a", 3)) == 1
    first, second = await queue.take_groups(2, TAKE_S)
    assert [len(first.refs), len(second.refs)] == [2, 1]


@pytest.mark.parametrize("records", [[], [make_record("a"), make_record("b")]])
async def test_put_group_refuses_no_or_mixed_groups(queue: ExperienceQueue, records: list[ExperienceRecord]) -> None:
    with pytest.raises(InvalidRequestError, match="one group id"):
        await queue.put_group(records)


async def test_ack_deletes_entry_records_and_columns(queue: ExperienceQueue, server: ValkeyServer, raw: redis.Redis) -> None:
    await queue.put_groups([make_group("a"), make_group("b")])
    taken = await queue.take_groups(2, TAKE_S)
    reader = RecordReader(server.url, "run")
    reader.write_columns("values", {taken[0].refs[0].key: make_record().rollout_logprobs})
    await queue.ack(taken)
    await queue.ack(taken)
    reader.close()
    assert await queue.depth() == 0
    assert raw.keys("shoal:run:record:*") == []


async def test_take_groups_returns_fewer_when_the_time_is_over(queue: ExperienceQueue) -> None:
    await queue.put_group(make_group("a"))
    assert [group.group_id for group in await queue.take_groups(2, timeout_s=0.05)] == ["a"]


async def test_take_groups_wakes_up_for_a_later_group(queue: ExperienceQueue) -> None:
    taking = asyncio.create_task(queue.take_groups(1, TAKE_S))
    await queue.put_group(make_group("late"))
    assert [group.group_id for group in await taking] == ["late"]


async def test_take_groups_does_not_give_a_held_group_again(queue: ExperienceQueue) -> None:
    await queue.put_groups([make_group("a"), make_group("b")])
    await queue.take_groups(1, TAKE_S)
    assert [group.group_id for group in await queue.take_groups(2, timeout_s=0.05)] == ["b"]


async def test_restarted_consumer_takes_over_pending_groups_first(queue: ExperienceQueue, server: ValkeyServer) -> None:
    await queue.put_groups([make_group("a"), make_group("b"), make_group("c")])
    await queue.take_groups(2, TAKE_S)
    await queue.close()
    successor = await ExperienceQueue.connect(server.url, "run", max_pending_groups=4)
    taken = await successor.take_groups(3, TAKE_S)
    await successor.close()
    assert [(group.group_id, group.num_deliveries) for group in taken] == [("a", 2), ("b", 2), ("c", 1)]


async def test_released_groups_come_again(queue: ExperienceQueue) -> None:
    await queue.put_groups([make_group("a"), make_group("b")])
    queue.release(await queue.take_groups(1, TAKE_S))
    assert [group.group_id for group in await queue.take_groups(2, TAKE_S)] == ["a", "b"]


async def test_cancelled_takes_lose_nothing_and_mix_up_no_reply(queue: ExperienceQueue) -> None:
    for round_number in range(30):
        taking = asyncio.create_task(queue.take_groups(1, TAKE_S))
        await asyncio.sleep(0)
        adding = asyncio.create_task(queue.put_group(make_group(f"g{round_number}", 1)))
        if round_number % 3:
            await adding
        taking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            queue.release(await taking)
        assert await adding == 1
        assert await queue.depth() == 1
        await queue.ack(await queue.take_groups(1, TAKE_S))
    assert queue.num_dead_lettered == 0


async def test_entry_whose_reply_was_lost_is_found_among_the_pending_ones(
    queue: ExperienceQueue, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.queue.experience.BLOCK_SLICE_S", 0.02)
    await queue.put_group(make_group("a"))
    (taken,) = await queue.take_groups(1, TAKE_S)
    await queue.put_group(make_group("b"))
    raw.xreadgroup(keys.CONSUMER_GROUP, keys.CONSUMER, {keys.stream_key("run"): ">"})
    assert [group.group_id for group in await queue.take_groups(1, TAKE_S)] == ["b"]
    await queue.ack([taken])


async def test_idle_take_outlives_many_blocking_reads(queue: ExperienceQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.queue.experience.BLOCK_SLICE_S", 0.01)
    assert await queue.take_groups(1, timeout_s=0.3) == []
    await queue.put_group(make_group("a"))
    assert len(await queue.take_groups(1, TAKE_S)) == 1


async def test_group_delivered_too_often_is_buried_with_a_reason(queue: ExperienceQueue, raw: redis.Redis) -> None:
    await queue.put_groups([make_group("poison"), make_group("good")])
    for _ in range(3):
        (poison, *_rest) = await queue.take_groups(1, TAKE_S)
        assert poison.group_id == "poison"
        queue.release([poison])
    assert [group.group_id for group in await queue.take_groups(2, timeout_s=0.05)] == ["good"]
    assert queue.num_dead_lettered == 1
    entries: Any = raw.xrange(keys.dead_letter_key("run"))
    ((_, buried),) = entries
    assert buried[b"group_id"] == b"poison"
    assert b"3 times" in buried[b"reason"]
    assert 0 < int(raw.ttl("shoal:run:record:poison:0:0")) <= 24 * 3600
    assert await queue.depth() == 1


async def test_full_queue_waits_until_a_group_is_acknowledged(queue: ExperienceQueue) -> None:
    await queue.put_groups([make_group(uid) for uid in "abcd"])
    waiting = asyncio.create_task(queue.put_groups([make_group("e"), make_group("f")], timeout_s=TAKE_S))
    taken = await queue.take_groups(2, TAKE_S)
    assert await queue.depth() == 4
    await queue.ack(taken)
    assert await waiting == 4
    assert [group.group_id for group in await queue.take_groups(4, TAKE_S)] == ["c", "d", "e", "f"]


async def test_full_queue_raises_after_the_deadline_and_keeps_what_is_there(queue: ExperienceQueue) -> None:
    with pytest.raises(CapacityError, match=r"4 groups.*max_pending_groups"):
        await queue.put_groups([make_group(uid) for uid in "abcde"], timeout_s=0.05)
    assert [group.group_id for group in await queue.take_groups(4, TAKE_S)] == ["a", "b", "c", "d"]


async def test_clear_deletes_this_run_only(queue: ExperienceQueue, raw: redis.Redis) -> None:
    raw.set("shoal:other:x", "1")
    await queue.put_group(make_group("a"))
    await queue.take_groups(1, TAKE_S)
    assert await queue.clear() == 3
    assert raw.keys("*") in ([b"shoal:other:x", b"shoal:run:groups"], [b"shoal:run:groups", b"shoal:other:x"])
    await queue.put_group(make_group("a"))
    assert len(await queue.take_groups(1, TAKE_S)) == 1


async def test_connect_to_nothing_names_the_address_without_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.queue.connection.NUM_RETRIES", 1)
    port = free_port()
    with pytest.raises(UnavailableError) as raised:
        await ExperienceQueue.connect(f"redis://:secret@127.0.0.1:{port}/0", "run", 4)
    assert f"127.0.0.1:{port}" in str(raised.value)
    assert "redis.url" in str(raised.value)
    assert "secret" not in str(raised.value)


async def test_connect_with_wrong_password_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.queue.connection.NUM_RETRIES", 1)
    with running_valkey(tmp_path, password="right") as guarded:  # noqa: S106
        with pytest.raises(UnavailableError, match="refused the credentials"):
            await ExperienceQueue.connect(guarded.url.replace("right", "wrong"), "run", 4)
        await (await ExperienceQueue.connect(guarded.url, "run", 4)).close()


async def test_connect_refuses_what_is_no_redis_address() -> None:
    with pytest.raises(ConfigError, match="redis://HOST:PORT"):
        await ExperienceQueue.connect("http://localhost", "run", 4)


async def test_killed_server_keeps_groups_and_an_idle_take_goes_on(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as server:
        queue = await ExperienceQueue.connect(server.url, "run", 4)
        await queue.put_groups([make_group("a"), make_group("b")])
        (taken,) = await queue.take_groups(1, TAKE_S)
        taking = asyncio.create_task(queue.take_groups(2, timeout_s=20.0))
        await asyncio.sleep(0)
        await asyncio.to_thread(_crash, server)
        await queue.put_group(make_group("c"))
        assert [group.group_id for group in await taking] == ["b", "c"]
        await queue.ack([taken])
        assert await queue.depth() == 2
        await queue.close()


def _crash(server: ValkeyServer) -> None:
    # The append-only file is written at each command and synced each second: a killed process loses nothing.
    server.kill()
    server.start()
