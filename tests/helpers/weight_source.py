"""The trainer's end of a push in the test's own process, and servers' staging without engines for it to write to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from shoal_trainer.source_layout import ComputedTensor
from shoal_trainer.weight_source import SourceIdentity, WeightSource
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.config.models import PushSection, SecuritySection
from shoal.errors import TransportError
from shoal.types.weights import (
    BucketEncoding,
    PairDigests,
    PieceDigests,
    Place,
    ServerTransfer,
    SinkLayout,
    SinkParameter,
    SinkTarget,
    SinkWorkerLayout,
    SourceLayout,
    StagedVersion,
)
from shoal.weights.buckets import Bucket
from shoal.weights.delta import Delta, decode_delta, encode_delta
from shoal.weights.dtypes import item_bytes
from shoal.weights.places import host_id
from shoal.weights.plan import ServerPlan
from shoal.weights.planner import plan_server
from shoal.weights.transports.base import LinkRequest, SourceTransport, StagingBuffer
from shoal.weights.transports.factory import open_source_transport
from shoal.weights.transports.pieces import bucket_digest, pack_bucket, write_delta, write_dense
from shoal.weights.transports.shm import ShmStaging
from shoal.weights.transports.staging import ParameterPieces, parameter_view
from shoal.weights.verification import match_digests, verify_buckets
from tests.helpers.layouts import HERE, sink_worker, stack_rows, staged

_serial = itertools.count()


class MemoryStaging:
    """`StagingBuffer` in this process's memory."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.endpoint = "grpc", f"memory:{next(_serial)}"

    def view(self, parameter: SinkParameter) -> Tensor:
        """See `StagingBuffer.view`."""
        return parameter_view(self._buffer, parameter)

    def close(self) -> None:
        """See `StagingBuffer.close`."""


class StagingServer:
    """A rollout server's staging without an engine: real plans, bytes and digests; follows the sink's rules on what staging holds.

    Args:
        layout: workers without endpoints.
        folder: of mapped files; None keeps the staging in memory, reached through `MemoryTransport`.
        place: where the workers run.
    """

    def __init__(self, layout: SinkLayout, folder: str | None = None, place: Place = HERE) -> None:
        self.staging = [_open_staging(worker, folder) for worker in layout.workers]
        ends = zip(layout.workers, self.staging, strict=True)
        workers = [replace(worker, endpoints=dict([one.endpoint]), place=place) for worker, one in ends]
        self.layout = replace(layout, workers=tuple(workers))
        self.staged: StagedVersion | None = None
        self._plan: ServerPlan | None = None
        self._source_id = ""
        self._known: dict[tuple[int, int, int], int] = {}

    @classmethod
    def copying(
        cls,
        server_id: str,
        shapes: Mapping[str, tuple[int, ...]],
        folder: str | None = None,
        dtype: str = "float32",
        place: Place = HERE,
    ) -> StagingServer:
        """One worker whose parameters are the source tensors themselves."""
        parameters, staging_bytes = staged(shapes, dtype)
        regions = [region for name, shape in shapes.items() for region in stack_rows(name, [(name, shape, 0, shape[0])])]
        return cls(SinkLayout(server_id=server_id, workers=(sink_worker(0, parameters, regions, staging_bytes, {}),)), folder, place)

    def target(self, *, dense: bool = False) -> SinkTarget:
        """What PREPARE of the source is told of this server."""
        return SinkTarget(layout=self.layout, staged=self.staged, dense=dense)

    def plan(self, source: SourceLayout, plan_hash: str, push: PushSection) -> None:
        """Plan as a sink does: the hash must agree, and from now on staging holds no complete version."""
        self._plan = plan_server(source, self.layout, bucket_bytes=push.bucket_bytes, transport=push.transport)
        assert self._plan.plan_hash == plan_hash
        self._source_id, self.staged = source.source_id, None

    def verify(self, policy_version: int, pairs: Sequence[PairDigests]) -> None:
        """Check every bucket as a sink does; then staging holds the version. Raises: StateError: a bucket differs."""
        assert self._plan is not None
        assert self._plan.coverage_fault(pairs) is None
        for worker, one in zip(self.layout.workers, self.staging, strict=True):
            target = ParameterPieces(worker.parameters, one.view, "test")
            planned = [bucket for rank, of in self._plan.pairs() if of == worker.worker_rank for bucket in self._plan.buckets(rank, of)]
            expected = match_digests(worker.worker_rank, planned, pairs)
            for _ in verify_buckets(expected, {}, lambda bucket, target=target: bucket_digest(target, bucket)):  # type: ignore[misc]
                pass
        self.staged = StagedVersion(source_id=self._source_id, policy_version=policy_version)

    def parameters(self, worker_rank: int = 0) -> dict[str, Tensor]:
        """Views of what is staged."""
        return {parameter.name: self.staging[worker_rank].view(parameter) for parameter in self.layout.workers[worker_rank].parameters}

    def staged_bytes(self) -> bytes:
        """Everything that is staged, one after another."""
        tensors = [tensor for worker in self.layout.workers for tensor in self.parameters(worker.worker_rank).values()]
        return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)

    def close(self) -> None:
        """Remove the staging."""
        for one in self.staging:
            one.close()


class MemoryLink:
    """`SourceLink` into a `StagingServer` in memory; counts what a wire would carry."""

    def __init__(self, transport: MemoryTransport, request: LinkRequest, staging: StagingBuffer) -> None:
        self._transport = transport
        self._request = request
        self._target = ParameterPieces(request.worker.parameters, staging.view, request.server_id)
        self.sent_bytes = 0

    def write_dense(self, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        """See `SourceLink.write_dense`."""
        self._meet_fault(bucket, BucketEncoding.DENSE)
        write_dense(self._target, bucket, pack_bucket(bucket, pieces), 0)
        self.sent_bytes += bucket.num_bytes
        return bucket_digest(self._target, bucket)

    def write_delta(self, bucket: Bucket, delta: Delta) -> None:
        """See `SourceLink.write_delta`."""
        self._meet_fault(bucket, BucketEncoding.DELTA)
        data = encode_delta(delta)
        write_delta(self._target, bucket, decode_delta(data, bucket.dtype, bucket.num_bytes // item_bytes(bucket.dtype, "bucket")))
        self.sent_bytes += len(data)

    def finish(self) -> None:
        """See `SourceLink.finish`."""

    def close(self) -> None:
        """See `SourceLink.close`."""
        self._transport.num_open -= 1

    def _meet_fault(self, bucket: Bucket, encoding: BucketEncoding) -> None:
        self._transport.written.append((self._request.server_id, bucket.worker_rank, bucket.index, encoding))
        self._transport.faults.get(self._request.server_id, lambda: None)()


class MemoryTransport:
    """`SourceTransport` to servers in memory.

    faults: by server id, what happens at every write to it. written: server, worker, index and encoding of every bucket, in order.
    """

    def __init__(self, *servers: StagingServer) -> None:
        self._staging = {one.endpoint[1]: one for server in servers for one in server.staging}
        self.faults: dict[str, Callable[[], None]] = {}
        self.written: list[tuple[str, int, int, BucketEncoding]] = []
        self.requests: list[LinkRequest] = []
        self.num_open = 0

    def prepare(self, worker: SinkWorkerLayout, transport: str) -> None:
        """See `SourceTransport.prepare`."""

    def open(self, request: LinkRequest, transport: str) -> MemoryLink:
        """See `SourceTransport.open`."""
        address = request.worker.endpoints[transport]
        if address not in self._staging:
            raise TransportError(f"{address} is gone")
        self.requests.append(request)
        self.num_open += 1
        return MemoryLink(self, request, self._staging[address])

    def link(self, server: StagingServer) -> MemoryLink:
        """A way into the first worker of a server."""
        request = LinkRequest(
            push_id="link",
            policy_version=0,
            rank=0,
            world_size=1,
            server_id=server.layout.server_id,
            worker=server.layout.workers[0],
            num_workers=len(server.layout.workers),
            collective_group="",
            timeout_s=1.0,
        )
        return self.open(request, server.staging[0].endpoint[0])

    def close(self) -> None:
        """See `SourceTransport.close`."""


class PushRig:
    """One rank's source and some servers, pushed to as a coordinator does. `version` is what the parameters hold.

    Args:
        parameters: live tensors; change them in place. Or what is computed from several.
        frozen: names of those that are not trained.
        transport: None for a `MemoryTransport` to the servers.
        settings: fields of `PushSection`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor | ComputedTensor],
        *servers: StagingServer,
        frozen: Collection[str] = (),
        transport: SourceTransport | None = None,
        source_id: str = "gang",
        **settings: Any,  # noqa: ANN401
    ) -> None:
        self.version = 1
        self.servers = {server.layout.server_id: server for server in servers}
        self.settings = PushSection(**settings)
        self.memory = MemoryTransport(*servers)
        self.source = WeightSource(
            {
                name: nn.Parameter(one, requires_grad=name not in frozen) if isinstance(one, Tensor) else one
                for name, one in parameters.items()
            },
            identity(source_id=source_id),
            self.memory if transport is None else transport,
            self.settings,
            policy_version=lambda: self.version,
        )

    def transfer(self, *server_ids: str, dense: bool = False) -> dict[str, ServerTransfer]:
        """PREPARE and TRANSFER to some servers, all by default."""
        servers = [self.servers[server_id] for server_id in server_ids or self.servers]
        push_id, source = f"push-{next(_serial)}", self.source.describe()
        planned = self.source.prepare(push_id, self.version, source, [server.target(dense=dense) for server in servers])
        for server in servers:
            server.plan(source, planned[server.layout.server_id].plan_hash, self.settings)
        return self.source.transfer(push_id, {}).servers

    def push(self, *server_ids: str, dense: bool = False) -> dict[str, ServerTransfer]:
        """`transfer`, and VERIFY on every server that got everything."""
        outcomes = self.transfer(*server_ids, dense=dense)
        for server_id, outcome in outcomes.items():
            if not outcome.error:
                self.servers[server_id].verify(self.version, outcome.pairs)
        return outcomes


def identity(rank: int = 0, world_size: int = 1, source_id: str = "gang", place: Place = HERE) -> SourceIdentity:
    """A rank that runs where the test's servers do."""
    return SourceIdentity(rank=rank, world_size=world_size, source_id=source_id, place=place)


def here(push: PushSection) -> Place:
    """This process's place, as the product tells it."""
    return Place(host_id=host_id(push.shm_dir), device="cpu")


def encodings(transfer: ServerTransfer) -> set[BucketEncoding]:
    """How the buckets of a server were sent."""
    return {encoding for pair in transfer.pairs for encoding in pair.encodings}


class FakeSource:
    """A gang of one rank that holds every checkpoint tensor whole, over the real transports: what an engine's tests push from.

    `tensors` may be changed in place.
    """

    def __init__(self, tensors: Mapping[str, NDArray[np.float32]], push: PushSection | None = None, source_id: str = "gang") -> None:
        self.tensors = {name: torch.from_numpy(np.ascontiguousarray(tensor)) for name, tensor in tensors.items()}
        settings = PushSection() if push is None else push
        place = here(settings)
        self._version = 0
        self._source = WeightSource(
            {name: nn.Parameter(tensor) for name, tensor in self.tensors.items()},
            identity(source_id=source_id, place=place),
            open_source_transport(settings, SecuritySection()),
            settings,
            policy_version=lambda: self._version,
        )
        self.layout = self._source.describe()

    def prepare(self, push_id: str, policy_version: int, sink: SinkLayout, staged: StagedVersion | None = None) -> str:
        """Plan a push of the tensors as they are; returns the plan's hash."""
        self._version = policy_version
        target = SinkTarget(layout=sink, staged=staged, dense=staged is None)
        return self._source.prepare(push_id, policy_version, self.layout, [target])[sink.server_id].plan_hash

    def transfer(self, push_id: str, collective_group: str = "", server_id: str = "") -> tuple[PairDigests, ...]:
        """Write everything that is planned; returns the digests. Raises: TransportError: the server did not get everything."""
        groups = {server_id: collective_group} if collective_group else {}
        (sent,) = self._source.transfer(push_id, groups).servers.values()
        if sent.error:
            raise TransportError(sent.error)
        return sent.pairs

    def write(self, sink: SinkLayout, policy_version: int = 1) -> tuple[str, tuple[PairDigests, ...]]:
        """Plan and write everything that a server needs; returns plan hash and digests."""
        push_id = f"write-{next(_serial)}"
        return self.prepare(push_id, policy_version, sink), self.transfer(push_id)

    def digest(self, server_id: str, plan_hash: str) -> tuple[PieceDigests, ...]:
        """Piece digests of the tensors as they are, by the last plan."""
        return self._source.digest(self._version, {server_id: plan_hash})[server_id]

    def close(self) -> None:
        """Let go of staging."""
        self._source.close()


def fake_ranks(world_size: int) -> Iterator[int]:
    """Be each rank in turn under a process group that sends nothing."""
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield rank
        finally:
            dist.destroy_process_group()


@contextmanager
def closing(*servers: StagingServer) -> Iterator[None]:
    """Remove the staging of servers at the end of the block."""
    try:
        yield
    finally:
        for server in servers:
            server.close()


def _open_staging(worker: SinkWorkerLayout, folder: str | None) -> StagingBuffer:
    if folder is None:
        return MemoryStaging(worker.staging_bytes)
    return ShmStaging(folder, f"test-{next(_serial)}", worker.staging_bytes)
