"""The engine worker's end of the collective transport: receives beside generation, in threads of its own.

    store = CollectiveStore(host)                       # in worker 0; store.address is every worker's endpoint
    receiver = CollectiveReceiver(target, worker_rank, device)
    receiver.start(push_id, version, buckets, group=..., address=..., timeout_s=...)   # PlanSink; returns at once
    receiver.wait(timeout_s)                            # before VERIFY looks at staging
    receiver.stop()                                     # whenever a push ends another way

A server names the group: the same name as in the push before, for as long as all of its workers received all of it, keeps the groups; any
other makes new ones, which is what has to follow a push that failed.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from shoal.errors import DeadlineError, ShoalError, StateError, TransportError
from shoal.rpc.channel import join_address
from shoal.types.weights import BucketEncoding
from shoal.weights.buckets import Bucket
from shoal.weights.delta import decode_delta
from shoal.weights.dtypes import item_bytes
from shoal.weights.transports.base import PieceTarget
from shoal.weights.transports.pair_group import WORKER, Header, Kind, PairGroup, connect_store, hello
from shoal.weights.transports.pieces import write_delta, write_dense

_NUM_BUFFERS = 2
"""Buckets that are received at once; further ranks wait with theirs."""


class CollectiveStore:
    """The store that the groups of one server are formed in. Worker 0 hosts it.

    Args:
        host: where it listens, and what `address` names.
    Raises: TransportError: it cannot listen there.
    """

    def __init__(self, host: str) -> None:
        try:
            listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            msg = f"no store for the collective transport can listen on {host}: {error.strerror}"
            raise TransportError(f"{msg}; let --advertise name an address of this machine, or set push.transport to grpc") from error
        port = listening.getsockname()[1]
        # torch's own server would listen on every interface. It owns the descriptor from here on.
        self._store: Store | None = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        self.address = join_address(host, port)

    def close(self) -> None:
        """Stop listening; repeating does nothing."""
        self._store = None


class ReceiverState(StrEnum):
    """Of a receiver."""

    IDLE = "idle"
    RECEIVING = "receiving"
    RECEIVED = "received"
    FAILED = "failed"


TRANSITIONS: Mapping[ReceiverState, frozenset[ReceiverState]] = {
    ReceiverState.IDLE: frozenset({ReceiverState.RECEIVING}),
    ReceiverState.RECEIVING: frozenset({ReceiverState.RECEIVED, ReceiverState.FAILED, ReceiverState.IDLE}),
    ReceiverState.RECEIVED: frozenset({ReceiverState.IDLE}),
    ReceiverState.FAILED: frozenset({ReceiverState.IDLE}),
}


class CollectiveReceiver:
    """Receives the buckets of one worker, push after push.

    Args:
        target: the worker's staging.
        worker_rank: as in the server's layout.
        device: where staging is: "cpu" or "cuda:<index>".
    """

    def __init__(self, target: PieceTarget, worker_rank: int, device: str = "cpu") -> None:
        self._target = target
        self._worker_rank = worker_rank
        self._device = device
        self._session: ReceiverSession | None = None
        self._buffers: BufferPool | None = None
        self._groups: dict[int, PairGroup] = {}
        self._group_name = ""

    def start(
        self,
        push_id: str,
        policy_version: int,
        buckets: Mapping[int, Sequence[Bucket]],
        *,
        group: str,
        address: str,
        timeout_s: float,
    ) -> None:
        """Begin to receive a push; one that runs is stopped.

        Args:
            buckets: by trainer rank, those that the plan sends over this transport.
            group: the server's `collective_group`.
            address: of the server's store.
            timeout_s: until everything has to be there.
        """
        self.stop()
        if group != self._group_name:
            self._drop_groups()
        self._group_name = group
        num_bytes = max((bucket.num_bytes for pair in buckets.values() for bucket in pair), default=0)
        if self._buffers is None or self._buffers.num_bytes < num_bytes:
            self._buffers = BufferPool(num_bytes, self._device)
        self._session = ReceiverSession(
            target=self._target,
            first=hello(push_id, policy_version),
            buffers=self._buffers,
            join=_Joiner(group, self._worker_rank, self._device, address, time.monotonic() + timeout_s),
        )
        self._session.run(buckets, self._groups)
        self._groups = {}

    @property
    def state(self) -> ReceiverState:
        """What became of the push that was started last."""
        return ReceiverState.IDLE if self._session is None else self._session.state

    def wait(self, timeout_s: float) -> None:
        """Wait until everything is in staging.

        Raises: StateError: no push was started, or it was stopped. DeadlineError: not yet. TransportError: a rank is gone or sent
            something wrong; the first that failed.
        """
        if self._session is None:
            raise StateError("no push is being received over the collective transport; plan one")
        self._session.wait(timeout_s)

    def stop(self) -> None:
        """End the push: nothing is written to staging any more, and the ranks' calls fail.

        A thread that waits for a stopped rank goes at its deadline; it writes nothing.
        """
        session, self._session = self._session, None
        if session is None:
            return
        if session.state is ReceiverState.RECEIVED:
            self._groups = session.take_groups()
        else:
            # What is under way there cannot be used for another push.
            session.stop()
            self._buffers = None
            self._group_name = ""

    def close(self) -> None:
        """End the push and leave all groups."""
        self.stop()
        self._drop_groups()
        self._buffers = None

    def _drop_groups(self) -> None:
        while self._groups:
            self._groups.popitem()[1].close()


class BufferPool:
    """A few buffers of one size, made when they are needed and used again."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self._free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        for _ in range(_NUM_BUFFERS):
            self._free.put(None)

    @contextmanager
    def borrow(self, num_bytes: int, deadline_s: float) -> Iterator[Tensor]:
        """[num_bytes] uint8. Raises: DeadlineError: none became free."""
        try:
            buffer = self._free.get(timeout=max(deadline_s - time.monotonic(), 0.001))
        except queue.Empty as error:
            raise DeadlineError("no buffer became free; other ranks began to send a bucket and did not go on") from error
        if buffer is None:
            buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        try:
            yield buffer[:num_bytes]
        finally:
            self._free.put(buffer)


class _Joiner:
    """Forms the groups of one push; the store is reached once."""

    def __init__(self, group: str, worker_rank: int, device: str, address: str, deadline_s: float) -> None:
        self.worker_rank = worker_rank
        self.deadline_s = deadline_s
        self._group = group
        self._device = device
        self._address = address
        self._lock = threading.Lock()
        self._store: Store | None = None

    def join(self, rank: int) -> PairGroup:
        """The group with a rank, once that has joined. Raises: TransportError. DeadlineError."""
        with self._lock:
            if self._store is None:
                self._store = connect_store(self._address, self.deadline_s)
        return PairGroup(
            self._store,
            f"{self._group}/{rank}/{self.worker_rank}",
            WORKER,
            device=self._device,
            address=self._address,
            deadline_s=self.deadline_s,
        )


class ReceiverSession:
    """One push: a thread for each rank that sends something."""

    def __init__(self, *, target: PieceTarget, first: Header, buffers: BufferPool, join: _Joiner) -> None:
        self._target = target
        self._first = first
        self._buffers = buffers
        self._join = join
        self._changed = threading.Condition()
        self._state = ReceiverState.RECEIVING
        self._error: ShoalError | None = None
        self._missing: set[int] = set()
        self._groups: dict[int, PairGroup] = {}
        # Held while a bucket is written: a worker lends the push one core, and `stop` has to know when nothing is written any more.
        self._writing = threading.Lock()

    @property
    def state(self) -> ReceiverState:
        """RECEIVED once every rank has sent everything."""
        return self._state

    def run(self, buckets: Mapping[int, Sequence[Bucket]], kept: Mapping[int, PairGroup]) -> None:
        """Start the threads.

        Args:
            buckets: by rank.
            kept: groups of the push before, by rank.
        """
        for rank in kept.keys() - buckets.keys():
            self._groups[rank] = kept[rank]
        self._missing = set(buckets)
        with self._changed:
            if not buckets:
                self._move(ReceiverState.RECEIVED)
        for rank, pair in buckets.items():
            name = f"push from rank {rank}"
            threading.Thread(target=self._receive_from, args=(rank, pair, kept.get(rank)), name=name, daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """See `CollectiveReceiver.wait`."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is not ReceiverState.RECEIVING, timeout_s)
            if self._state is ReceiverState.RECEIVING:
                raise DeadlineError(f"ranks {sorted(self._missing)} have not sent everything after {timeout_s:.1f} s")
            if self._error is not None:
                raise self._error
            if self._state is not ReceiverState.RECEIVED:
                raise StateError("the push was stopped before everything was received")

    def stop(self) -> None:
        """Write nothing any more."""
        with self._changed:
            self._move(ReceiverState.IDLE)
        with self._writing:
            pass
        for group in self.take_groups().values():
            group.close()

    def take_groups(self) -> dict[int, PairGroup]:
        """The groups that can be used for another push."""
        with self._changed:
            groups, self._groups = self._groups, {}
            return groups

    def _move(self, following: ReceiverState) -> None:
        if following in TRANSITIONS[self._state]:
            self._state = following
            self._changed.notify_all()

    def _receive_from(self, rank: int, buckets: Sequence[Bucket], group: PairGroup | None) -> None:
        try:
            group = group or self._join.join(rank)
            self._receive_all(group, buckets)
        except Exception as error:  # noqa: BLE001 - a thread's edge: whatever went wrong is what `wait` raises
            if group is not None:
                group.close()
            failure = error if isinstance(error, ShoalError) else TransportError(f"{type(error).__name__}: {error}")
            self._end(rank, None, type(failure)(f"from rank {rank}: {failure}"))
        else:
            self._end(rank, group, None)

    def _end(self, rank: int, group: PairGroup | None, error: ShoalError | None) -> None:
        with self._changed:
            self._missing.discard(rank)
            if error is not None:
                self._error = self._error or error
                self._move(ReceiverState.FAILED)
            elif not self._missing:
                self._move(ReceiverState.RECEIVED)
            if group is not None and self._state is not ReceiverState.IDLE:
                self._groups[rank] = group

    def _receive_all(self, group: PairGroup, buckets: Sequence[Bucket]) -> None:
        deadline_s = self._join.deadline_s
        first = group.receive_header(deadline_s)
        if first != self._first:
            raise TransportError(f"the rank began with {first}, not with this push's {self._first}; push again")
        following = num_buckets = num_bytes = 0
        while (header := group.receive_header(deadline_s)).kind is not Kind.END:
            if header.kind is Kind.FLUSH:
                group.send_header(Header(Kind.WRITTEN, num_buckets, num_bytes), deadline_s)
                continue
            bucket, encoding = _check(header, buckets, following)
            self._receive_bucket(group, bucket, encoding, header.third)
            following = bucket.index + 1
            num_buckets, num_bytes = num_buckets + 1, num_bytes + header.third

    def _receive_bucket(self, group: PairGroup, bucket: Bucket, encoding: BucketEncoding, encoded_bytes: int) -> None:
        with self._buffers.borrow(encoded_bytes, self._join.deadline_s) as payload:
            group.receive(payload, self._join.deadline_s)
            with self._writing:
                if self._state is not ReceiverState.RECEIVING:
                    raise StateError("the push has ended")
                if encoding is BucketEncoding.DENSE:
                    write_dense(self._target, bucket, payload, 0)
                else:
                    num_elements = bucket.num_bytes // item_bytes(bucket.dtype, "a bucket")
                    write_delta(self._target, bucket, decode_delta(payload.cpu().numpy().data, bucket.dtype, num_elements))


def _check(header: Header, buckets: Sequence[Bucket], following: int) -> tuple[Bucket, BucketEncoding]:
    """What a header announces. Raises: TransportError: not in the plan, not in order, or of another size."""
    if header.kind is not Kind.BUCKET or not following <= header.first < len(buckets):
        raise TransportError(f"{header} of {len(buckets)} buckets came where one from {following} on belongs; push again")
    bucket = buckets[header.first]
    if header.second == BucketEncoding.DENSE and header.third == bucket.num_bytes:
        return bucket, BucketEncoding.DENSE
    if header.second == BucketEncoding.DELTA and 0 < header.third <= bucket.num_bytes:
        return bucket, BucketEncoding.DELTA
    msg = f"bucket {bucket.index} of {bucket.num_bytes} bytes was announced with encoding {header.second} and {header.third} bytes"
    raise TransportError(f"{msg}; push again")
