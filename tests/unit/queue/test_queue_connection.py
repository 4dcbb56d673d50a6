"""Addresses without passwords, keys, entries."""

from __future__ import annotations

import pytest

from shoal.errors import CodecError
from shoal.queue import keys
from shoal.queue.connection import BLOCK_SLICE_S, SOCKET_TIMEOUT_S
from shoal.queue.entries import decode_entry, encode_meta
from tests.helpers.experience import make_record


def test_blocking_reads_are_shorter_than_the_socket_timeout() -> None:
    assert 2 * BLOCK_SLICE_S < SOCKET_TIMEOUT_S


def test_keys_carry_run_uid_sample_and_attempt() -> None:
    key = keys.record_key("run", "e0-i3", 1, 2)
    assert key == "shoal:run:record:e0-i3:1:2"
    assert all(other.startswith(keys.run_prefix("run")) for other in (key, keys.stream_key("run"), keys.dead_letter_key("run")))


def test_entry_keeps_the_reward_exactly() -> None:
    reward = 0.1 + 0.2
    fields = {b"group_id": b"g", b"key": encode_meta(make_record(reward=reward, sample_index=4)).encode()}
    group = decode_entry(b"1-0", fields, 2)
    assert (group.entry_id, group.group_id, group.num_deliveries, group.num_tokens) == ("1-0", "g", 2, 8)
    assert group.refs[0].reward == reward


@pytest.mark.parametrize("fields", [{}, {b"x": b"1"}, {b"group_id": b"g", b"key": b"1,2"}, {b"group_id": b"g", b"key": b"1,2,x"}])
def test_foreign_entry_is_refused(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(CodecError, match=r"1-0|'g'"):
        decode_entry(b"1-0", fields, 1)
