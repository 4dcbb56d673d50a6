"""A rollout server's bulk stream without an engine: a real gRPC server on a thread or in a process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import torch

from shoal.codec.bucket_stream import WEIGHT_SINK_SERVICE
from shoal.config.models import SecuritySection
from shoal.rpc.server import RpcServer
from shoal.weights.transports.grpc_sink import BulkReceiver, add_bulk_handler
from tests.helpers.forked import fork_context
from tests.helpers.rpc_services import PLAINTEXT
from tests.helpers.wire_setting import Setting


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
def bulk_process(setting: Setting, port: int = 0) -> Iterator[tuple[str, ForkServerProcess]]:
    """Serve push-1 of version 1 in a process; gives the address and the process, which the test may kill."""
    context = fork_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_in_process, args=(setting, port, theirs))
    process.start()
    try:
        yield ours.recv(), process
    finally:
        process.kill()
        process.join()
