"""The trainer's end of the collective transport: buckets point to point, over nccl between GPUs and gloo between CPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from shoal.config.models import PushSection
from shoal.errors import ShoalError, StateError, TransportError
from shoal.types.weights import BucketEncoding, SinkWorkerLayout
from shoal.weights.buckets import Bucket
from shoal.weights.delta import Delta, encode_delta
from shoal.weights.transports.base import LinkRequest
from shoal.weights.transports.packing import host_pieces, pack_whole
from shoal.weights.transports.pair_group import RANK, Header, Kind, PairGroup, connect_store, hello
from shoal.weights.transports.pieces import pack_bucket

UNUSED_PUSHES = 64
"""A group is left after so many pushes that did not use it, else those of servers that are gone would pile up. A server that is only left
out of a push, as while another one is caught up, still has its end and names the group again."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A group that a finished push has left, where it was formed under which name, and the number of that push."""

    origin: tuple[str, str]
    push_number: int
    group: PairGroup


class CollectiveSourceTransport:
    """Opens links; keeps a worker's group from push to push while the server names the same `collective_group`.

    Safe to use from several threads. Each thread that writes packs into one buffer of `push.bucket_bytes`.
    """

    def __init__(self, push: PushSection) -> None:
        self._bucket_bytes = push.bucket_bytes
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, int], _Kept] = {}
        self._push_id = ""
        self._push_number = 0
        self._local = threading.local()

    def prepare(self, worker: SinkWorkerLayout) -> None:
        """Nothing can be done before the server listens. Raises: TransportError: the worker offers no collective."""
        _address_of(worker)

    def open(self, request: LinkRequest) -> CollectiveSourceLink:
        """See `SourceTransport.open`; waits until the worker has joined.

        Raises: StateError: the server named no group.
        """
        if not request.collective_group:
            raise StateError(f"server {request.server_id} named no collective group; plan the push at the server before TRANSFER")
        deadline_s = time.monotonic() + request.timeout_s
        group = self._take(request) or _join(request, deadline_s)
        try:
            group.send_header(hello(request.push_id, request.policy_version), deadline_s)
        except ShoalError:
            group.close()
            raise
        return CollectiveSourceLink(group, deadline_s, self._buffer, lambda: self._keep(request, group))

    def close(self) -> None:
        """See `SourceTransport.close`."""
        with self._lock:
            while self._kept:
                self._kept.popitem()[1].group.close()

    def _take(self, request: LinkRequest) -> PairGroup | None:
        key = request.server_id, request.worker.worker_rank
        with self._lock:
            self._drop_unused(request.push_id)
            kept = self._kept.pop(key, None)
        if kept is None:
            return None
        if kept.origin == _origin(request):
            return kept.group
        kept.group.close()
        return None

    def _keep(self, request: LinkRequest, group: PairGroup) -> None:
        with self._lock:
            kept = _Kept(_origin(request), self._push_number, group)
            self._kept[request.server_id, request.worker.worker_rank] = kept

    def _drop_unused(self, push_id: str) -> None:
        """Count the pushes, and leave the groups that none of the last UNUSED_PUSHES has used."""
        if push_id == self._push_id:
            return
        self._push_id, self._push_number = push_id, self._push_number + 1
        for key in [key for key, kept in self._kept.items() if self._push_number - kept.push_number > UNUSED_PUSHES]:
            self._kept.pop(key).group.close()

    def _buffer(self, num_bytes: int) -> Tensor:
        """This thread's buffer; free again when a send has returned."""
        buffer: Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._local.buffer = torch.empty(max(num_bytes, self._bucket_bytes), dtype=torch.uint8)
        return buffer[:num_bytes]


class CollectiveSourceLink:
    """`SourceLink` over a group of two: writing <-> finished, either -> closed; from finished it leaves its group to the next push."""

    def __init__(self, group: PairGroup, deadline_s: float, buffer: Callable[[int], Tensor], on_finished: Callable[[], None]) -> None:
        self._group = group
        self._deadline_s = deadline_s
        self._buffer = buffer
        self._on_finished = on_finished
        self._num_buckets = 0
        self._sent_bytes = 0
        self._finished = self._closed = False

    def write_dense(self, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        """See `SourceLink.write_dense`."""
        if self._group.device.type == "cuda":
            payload = pack_bucket(bucket, [piece.to(self._group.device) for piece in pieces])
            xxh3 = xxhash.xxh3_64_intdigest(payload.cpu().numpy().data)
        else:
            payload = self._buffer(bucket.num_bytes)
            xxh3 = pack_whole(bucket, host_pieces(bucket, pieces), payload)
        self._send(bucket, BucketEncoding.DENSE, payload)
        return xxh3

    def write_delta(self, bucket: Bucket, delta: Delta) -> None:
        """See `SourceLink.write_delta`."""
        payload = torch.frombuffer(bytearray(encode_delta(delta)), dtype=torch.uint8)
        self._send(bucket, BucketEncoding.DELTA, payload.to(self._group.device))

    def finish(self) -> None:
        """See `SourceLink.finish`; waits for the worker's word."""
        sent = self._num_buckets, self._sent_bytes
        with self._closing_on_error():
            self._group.send_header(Header(Kind.FLUSH), self._deadline_s)
            answer = self._group.receive_header(self._deadline_s)
            if answer != Header(Kind.WRITTEN, *sent):
                raise TransportError(f"the worker answered {answer} to {sent[0]} buckets of {sent[1]} bytes; push again")
        self._finished = True

    def close(self) -> None:
        """See `SourceLink.close`; after `finish` it ends the push at the worker."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._finished:
                raise TransportError("what was written is not known to be there")
            self._group.send_header(Header(Kind.END), self._deadline_s)
            self._on_finished()
        except ShoalError:
            self._group.close()

    @property
    def sent_bytes(self) -> int:
        """See `SourceLink.sent_bytes`."""
        return self._sent_bytes

    def _send(self, bucket: Bucket, encoding: BucketEncoding, payload: Tensor) -> None:
        self._finished = False
        with self._closing_on_error():
            self._group.send_header(Header(Kind.BUCKET, bucket.index, encoding, payload.numel()), self._deadline_s)
            self._group.send(payload, self._deadline_s)
        self._num_buckets += 1
        self._sent_bytes += payload.numel()

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Tell the worker at once, instead of letting it wait for its deadline."""
        try:
            yield
        except ShoalError:
            self._finished = False
            self.close()
            raise


def _origin(request: LinkRequest) -> tuple[str, str]:
    return _address_of(request.worker), request.collective_group


def _join(request: LinkRequest, deadline_s: float) -> PairGroup:
    address = _address_of(request.worker)
    return PairGroup(
        connect_store(address, deadline_s),
        f"{request.collective_group}/{request.rank}/{request.worker.worker_rank}",
        RANK,
        device=f"cuda:{torch.cuda.current_device()}" if request.worker.place.device == "cuda" else "cpu",
        address=address,
        deadline_s=deadline_s,
    )


def _address_of(worker: SinkWorkerLayout) -> str:
    if "collective" not in worker.endpoints:
        offered = ", ".join(worker.endpoints) or "nothing"
        msg = f"worker {worker.worker_rank} offers {offered}, not collective; set push.transport to one of them"
        raise TransportError(msg)
    return worker.endpoints["collective"]
