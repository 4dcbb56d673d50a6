"""The trainer of the push walk: a gang of two real weight sources in the test's process, whose ranks and links fail where a script says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from shoal_trainer.weight_servicer import PREPARE, TRANSFER, WeightCommands, WeightSourceServicer
from shoal_trainer.weight_source import WeightSource
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shoal.codec.layouts import sink_target_to_proto, source_layout_from_proto
from shoal.codec.weights import planned_servers_from_proto, source_digests_from_proto, source_transferred_from_proto
from shoal.config.models import PushSection, SecuritySection
from shoal.errors import StateError, TransportError
from shoal.rpc.v1 import weights_pb2
from shoal.types.weights import BucketEncoding, PieceDigests, PlannedServer, SinkTarget, SinkWorkerLayout, SourceLayout, SourceTransferred
from shoal.weights.buckets import Bucket
from shoal.weights.delta import Delta
from shoal.weights.transports.base import LinkRequest, SourceLink, SourceTransport
from shoal.weights.transports.factory import open_source_transport
from shoal.weights.transports.pieces import digest_of
from tests.helpers.push_walk_model import FROZEN, REPLICATED, SHAPES
from tests.helpers.weight_source import fake_ranks, here, identity

NUM_RANKS = 2


@dataclass(slots=True)
class LinkFault:
    """What happens on one rank's way to one server. how: open, write, drop or finish; after: writes that go well before."""

    rank: int
    server_id: str
    how: str
    after: int = 0


class FaultyTransport:
    """A real `SourceTransport` whose links meet a fault."""

    def __init__(self, inner: SourceTransport, rank: int) -> None:
        self.inner = inner
        self.rank = rank
        self.fault: LinkFault | None = None
        self.encodings: dict[BucketEncoding, int] = dict.fromkeys(BucketEncoding, 0)

    def prepare(self, worker: SinkWorkerLayout, transport: str) -> None:
        """See `SourceTransport.prepare`."""
        self.inner.prepare(worker, transport)

    def open(self, request: LinkRequest, transport: str) -> SourceLink:
        """See `SourceTransport.open`."""
        fault = self.fault
        if fault is not None and (fault.rank, fault.server_id) != (self.rank, request.server_id):
            fault = None
        if fault is not None and fault.how == "open":
            raise TransportError("the test's link does not open")
        return FaultyLink(self, self.inner.open(request, transport), fault)

    def close(self) -> None:
        """See `SourceTransport.close`."""
        self.inner.close()


class FaultyLink:
    """A real link that breaks or loses a bucket."""

    def __init__(self, transport: FaultyTransport, inner: SourceLink, fault: LinkFault | None) -> None:
        self._transport = transport
        self._inner = inner
        self._fault = fault
        self._num_written = 0

    def write_dense(self, bucket: Bucket, pieces: Sequence[Tensor]) -> int:
        """See `SourceLink.write_dense`."""
        if self._is_lost(BucketEncoding.DENSE):
            return digest_of(pieces, bucket.dtype)
        return self._inner.write_dense(bucket, pieces)

    def write_delta(self, bucket: Bucket, delta: Delta) -> None:
        """See `SourceLink.write_delta`."""
        if not self._is_lost(BucketEncoding.DELTA):
            self._inner.write_delta(bucket, delta)

    def finish(self) -> None:
        """See `SourceLink.finish`."""
        if self._fault is not None and self._fault.how == "finish":
            raise TransportError("the test's link does not end well")
        self._inner.finish()

    def close(self) -> None:
        """See `SourceLink.close`."""
        self._inner.close()

    @property
    def sent_bytes(self) -> int:
        """See `SourceLink.sent_bytes`."""
        return self._inner.sent_bytes

    def _is_lost(self, encoding: BucketEncoding) -> bool:
        self._transport.encodings[encoding] += 1
        self._num_written += 1
        if self._fault is None or self._num_written <= self._fault.after:
            return False
        if self._fault.how == "write":
            raise TransportError("the test's link broke")
        return self._fault.how == "drop" and self._num_written == self._fault.after + 1


class WalkGang:
    """Two ranks with their shards; also a coordinator's `WeightSource` for it, through the servicer of rank 0.

    Args:
        full: every tensor, float32; `version` is what they are. Change both together, through `load`.
    """

    def __init__(self, source_id: str, full: Mapping[str, Tensor], version: int, push: PushSection) -> None:
        self.source_id = source_id
        self.version = version
        self.failing_rank: tuple[int, str] | None = None
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[list[bytes]]] = set()
        self.transports: list[FaultyTransport] = []
        self.sources: list[WeightSource] = []
        self._locals: list[dict[str, Tensor]] = []
        self._parts: list[dict[str, DTensor | Tensor]] = []
        for rank in fake_ranks(NUM_RANKS):
            self._add_rank(rank, full, push)
        self._handlers = [WeightCommands(source, lambda: self.version).handlers() for source in self.sources]
        self._servicer = WeightSourceServicer(self)

    async def load(self, full: Mapping[str, Tensor], version: int) -> None:
        """Hold other values, which are a version."""
        async with self._turn:
            for rank, local in enumerate(self._locals):
                for name, tensor in local.items():
                    tensor.copy_(_shard(name, full[name], rank))
            self.version = version

    async def close(self) -> None:
        """Let go of the servers' staging."""
        async with self._turn:
            for source in self.sources:
                source.close()

    async def run(self, command: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """`WeightGang`: every rank in a thread; as in a real gang a command runs alone, and to its end though its caller be gone."""
        running = asyncio.create_task(self._run_alone(command, payload))
        self._running.add(running)
        running.add_done_callback(self._forget)
        return await asyncio.shield(running)

    async def describe(self, *, timeout_s: float) -> tuple[SourceLayout, int]:
        """See `WeightSource.describe`."""
        answer = await self._servicer.DescribeSource(weights_pb2.DescribeSourceRequest(), _Context())
        return source_layout_from_proto(answer.layout), answer.policy_version

    async def prepare(
        self, push_id: str, policy_version: int, sinks: Sequence[SinkTarget], *, timeout_s: float
    ) -> dict[str, PlannedServer]:
        """See `WeightSource.prepare`."""
        request = weights_pb2.PrepareSourceRequest(
            push_id=push_id, policy_version=policy_version, sinks=[sink_target_to_proto(sink) for sink in sinks]
        )
        return planned_servers_from_proto(await self._servicer.PrepareSource(request, _Context()))

    async def transfer(self, push_id: str, collective_groups: Mapping[str, str], *, timeout_s: float) -> SourceTransferred:
        """See `WeightSource.transfer`."""
        request = weights_pb2.TransferSourceRequest(push_id=push_id, collective_groups=collective_groups)
        return source_transferred_from_proto(await self._servicer.TransferSource(request, _Context()))

    async def abort(self, push_id: str, *, timeout_s: float) -> None:
        """See `WeightSource.abort`."""
        await self._servicer.AbortSource(weights_pb2.AbortSourceRequest(push_id=push_id), _Context())

    async def digest(self, policy_version: int, plan_hashes: Mapping[str, str], *, timeout_s: float) -> dict[str, tuple[PieceDigests, ...]]:
        """See `WeightSource.digest`."""
        request = weights_pb2.DigestSourceRequest(policy_version=policy_version, plan_hashes=plan_hashes)
        return source_digests_from_proto(await self._servicer.DigestSource(request, _Context()))

    async def _run_alone(self, command: str, payload: bytes) -> list[bytes]:
        async with self._turn:
            calls = (asyncio.to_thread(self._run, rank, command, payload) for rank in range(NUM_RANKS))
            answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, bytes)]

    def _forget(self, running: asyncio.Task[list[bytes]]) -> None:
        self._running.discard(running)
        if not running.cancelled():
            running.exception()

    def _run(self, rank: int, command: str, payload: bytes) -> bytes:
        if self.failing_rank == (rank, command):
            raise StateError(f"the test's rank {rank} fails")
        return self._handlers[rank][command](payload)

    def _add_rank(self, rank: int, full: Mapping[str, Tensor], push: PushSection) -> None:
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        parameters: dict[str, DTensor | Tensor] = {}
        local: dict[str, Tensor] = {}
        for name, tensor in full.items():
            if name in REPLICATED:
                parameters[name] = nn.Parameter(tensor.clone())
                local[name] = parameters[name].detach()
            else:
                part = distribute_tensor(tensor.clone(), mesh, [Shard(_dim(name))], src_data_rank=None)
                part.requires_grad_(name not in FROZEN)
                parameters[name] = part
                local[name] = part.to_local().detach()
        transport = FaultyTransport(open_source_transport(push, SecuritySection()), rank)
        self.transports.append(transport)
        self._locals.append(local)
        own = identity(rank, NUM_RANKS, self.source_id, here(push))
        self.sources.append(WeightSource(parameters, own, transport, push, lambda: self.version))


class _Context:
    """What a servicer asks of a call."""

    def time_remaining(self) -> float:
        return 30.0


def random_link_fault(rng: random.Random, server_id: str) -> LinkFault:
    """Anything that can go wrong on one link."""
    return LinkFault(rng.randrange(NUM_RANKS), server_id, rng.choice(["open", "write", "drop", "finish"]), rng.randrange(4))


def random_rank_fault(rng: random.Random) -> tuple[int, str]:
    """A rank that fails a whole command."""
    return rng.randrange(NUM_RANKS), rng.choice([PREPARE, TRANSFER])


def initial(rng: random.Random) -> dict[str, Tensor]:
    """Random tensors."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}


def _dim(name: str) -> int:
    return 1 if name == "k" else 0


def _shard(name: str, full: Tensor, rank: int) -> Tensor:
    if name in REPLICATED:
        return full
    chunks = torch.chunk(full, NUM_RANKS, dim=_dim(name))
    return chunks[rank]
