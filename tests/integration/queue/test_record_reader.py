"""Records and columns against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from shoal.codec.tensor import tensor_to_bytes
from shoal.errors import CodecError, InvalidRequestError, NotFoundError, UnavailableError
from shoal.queue import records as records_module
from shoal.queue.experience import ExperienceQueue
from shoal.queue.records import RecordReader
from tests.helpers.experience import make_group
from tests.helpers.valkey import free_port, running_valkey

KEYS = [f"shoal:run:record:a:{index}:0" for index in range(3)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_valkey(tmp_path_factory.mktemp("redis")) as server:
        asyncio.run(_put(server.url))
        yield server.url


async def _put(url: str) -> None:
    queue = await ExperienceQueue.connect(url, "run", max_pending_groups=4)
    await queue.put_group(make_group("a", 3))
    await queue.close()


@pytest.fixture
def reader(url: str) -> Iterator[RecordReader]:
    opened = RecordReader(url, "run")
    yield opened
    opened.close()


def test_fetch_returns_the_records_in_the_order_of_the_keys(reader: RecordReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MAX_KEYS_PER_CALL", 2)
    fetched = reader.fetch([KEYS[2], KEYS[0], KEYS[1]])
    assert [record.sample_index for record in fetched] == [2, 0, 1]
    written = make_group("a", 3)[2]
    assert fetched[0].group_id == "a"
    np.testing.assert_array_equal(fetched[0].response_ids, written.response_ids)
    np.testing.assert_array_equal(fetched[0].rollout_logprobs, written.rollout_logprobs)
    assert fetched[0].policy_version_spans == written.policy_version_spans


def test_fetch_names_a_missing_record(reader: RecordReader) -> None:
    with pytest.raises(NotFoundError, match="record:gone:0:0"):
        reader.fetch([KEYS[0], "shoal:run:record:gone:0:0"])


def test_fetch_refuses_keys_of_another_run(reader: RecordReader) -> None:
    with pytest.raises(InvalidRequestError, match="shoal:run:"):
        reader.fetch(["shoal:other:record:a:0:0"])


def test_columns_come_back_as_written_and_can_be_replaced(reader: RecordReader) -> None:
    columns = {key: np.linspace(0, 1, index + 1, dtype=np.float32) for index, key in enumerate(KEYS)}
    reader.write_columns("values", {key: column + 1 for key, column in columns.items()})
    reader.write_columns("values", columns)
    for read, key in zip(reader.read_column("values", KEYS[::-1]), KEYS[::-1], strict=True):
        np.testing.assert_array_equal(read, columns[key])


def test_read_column_names_the_column_that_nobody_wrote(reader: RecordReader) -> None:
    with pytest.raises(NotFoundError, match=r"'returns'.*record:a:0:0"):
        reader.read_column("returns", KEYS)


def test_write_columns_does_not_bring_an_acknowledged_record_back(reader: RecordReader, url: str) -> None:
    gone = "shoal:run:record:gone:0:0"
    with pytest.raises(NotFoundError, match="record:gone:0:0"):
        reader.write_columns("advantages", {KEYS[0]: np.ones(1, np.float32), gone: np.ones(1, np.float32)})
    with redis.Redis.from_url(url) as raw:
        assert raw.exists(gone) == 0
        assert not raw.hexists(KEYS[0], "advantages")


def test_write_columns_refuses_to_replace_the_record(reader: RecordReader) -> None:
    with pytest.raises(InvalidRequestError, match="record itself"):
        reader.write_columns("record", {KEYS[0]: np.ones(1, np.float32)})


@pytest.mark.parametrize("value", [b"\xff\xff", tensor_to_bytes(np.ones((2, 2), np.float32)), tensor_to_bytes(np.ones(2, np.float64))])
def test_read_column_refuses_what_is_no_float32_vector(reader: RecordReader, url: str, value: bytes) -> None:
    with redis.Redis.from_url(url) as raw:
        raw.hset(KEYS[0], "broken", value)
    with pytest.raises(CodecError):
        reader.read_column("broken", KEYS[:1])


def test_reader_of_nothing_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.queue.connection.NUM_RETRIES", 1)
    port = free_port()
    reader = RecordReader(f"redis://127.0.0.1:{port}/0", "run")
    with pytest.raises(UnavailableError, match=f"127.0.0.1:{port}"):
        reader.fetch(KEYS)
    reader.close()


def test_reader_goes_on_after_the_server_was_restarted(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as server:
        asyncio.run(_put(server.url))
        reader = RecordReader(server.url, "run")
        reader.fetch(KEYS)
        server.kill()
        server.start()
        assert len(reader.fetch(KEYS)) == 3
        reader.close()
