"""TRANSFER on one rank: how each bucket crosses its link, and one thread per server, so that none waits for another's.

Links of all workers of a server are open at once, and buckets go out in order of (index, worker rank), so that no worker waits until
another one has everything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from shoal.errors import DeadlineError, ShoalError
from shoal.telemetry.logs import get_logger
from shoal.types.weights import BucketEncoding, PairDigests, ServerTransfer, SinkWorkerLayout, StagedVersion
from shoal.weights.buckets import Bucket
from shoal.weights.delta import Delta, encoded_size
from shoal.weights.transports.base import LinkRequest, SourceLink, SourceTransport
from shoal.weights.transports.pieces import digest_of, find_delta, torch_dtype
from shoal_trainer.shadow import Shadow
from shoal_trainer.source_layout import HeldTensors

log = get_logger(__name__)

STUCK_GRACE_S = 1.0
"""How much longer than the deadline a server's thread is waited for, at most; a link should end by itself at the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPart:
    """What this rank has for one engine worker. compares: unchanged elements are looked for and left out."""

    worker: SinkWorkerLayout
    transport: str
    buckets: tuple[Bucket, ...]
    compares: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPart:
    """This rank's part of the plan of one server; num_bytes is of the whole plan."""

    server_id: str
    plan_hash: str
    num_bytes: int
    num_workers: int
    pairs: tuple[PairPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTo:
    """One server in one push.

    base: what its staging holds and may be built on; None sends everything. deadline, gives_up: of `time.monotonic`, when sending must be
    over, and when its thread is waited for no longer.
    """

    push_id: str
    policy_version: int
    rank: int
    world_size: int
    part: ServerPart
    base: StagedVersion | None
    collective_group: str
    deadline: float
    gives_up: float


class Encoder:
    """Chooses how a bucket crosses a link, and sends it so; threads share one.

    Args:
        tensors: the live parameters.
        shadow: what the servers got last.
        source_id: of this gang; a staging that another gang wrote is no base.
    """

    def __init__(self, tensors: HeldTensors, shadow: Shadow, source_id: str) -> None:
        self._tensors = tensors
        self._shadow = shadow
        self._source_id = source_id
        # Servers of equal plans have equal buckets, whose bytes need hashing once.
        self._frozen_digests: dict[Bucket, int] = {}
        self._unchanged_digests: dict[Bucket, int] = {}

    def forget_plans(self) -> None:
        """Let go of the digests of frozen buckets; the plans have changed."""
        self._frozen_digests = {}

    def forget_version(self) -> None:
        """Let go of what was found out about the parameters; they have changed."""
        self._unchanged_digests = {}

    def is_frozen(self, bucket: Bucket) -> bool:
        """Whether nothing of the bucket is trained; the plan mixes no frozen pieces with others."""
        return self._tensors.is_frozen(bucket.pieces[0].source_name)

    def send(self, bucket: Bucket, link: SourceLink, base: StagedVersion | None, *, compares: bool) -> tuple[int, BucketEncoding]:
        """Send a bucket in the smallest way that the base allows.

        Returns: digest of its complete new bytes, and the way.
        Raises: as `SourceLink.write_dense`.
        """
        if base is None or base.source_id != self._source_id:
            return link.write_dense(bucket, self._live(bucket)), BucketEncoding.DENSE
        if self.is_frozen(bucket):
            return self._digest_once(bucket, self._frozen_digests), BucketEncoding.UNCHANGED
        # One bucket beyond the shard: what is compared, sent and digested is cast once.
        pieces = [piece.to(torch_dtype(bucket.dtype)) for piece in self._live(bucket)]
        delta = self._delta(bucket, pieces, base.policy_version, compares=compares)
        if delta is None:
            return link.write_dense(bucket, pieces), BucketEncoding.DENSE
        if delta.positions.size == 0:
            return self._digest_once(bucket, self._unchanged_digests), BucketEncoding.UNCHANGED
        link.write_delta(bucket, delta)
        return digest_of(pieces, bucket.dtype), BucketEncoding.DELTA

    def _delta(self, bucket: Bucket, pieces: list[Tensor], version: int, *, compares: bool) -> Delta | None:
        """What to send against the staged version; None if everything is to be sent."""
        old = self._shadow.pieces(bucket, version) if compares else None
        delta = None if old is None else find_delta(bucket, old, pieces)
        return delta if delta is not None and encoded_size(delta) < bucket.num_bytes else None

    def _digest_once(self, bucket: Bucket, known: dict[Bucket, int]) -> int:
        if bucket not in known:
            known[bucket] = digest_of(self._live(bucket), bucket.dtype)
        return known[bucket]

    def _live(self, bucket: Bucket) -> list[Tensor]:
        dtype = torch_dtype(bucket.dtype)
        return [self._tensors.piece(piece.source_name, piece.source_box, dtype) for piece in bucket.pieces]


def send_to_all(
    pushes: Mapping[str, PushTo], transport: SourceTransport, encoder: Encoder, prepare_thread: Callable[[], None]
) -> tuple[dict[str, ServerTransfer], dict[str, threading.Thread]]:
    """Send to every server in a thread of its own.

    Args:
        pushes: by server id.
        prepare_thread: called first in every thread.
    Returns: how it went, by server id, and the threads that have not ended although their deadline is over.
    """
    found: dict[str, ServerTransfer] = {}

    def run(server_id: str, push: PushTo) -> None:
        prepare_thread()
        found[server_id] = _send_or_fail(push, transport, encoder)

    threads = {
        server_id: threading.Thread(target=run, args=(server_id, push), name=f"push to {server_id}", daemon=True)
        for server_id, push in pushes.items()
    }
    for thread in threads.values():
        thread.start()
    for server_id, thread in threads.items():
        thread.join(max(pushes[server_id].gives_up - time.monotonic(), 0.0))
    stuck = {server_id: thread for server_id, thread in threads.items() if server_id not in found}
    for server_id in stuck:
        log.error("weight_transfer_stuck", server_id=server_id, push_id=pushes[server_id].push_id)
    outcomes = {server_id: found.get(server_id, failed(f"rank {push.rank} is stuck")) for server_id, push in pushes.items()}
    return outcomes, stuck


def failed(reason: str, sent_bytes: int = 0) -> ServerTransfer:
    """The outcome of a server that did not get everything."""
    return ServerTransfer(pairs=(), sent_bytes=sent_bytes, dense_bytes=0, error=reason)


def _send_or_fail(push: PushTo, transport: SourceTransport, encoder: Encoder) -> ServerTransfer:
    links: dict[int, SourceLink] = {}
    try:
        return _send(push, transport, encoder, links)
    except Exception as error:  # noqa: BLE001 - the edge of a server's thread: what is wrong with one server must not cost the others
        reason = f"rank {push.rank}: {error}" if isinstance(error, ShoalError) else f"rank {push.rank}: {type(error).__name__}: {error}"
        write = log.warning if isinstance(error, ShoalError) else log.exception
        write("weight_transfer_failed", push_id=push.push_id, server_id=push.part.server_id, reason=reason)
        return failed(reason, sum(link.sent_bytes for link in links.values()))


def _send(push: PushTo, transport: SourceTransport, encoder: Encoder, links: dict[int, SourceLink]) -> ServerTransfer:
    sent: dict[int, list[tuple[int, BucketEncoding]]] = {pair.worker.worker_rank: [] for pair in push.part.pairs}
    order = sorted(
        ((bucket, pair) for pair in push.part.pairs for bucket in pair.buckets),
        key=lambda item: (item[0].index, item[0].worker_rank),
    )
    with ExitStack() as stack:
        for pair in push.part.pairs:
            link = transport.open(_link_request(push, pair), pair.transport)
            stack.callback(link.close)
            links[pair.worker.worker_rank] = link
        for bucket, pair in order:
            _remaining_s(push)
            link = links[bucket.worker_rank]
            sent[bucket.worker_rank].append(encoder.send(bucket, link, push.base, compares=pair.compares))
        for link in links.values():
            link.finish()
    return ServerTransfer(
        pairs=tuple(
            PairDigests(
                rank=push.rank,
                worker_rank=worker_rank,
                xxh3=tuple(digest for digest, _ in buckets),
                encodings=tuple(encoding for _, encoding in buckets),
            )
            for worker_rank, buckets in sorted(sent.items())
        ),
        sent_bytes=sum(link.sent_bytes for link in links.values()),
        dense_bytes=sum(bucket.num_bytes for bucket, _ in order),
    )


def _link_request(push: PushTo, pair: PairPart) -> LinkRequest:
    return LinkRequest(
        push_id=push.push_id,
        policy_version=push.policy_version,
        rank=push.rank,
        world_size=push.world_size,
        server_id=push.part.server_id,
        worker=pair.worker,
        num_workers=push.part.num_workers,
        collective_group=push.collective_group,
        timeout_s=_remaining_s(push),
    )


def _remaining_s(push: PushTo) -> float:
    remaining_s = push.deadline - time.monotonic()
    if remaining_s <= 0:
        raise DeadlineError("the deadline of TRANSFER is over; allow more time (push.transfer_timeout_s)")
    return remaining_s
