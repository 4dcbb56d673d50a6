"""The trainer's end for tests of transports: ranks as threads of this process, each with its slices of whole tensors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.config.models import PushSection, SecuritySection
from shoal.types.weights import Box, SinkLayout, SinkWorkerLayout, SourceLayout
from shoal.weights.buckets import Bucket
from shoal.weights.plan import ServerPlan
from shoal.weights.planner import plan_server
from shoal.weights.transports.base import LinkRequest, SourceLink
from shoal.weights.transports.factory import open_source_transport
from tests.helpers.transport_sink import SinkProcess

Write = Callable[[SourceLink, Bucket, Sequence[Tensor]], int | None]
"""Writes one bucket from its pieces; answers the digest, or None if nothing was sent."""

_pushes = itertools.count(1)


def write_all(link: SourceLink, bucket: Bucket, pieces: Sequence[Tensor]) -> int | None:
    """Everything, dense."""
    return link.write_dense(bucket, pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A push that the sink has agreed to."""

    push_id: str
    policy_version: int
    group: str
    layout: SinkLayout
    plan: ServerPlan


class Gang:
    """`len(source.places)` ranks; `full` are the whole tensors, which a test may change between pushes."""

    def __init__(
        self, transport: str, source: SourceLayout, full: Mapping[str, Tensor], bucket_bytes: int, timeout_s: float = 20.0
    ) -> None:
        self.source = source
        self.full = dict(full)
        self._transport = transport
        self._timeout_s = timeout_s
        self._push = PushSection(bucket_bytes=bucket_bytes)
        self._ranks = [open_source_transport(self._push, SecuritySection()) for _ in source.places]

    def push(self, sink: SinkProcess, layout: SinkLayout, write: Write = write_all) -> dict[tuple[int, int], list[int | None]]:
        """A whole push; answers each bucket's digest. Raises: what a rank raised first."""
        started = self.start(sink, layout)
        try:
            return self.transfer(started, write)
        finally:
            sink.disarm()

    def start(self, sink: SinkProcess, layout: SinkLayout) -> Started:
        """PREPARE on both sides."""
        number = next(_pushes)
        plan = plan_server(self.source, layout, bucket_bytes=self._push.bucket_bytes, transport=self._transport)
        for rank, worker_rank in plan.pairs():
            self._ranks[rank].prepare(layout.workers[worker_rank], self._transport)
        group = sink.arm(f"push-{number}", number, self.source)
        return Started(push_id=f"push-{number}", policy_version=number, group=group, layout=layout, plan=plan)

    def transfer(self, started: Started, write: Write = write_all) -> dict[tuple[int, int], list[int | None]]:
        """TRANSFER of all ranks at once."""
        with ThreadPoolExecutor(len(self._ranks)) as threads:
            running = [threads.submit(self.transfer_rank, started, rank, write) for rank in range(len(self._ranks))]
        return {pair: digests for one in running for pair, digests in one.result().items()}

    def transfer_rank(self, started: Started, rank: int, write: Write = write_all) -> dict[tuple[int, int], list[int | None]]:
        """TRANSFER of one rank, worker after worker."""
        digests: dict[tuple[int, int], list[int | None]] = {}
        for worker in started.layout.workers:
            buckets = started.plan.buckets(rank, worker.worker_rank)
            if not buckets:
                continue
            link = self.open(started, rank, worker)
            try:
                digests[rank, worker.worker_rank] = [write(link, bucket, self.pieces(bucket)) for bucket in buckets]
                link.finish()
            finally:
                link.close()
        return digests

    def open(self, started: Started, rank: int, worker: SinkWorkerLayout) -> SourceLink:
        """A link of one rank."""
        request = LinkRequest(
            push_id=started.push_id,
            policy_version=started.policy_version,
            rank=rank,
            world_size=len(self._ranks),
            server_id=started.layout.server_id,
            worker=worker,
            num_workers=len(started.layout.workers),
            collective_group=started.group,
            timeout_s=self._timeout_s,
        )
        return self._ranks[rank].open(request, self._transport)

    def pieces(self, bucket: Bucket) -> list[Tensor]:
        """Views of the whole tensors."""
        return [self.full[piece.source_name][index_of(piece.source_box)] for piece in bucket.pieces]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


def index_of(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))


def expected_parameters(worker: SinkWorkerLayout, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a worker must hold, cut straight from the full tensors; zero where no region is."""
    expected = {one.name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype)) for one in worker.parameters}
    for region in worker.regions:
        target = expected[region.parameter]
        target[index_of(region.parameter_box)] = full[region.source_name][index_of(region.source_box)].to(target.dtype)
    return expected


def push_until_killed(transport: str, source: SourceLayout, started: Started, bucket_bytes: int) -> None:
    """What a process of its own runs: rank 0 writes sevens into all buckets but the last, then waits to be killed."""
    torch.set_num_threads(1)
    full = {tensor.name: torch.full(tensor.shape, 7.0) for tensor in source.tensors}
    gang = Gang(transport, source, full, bucket_bytes)
    link = gang.open(started, 0, started.layout.workers[0])
    for bucket in started.plan.buckets(0, 0)[:-1]:
        link.write_dense(bucket, gang.pieces(bucket))
    threading.Event().wait()
