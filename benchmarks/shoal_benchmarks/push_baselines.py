"""Other ways to bring the same bytes to another process, measured like a push: from separate tensors to separate tensors.

    memcpy            one copy_ per parameter inside one process: what the memory allows
    gather_broadcast  the ranks gather each parameter, rank 0 broadcasts it over gloo: what trainers without resharding do
    grpc_stream       one bare stream of raw 1 MB messages, no protobuf, copied to its place: what gRPC allows
    safetensors       a file written, read and copied to its place

Each runs in processes of its own, one thread each; a warm-up is compared in full and not counted. Times are medians of the repeats, from
the start of the sender to the end of the receiver on the monotonic clock that all processes share.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import ShoalError
from shoal_benchmarks.push_methods import METHODS, fill, open_method, raw_bytes

_WAIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What is moved: names and shapes, dtype; and how often."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: str
    repeats: int
    folder: str

    def filled(self) -> dict[str, Tensor]:
        """Seeded random finite values."""
        return fill(self.shapes, self.dtype)

    def empty(self) -> dict[str, Tensor]:
        """Room for them, touched."""
        return {name: torch.zeros(shape, dtype=getattr(torch, self.dtype)) for name, shape in self.shapes.items()}


def measure_baselines(payload: Payload, num_ranks: int) -> dict[str, float]:
    """Seconds of every baseline, `<name>_s`.

    Args:
        num_ranks: trainer ranks that gather.
    Raises: ShoalError: one of them failed.
    """
    seconds = {"memcpy_s": _run(1, _copy, payload, 1), "memcpy_2_threads_s": _run(1, _copy, payload, 2)}
    seconds["gather_broadcast_s"] = _run(num_ranks + 1, _gather_and_broadcast, payload)
    for method in METHODS:
        seconds[f"{method}_s"] = _run_pair(method, payload)
    return seconds


def _copy(_rank: int, result: Connection, payload: Payload, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    source, target = payload.filled(), payload.empty()

    def copy() -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)

    result.send(_timed(copy, payload.repeats))


def _gather_and_broadcast(rank: int, result: Connection, payload: Payload) -> None:
    """Ranks 0 .. N-1 hold dim-0 shards, as FSDP2 leaves them; rank N is the engine."""
    torch.set_num_threads(1)
    engine = dist.get_world_size() - 1
    train, push = dist.new_group(list(range(engine))), dist.new_group([0, engine])
    received = payload.empty() if rank == engine else {}
    transfer = partial(_receive_broadcasts, received, push) if rank == engine else _gathering(payload, rank, engine, train, push)
    seconds = []
    for _ in range(payload.repeats + 1):
        dist.barrier()
        start_s = time.monotonic()
        transfer()
        end = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.broadcast(end, engine)
        seconds.append(float(end.item()) - start_s)
    if rank == engine:
        _check_received(received, payload)
    if rank == 0:
        result.send(seconds[1:])
    dist.barrier()


def _receive_broadcasts(received: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    for tensor in received.values():
        dist.broadcast(tensor, 0, group=group)


def _gathering(payload: Payload, rank: int, num_ranks: int, train: dist.ProcessGroup, push: dist.ProcessGroup) -> Callable[[], None]:
    """A trainer rank's part."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(train, "cpu")
    shards = [
        DTensor.from_local(_chunk(tensor, rank, num_ranks), mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())
        for tensor in payload.filled().values()
    ]

    def transfer() -> None:
        for shard in shards:
            whole = shard.full_tensor()
            if rank == 0:
                dist.broadcast(whole, 0, group=push)

    return transfer


def _chunk(tensor: Tensor, rank: int, num_ranks: int) -> Tensor:
    chunks = torch.chunk(tensor, num_ranks)
    return chunks[rank].clone() if rank < len(chunks) else tensor.new_empty((0, *tensor.shape[1:]))


def _timed(work: Callable[[], None], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats + 1):
        start_s = time.monotonic()
        work()
        seconds.append(time.monotonic() - start_s)
    return seconds[1:]


def _run(num_processes: int, work: Callable[..., None], payload: Payload, *arguments: object) -> float:
    """Run one function in processes, in one gloo group if there are several; answers the median of what it sends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    store = Path(payload.folder) / f"{work.__name__.strip('_')}-store"
    processes = [
        context.Process(target=_enter, args=(rank, num_processes, str(store), work, theirs, payload, *arguments), daemon=True)
        for rank in range(num_processes)
    ]
    seconds = _collect(work.__name__.strip("_"), processes, ours)
    store.unlink(missing_ok=True)
    return seconds


def _enter(
    rank: int, num_processes: int, store: str, work: Callable[..., None], result: Connection, payload: Payload, *arguments: object
) -> None:
    if num_processes > 1:
        import os

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes)
    work(rank, result, payload, *arguments)
    if num_processes > 1:
        dist.destroy_process_group()


def _run_pair(method: str, payload: Payload) -> float:
    """Run one method between two processes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender_end, receiver_end = context.Pipe()
    processes = [
        context.Process(target=_send_all, args=(method, payload, sender_end, theirs), daemon=True),
        context.Process(target=_receive_all, args=(method, payload, receiver_end), daemon=True),
    ]
    return _collect(method, processes, ours)


def _send_all(method: str, payload: Payload, peer: Connection, result: Connection) -> None:
    torch.set_num_threads(1)
    state = payload.filled()
    with open_method(method, payload.folder).sender(state, peer) as send:
        seconds = []
        for _ in range(payload.repeats + 1):
            peer.recv()
            start_s = time.monotonic()
            send()
            seconds.append(peer.recv() - start_s)
    result.send(seconds[1:])
    peer.send("bye")


def _receive_all(method: str, payload: Payload, peer: Connection) -> None:
    torch.set_num_threads(1)
    state = payload.empty()
    with open_method(method, payload.folder).receiver(state, peer) as receive:
        for index in range(payload.repeats + 1):
            peer.send("ready")
            receive()
            end_s = time.monotonic()
            if index == 0:
                _check_received(state, payload)
            peer.send(end_s)
        peer.recv()


def _check_received(state: Mapping[str, Tensor], payload: Payload) -> None:
    for name, wanted in payload.filled().items():
        if not torch.equal(raw_bytes(state[name]), raw_bytes(wanted)):
            raise AssertionError(f"{name} arrived with other bytes")


def _collect(name: str, processes: list[SpawnProcess], results: Connection) -> float:
    """Wait for the times of one of the processes."""
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + _WAIT_S
    try:
        while not results.poll(0.1):
            if time.monotonic() > deadline_s or any(process.exitcode not in (None, 0) for process in processes):
                raise ShoalError(f"baseline {name} failed; the lines above say why")
        return float(statistics.median(results.recv()))
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
