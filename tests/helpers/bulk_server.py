"""A rollout server's bulk stream without an engine: staging in plain memory, a real gRPC server on a thread or in a process."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import torch
from torch import Tensor

from shoal.codec.bucket_stream import WEIGHT_SINK_SERVICE
from shoal.config.models import SecuritySection
from shoal.rpc.server import RpcServer
from shoal.types.weights import Place, SinkLayout, SinkRegion
from shoal.weights.plan import ServerPlan
from shoal.weights.planner import plan_server
from shoal.weights.transports.grpc_sink import BulkReceiver, add_bulk_handler
from shoal.weights.transports.staging import ParameterPieces, parameter_view
from tests.helpers.layouts import fsdp_source, rows_of, sink_worker, staged
from tests.helpers.rpc_services import PLAINTEXT

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One server and the gang that pushes to it: every tensor goes to every worker whole, from `num_ranks` ranks."""

    shapes: Shapes
    dtype: str = "float32"
    num_ranks: int = 1
    num_workers: int = 1
    bucket_bytes: int = 4 << 20

    def sink(self, endpoints: Mapping[str, str]) -> SinkLayout:
        parameters, num_bytes = staged(self.shapes, self.dtype)
        regions = [
            SinkRegion(parameter=name, source_name=name, source_box=rows_of(shape, 0, shape[0]), parameter_box=rows_of(shape, 0, shape[0]))
            for name, shape in self.shapes.items()
        ]
        workers = [sink_worker(rank, parameters, regions, num_bytes, endpoints) for rank in range(self.num_workers)]
        elsewhere = Place(host_id="elsewhere", device="cpu")
        return SinkLayout(server_id="server", workers=tuple(replace(worker, place=elsewhere) for worker in workers))

    def plan(self, transport: str) -> ServerPlan:
        source = fsdp_source(self.shapes, self.num_ranks)
        return plan_server(source, self.sink({transport: "nowhere:1"}), bucket_bytes=self.bucket_bytes, transport=transport)

    def staging(self) -> dict[int, Staging]:
        return {rank: Staging(self) for rank in range(self.num_workers)}

    def full(self, seed: int = 0) -> dict[str, Tensor]:
        """Tensors of the whole model, as the trainer has them."""
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}


class Staging:
    """A worker's staging in this process's memory."""

    def __init__(self, setting: Setting) -> None:
        self._parameters, num_bytes = staged(setting.shapes, setting.dtype)
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        # Touches every page, as a server has after its first push.
        self.buffer.fill_(0)
        self.target = ParameterPieces(self._parameters, lambda parameter: parameter_view(self.buffer, parameter), "test")

    def parameters(self) -> dict[str, Tensor]:
        return {parameter.name: parameter_view(self.buffer, parameter) for parameter in self._parameters}


@contextmanager
def bulk_server(receiver: BulkReceiver, security: SecuritySection = PLAINTEXT, port: int = 0) -> Iterator[str]:
    """Serve on a thread with its own event loop; gives the address."""
    started: list[str] = []
    ready, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(receiver, security, port, started, ready, stop)))
    thread.start()
    try:
        ready.wait(30)
        yield started[0]
    finally:
        stop.set()
        thread.join()


async def _serve(
    receiver: BulkReceiver, security: SecuritySection, port: int, started: list[str], ready: threading.Event, stop: threading.Event
) -> None:
    async def write(parts: AsyncIterator[bytes]) -> tuple[int, int]:
        return await receiver.write(parts)

    server = RpcServer("127.0.0.1", port, security)
    server.add(lambda inner: add_bulk_handler(inner, write), WEIGHT_SINK_SERVICE)
    try:
        started.append(f"127.0.0.1:{await server.start()}")
        ready.set()
        await asyncio.to_thread(stop.wait)
    finally:
        ready.set()
        await server.stop(0.0)


def _serve_in_process(setting: Setting, port: int, answer: Connection) -> None:
    torch.set_num_threads(1)
    receiver = BulkReceiver({rank: staging.target for rank, staging in setting.staging().items()})
    receiver.arm("push-1", 1, setting.plan("grpc"))
    with bulk_server(receiver, port=port) as address:
        answer.send(address)
        answer.recv()


@contextmanager
def bulk_process(setting: Setting, port: int = 0) -> Iterator[tuple[str, SpawnProcess]]:
    """Serve push-1 of version 1 in a process; gives the address and the process, which the test may kill."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_in_process, args=(setting, port, theirs))
    process.start()
    try:
        yield ours.recv(), process
    finally:
        process.kill()
        process.join()
