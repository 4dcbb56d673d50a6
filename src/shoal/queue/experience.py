"""The experience queue: finished groups wait in a Redis stream until the optimizer step that used them has committed.

Invariants:
- A record is added once per (uid, sample_index, attempt); adding it again changes nothing.
- The stream is never trimmed. Its bound (max_pending_groups) is kept by making `put_groups` wait.
- An entry leaves the stream only by `ack`, together with its records, or into the dead-letter stream by the server's own
  count of deliveries.
- Entries that were delivered but are not held by this object (a predecessor took them, a reply was lost, a call was
  cancelled, `release`) are delivered first.

Used from one event loop, with one consumer per run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import redis.exceptions

from shoal.codec.experience import record_to_bytes
from shoal.errors import CapacityError, InvalidRequestError, ShoalError
from shoal.queue import keys
from shoal.queue.connection import BLOCK_SLICE_S, open_async, translated
from shoal.queue.entries import GROUP_ID_FIELD, QueuedGroup, decode_entry, encode_meta
from shoal.types import ExperienceRecord

__all__ = ["ExperienceQueue", "QueuedGroup"]

MAX_DELIVERIES = 3
DEAD_RECORD_TTL_S = 24 * 3600
MAX_DEAD_GROUPS = 1000
_FULL = -1
_CAPACITY_POLL_S = 0.5
_RECONNECT_PAUSE_S = 0.2

# KEYS: stream, record... ARGV: bound, group id, then record bytes and metadata of each record.
_PUT_SCRIPT = """
local entry = {'group_id', ARGV[2]}
local fresh = {}
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    fresh[#fresh + 1] = i
    entry[#entry + 1] = KEYS[i]
    entry[#entry + 1] = ARGV[2 * i]
  end
end
if #fresh == 0 then return 0 end
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return -1 end
for _, i in ipairs(fresh) do redis.call('HSET', KEYS[i], 'record', ARGV[2 * i - 1]) end
redis.call('XADD', KEYS[1], '*', unpack(entry))
return #fresh
"""


class ExperienceQueue:
    """The coordinator's side of the queue; make one with `connect`."""

    def __init__(self, url: str, run_id: str, max_pending_groups: int, max_deliveries: int = MAX_DELIVERIES) -> None:
        self._url = url
        self._run_id = run_id
        self._stream = keys.stream_key(run_id)
        self._dead = keys.dead_letter_key(run_id)
        self._max_pending_groups = max_pending_groups
        self._max_deliveries = max_deliveries
        # Any: redis-py types replies as unions over both protocols and both kinds of decoding.
        self._redis: Any = open_async(url)
        self._blocking: Any = open_async(url, blocking=True)
        self._put: Any = self._redis.register_script(_PUT_SCRIPT)
        self._held: set[str] = set()
        # True while entries may be pending that this object does not hold.
        self._look_for_pending = True
        self._room = asyncio.Event()
        self.num_dead_lettered = 0
        """Groups that this object has moved to the dead-letter stream."""

    @classmethod
    async def connect(cls, url: str, run_id: str, max_pending_groups: int, *, max_deliveries: int = MAX_DELIVERIES) -> ExperienceQueue:
        """Connect, and create the run's stream and consumer group if they are missing.

        Args:
            url: Redis address.
            run_id: the run; every key carries it.
            max_pending_groups: bound of the queue, in groups.
            max_deliveries: a group that was delivered this often without `ack` goes to the dead-letter stream.
        Raises:
            UnavailableError: Redis cannot be reached; the message has the address without its password.
            ConfigError: the url is not a Redis address.
        """
        queue = cls(url, run_id, max_pending_groups, max_deliveries)
        try:
            await queue._create_group()
        except ShoalError:
            await queue.close()
            raise
        return queue

    async def put_group(self, records: Sequence[ExperienceRecord], *, timeout_s: float = 60.0) -> int:
        """Add one group's records; see `put_groups`."""
        return await self.put_groups([records], timeout_s=timeout_s)

    async def put_groups(self, groups: Sequence[Sequence[ExperienceRecord]], *, timeout_s: float = 60.0) -> int:
        """Add groups of records in one round trip, waiting while the queue is full.

        Args:
            groups: records of each group; every group is added atomically. Empty groups are refused.
            timeout_s: how long to wait for room.
        Returns: the number of records that were not there before.
        Raises:
            CapacityError: no room within timeout_s; groups added before that stay, and putting all again is safe.
            InvalidRequestError: a group is empty or mixes group ids.
            UnavailableError: Redis cannot be reached.
        """
        deadline = time.monotonic() + timeout_s
        waiting = [self._put_arguments(records) for records in groups]
        num_new = 0
        while waiting:
            self._room.clear()
            answers = await self._put_all(waiting)
            num_new += sum(answer for answer in answers if answer != _FULL)
            waiting = [group for group, answer in zip(waiting, answers, strict=True) if answer == _FULL]
            if waiting:
                await self._wait_for_room(deadline, len(waiting), timeout_s)
        return num_new

    async def take_groups(self, num_groups: int, timeout_s: float) -> list[QueuedGroup]:
        """Take groups for one step: pending ones that nobody holds first, then new ones in the order of arrival.

        Args:
            num_groups: how many to take.
            timeout_s: how long to wait for them.
        Returns: num_groups groups, or fewer when the time is over. All are held until `ack` or `release`.
        Raises: UnavailableError: Redis cannot be reached within timeout_s; nothing is held then.
        """
        if num_groups < 1:
            raise InvalidRequestError(f"take_groups needs at least one group, got num_groups={num_groups}")
        deadline = time.monotonic() + timeout_s
        taken: list[QueuedGroup] = []
        try:
            with translated(self._url, "waiting for experience"):
                while True:
                    await self._take_some(taken, num_groups, deadline)
                    if len(taken) == num_groups or time.monotonic() >= deadline:
                        return taken
        except BaseException:
            # Whatever was delivered, seen or not, is found again among the pending entries.
            self.release(taken)
            raise

    async def ack(self, groups: Sequence[QueuedGroup]) -> None:
        """Acknowledge groups and delete their entries and records in one transaction. Idempotent.

        Raises: UnavailableError: Redis cannot be reached.
        """
        if not groups:
            return
        entry_ids = [group.entry_id for group in groups]
        with translated(self._url, "acknowledging trained groups"):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.xack(self._stream, keys.CONSUMER_GROUP, *entry_ids)
                pipe.xdel(self._stream, *entry_ids)
                pipe.unlink(*(ref.key for group in groups for ref in group.refs))
                await pipe.execute()
        self._held.difference_update(entry_ids)
        self._room.set()

    def release(self, groups: Sequence[QueuedGroup]) -> None:
        """Give taken groups back: the next `take_groups` delivers them again, and the server counts it."""
        self._held.difference_update(group.entry_id for group in groups)
        self._look_for_pending = True

    async def depth(self) -> int:
        """Groups in the queue, taken ones included."""
        with translated(self._url, "reading the queue's length"):
            return int(await self._redis.xlen(self._stream))

    async def clear(self) -> int:
        """Delete everything that the run keeps in the queue, for a run that starts from step 1 under a used id.

        Returns: the number of deleted keys.
        """
        num_deleted = 0
        with translated(self._url, "clearing the queue"):
            batch: list[bytes] = [key async for key in self._redis.scan_iter(f"{keys.run_prefix(self._run_id)}*", count=1000)]
            for start in range(0, len(batch), 1000):
                num_deleted += int(await self._redis.unlink(*batch[start : start + 1000]))
        self._held.clear()
        self._room.set()
        await self._create_group()
        return num_deleted

    async def close(self) -> None:
        """Close the connections; held groups stay pending for the next consumer."""
        await self._redis.aclose()
        await self._blocking.aclose()

    async def _create_group(self) -> None:
        with translated(self._url, "opening the experience queue"):
            try:
                await self._redis.xgroup_create(self._stream, keys.CONSUMER_GROUP, id="0", mkstream=True)
            except redis.exceptions.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    def _put_arguments(self, records: Sequence[ExperienceRecord]) -> tuple[list[str], list[Any]]:
        group_ids = {record.group_id for record in records}
        if len(group_ids) != 1:
            raise InvalidRequestError(f"a group needs records of one group id, got {sorted(group_ids)}")
        record_keys = [keys.record_key(self._run_id, record.uid, record.sample_index, record.attempt) for record in records]
        arguments: list[Any] = [self._max_pending_groups, group_ids.pop()]
        for record in records:
            arguments += [record_to_bytes(record), encode_meta(record)]
        return [self._stream, *record_keys], arguments

    async def _put_all(self, groups: Sequence[tuple[list[str], list[Any]]]) -> list[int]:
        with translated(self._url, "adding experience"):
            async with self._redis.pipeline(transaction=False) as pipe:
                for script_keys, arguments in groups:
                    await self._put(keys=script_keys, args=arguments, client=pipe)
                return list(await pipe.execute())

    async def _wait_for_room(self, deadline: float, num_waiting: int, timeout_s: float) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise CapacityError(
                f"the experience queue of run {self._run_id!r} stayed full for {timeout_s:g} s ({self._max_pending_groups} groups, "
                f"{num_waiting} more waiting): the trainer does not take them fast enough; raise coordinator.max_pending_groups"
            )
        # Not wait_for: on 3.11 it swallows a cancellation that comes together with the event. The poll is for room that another
        # process made.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(remaining_s, _CAPACITY_POLL_S)):
                await self._room.wait()

    async def _take_some(self, taken: list[QueuedGroup], num_groups: int, deadline: float) -> None:
        try:
            if self._look_for_pending:
                taken += await self._claim_pending(num_groups - len(taken))
            else:
                taken += await self._read_new(num_groups - len(taken), deadline - time.monotonic())
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            # The server may have delivered into the broken connection.
            self._look_for_pending = True
            if time.monotonic() + _RECONNECT_PAUSE_S >= deadline:
                raise
            await asyncio.sleep(_RECONNECT_PAUSE_S)

    async def _claim_pending(self, num_groups: int) -> list[QueuedGroup]:
        """Take over pending entries that this object does not hold; XPENDING lists them without counting a delivery."""
        num_asked = num_groups + len(self._held)
        rows = await self._redis.xpending_range(self._stream, keys.CONSUMER_GROUP, min="-", max="+", count=num_asked)
        loose = {row["message_id"]: int(row["times_delivered"]) for row in rows if row["message_id"].decode() not in self._held}
        dead = [entry_id for entry_id, num_deliveries in loose.items() if num_deliveries >= self._max_deliveries]
        for entry_id in dead:
            await self._bury(entry_id, loose.pop(entry_id))
        chosen = list(loose)[:num_groups]
        # Nothing else can be pending once everything listed is held; what was buried made room for more rows.
        self._look_for_pending = bool(dead) or len(rows) == num_asked or len(loose) > len(chosen)
        if not chosen:
            return []
        claimed = await self._blocking.xclaim(self._stream, keys.CONSUMER_GROUP, keys.CONSUMER, 0, chosen)
        return self._hold([(entry_id, fields, loose[entry_id] + 1) for entry_id, fields in claimed])

    async def _read_new(self, num_groups: int, remaining_s: float) -> list[QueuedGroup]:
        block_ms = max(1, int(1000 * min(remaining_s, BLOCK_SLICE_S)))
        streams = {self._stream: ">"}
        answer = await self._blocking.xreadgroup(keys.CONSUMER_GROUP, keys.CONSUMER, streams, count=num_groups, block=block_ms)
        # A read that was cancelled earlier may still be blocked in the server and take an entry into its closed connection.
        self._look_for_pending = not answer
        return self._hold([(entry_id, fields, 1) for entry_id, fields in (answer[0][1] if answer else ())])

    def _hold(self, entries: Iterable[tuple[bytes, Mapping[bytes, bytes], int]]) -> list[QueuedGroup]:
        groups = [decode_entry(entry_id, fields, num_deliveries) for entry_id, fields, num_deliveries in entries]
        self._held.update(group.entry_id for group in groups)
        return groups

    async def _bury(self, entry_id: bytes, num_deliveries: int) -> None:
        """Move an entry to the dead-letter stream; its records stay for a day so that the cause can be looked at."""
        found = await self._redis.xrange(self._stream, min=entry_id, max=entry_id)
        fields: dict[bytes, bytes] = dict(found[0][1]) if found else {}
        reason = f"delivered {num_deliveries} times without being acknowledged (limit {self._max_deliveries})"
        async with self._redis.pipeline(transaction=True) as pipe:
            note = {b"entry_id": entry_id, b"reason": reason.encode()}
            pipe.xadd(self._dead, note | fields, maxlen=MAX_DEAD_GROUPS, approximate=True)
            pipe.xack(self._stream, keys.CONSUMER_GROUP, entry_id)
            pipe.xdel(self._stream, entry_id)
            for record in fields:
                if record != GROUP_ID_FIELD:
                    pipe.expire(record, DEAD_RECORD_TTL_S)
            await pipe.execute()
        self.num_dead_lettered += 1
        self._room.set()
