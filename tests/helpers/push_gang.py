"""A gang of real gloo ranks around an FSDP2 decoder; commands travel over pipes as bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
import torch.distributed as dist
from shoal_trainer.weight_servicer import WeightCommands
from shoal_trainer.weight_source import WeightSource
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from shoal import errors
from shoal.config.models import PushSection, SecuritySection
from shoal.errors import DeadlineError, InternalError, ShoalError
from shoal.weights.transports.factory import open_source_transport
from tests.helpers.forked import fork_context
from tests.helpers.layouts import decoder_shapes
from tests.helpers.weight_source import identity

UPDATE, COUNT_COLLECTIVES = "test.update", "test.count_collectives"
START_TIMEOUT_S = 90.0


class Node(nn.Module):
    """A module that only holds parameters and other nodes."""


def build_decoder(*, tied: bool) -> Node:
    """The decoder of `decoder_shapes` as a module tree, seeded."""
    torch.manual_seed(7)
    root = Node()
    for name, shape in decoder_shapes(tied=tied).items():
        *path, leaf = name.split(".")
        node: nn.Module = root
        for part in path:
            if not hasattr(node, part):
                node.add_module(part, Node())
            node = getattr(node, part)
        node.register_parameter(leaf, nn.Parameter(torch.randn(shape)))
    return root


def update(parameter: Tensor) -> None:
    """What a step does to every parameter; element-wise, so that it is the same on shards and whole tensors."""
    parameter.mul_(1.5).add_(0.25)


def full_parameters(*, tied: bool, num_updates: int) -> dict[str, Tensor]:
    """What the gang must hold after some updates, without sharding."""
    model = build_decoder(tied=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            for _ in range(num_updates):
                update(parameter)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class Rank:
    """The loop of one rank."""

    def __init__(self, rank: int, world_size: int, tied: bool, settings: PushSection) -> None:
        model = build_decoder(tied=tied)
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in model.model.layers.children():  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._model = model
        self._version = 0
        self._num_collectives = 0
        source = WeightSource(
            dict(model.named_parameters()),
            identity(rank, world_size),
            open_source_transport(settings, SecuritySection()),
            settings,
            policy_version=lambda: self._version,
        )
        own: dict[str, Callable[[bytes], bytes]] = {UPDATE: self._update, COUNT_COLLECTIVES: self._count_collectives}
        self._handlers = dict(WeightCommands(source, lambda: self._version).handlers()) | own

    def answer(self, request: bytes) -> bytes:
        """Run one command; errors become their class name and text."""
        command, _, payload = request.partition(b"\0")
        try:
            with CommDebugMode() as collectives:  # type: ignore[no-untyped-call]
                result = self._handlers[command.decode()](payload)
        except ShoalError as error:
            return b"E" + f"{type(error).__name__}\0{error}".encode()
        self._num_collectives += collectives.get_total_counts()
        return b"R" + result

    def _update(self, _payload: bytes) -> bytes:
        with torch.no_grad():
            for parameter in self._model.parameters():
                update(parameter)
        self._version += 1
        return b""

    def _count_collectives(self, _payload: bytes) -> bytes:
        return str(self._num_collectives).encode()


def run_rank(rank: int, world_size: int, store: str, tied: bool, settings: PushSection, connection: Connection) -> None:
    """Entry of a rank; ends when the pipe closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    loop = Rank(rank, world_size, tied, settings)
    connection.send_bytes(b"ready")
    while True:
        try:
            connection.send_bytes(loop.answer(connection.recv_bytes()))
        except EOFError:
            dist.destroy_process_group()
            return


class PipeGang:
    """`WeightGang` over ranks in processes of their own."""

    def __init__(self, world_size: int, folder: Path, settings: PushSection, *, tied: bool) -> None:
        context = fork_context()
        self._connections: list[Connection] = []
        self.processes: list[ForkServerProcess] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(rank, world_size, str(folder / "store"), tied, settings, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)
        for connection in self._connections:
            assert connection.poll(START_TIMEOUT_S)
            assert connection.recv_bytes() == b"ready"

    async def run(self, command: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Send to all ranks, then collect."""
        request = command.encode() + b"\0" + payload
        return await asyncio.to_thread(self._run, request, timeout_s)

    def close(self) -> None:
        """End the ranks."""
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()

    def _run(self, request: bytes, timeout_s: float) -> list[bytes]:
        try:
            for connection in self._connections:
                connection.send_bytes(request)
            return [self._result(connection, timeout_s) for connection in self._connections]
        except (EOFError, OSError) as error:
            raise InternalError("a rank of the gang died") from error

    def _result(self, connection: Connection, timeout_s: float) -> bytes:
        if not connection.poll(timeout_s):
            raise DeadlineError("a rank of the gang did not answer")
        answer = connection.recv_bytes()
        if answer[:1] == b"E":
            name, _, text = answer[1:].decode().partition("\0")
            error_class: type[ShoalError] = getattr(errors, name)
            raise error_class(text)
        return answer[1:]
