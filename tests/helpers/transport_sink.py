"""A rollout server without an engine in a process of its own: real staging, a transport's receiving end, and looks at what is staged."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config.models import PushSection
from shoal.types.weights import SinkLayout, SinkWorkerLayout, SourceLayout
from shoal.weights.plan import ServerPlan
from shoal.weights.planner import plan_server
from shoal.weights.transports.base import StagingBuffer
from shoal.weights.transports.chunks import as_array
from shoal.weights.transports.factory import open_staging
from shoal.weights.transports.pieces import bucket_digest
from shoal.weights.transports.staging import ParameterPieces
from tests.helpers.forked import fork_context
from tests.helpers.transport_receivers import RECEIVERS, Receiver

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What must not grow from push to push."""

    num_files: int
    num_maps: int
    num_threads: int
    rss_bytes: int

    @classmethod
    def of_this_process(cls) -> Footprint:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            num_files=len(os.listdir("/proc/self/fd")),
            num_maps=Path("/proc/self/maps").read_text().count("shoal-"),
            num_threads=threading.active_count(),
            rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        )


class SinkProcess:
    """Hosts one server at a time; `stage` replaces it."""

    def __init__(self, transport: str, folder: str, bucket_bytes: int, device: str = "cpu") -> None:
        self.transport = transport
        context = fork_context()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(transport, folder, bucket_bytes, device, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def stage(self, layout: SinkLayout) -> SinkLayout:
        """Allocate staging, full of zeros; answers the layout with endpoints."""
        answer: SinkLayout = self._ask("stage", layout)
        return answer

    def unstage(self) -> None:
        """Remove the staging."""
        self._ask("unstage")

    def arm(self, push_id: str, policy_version: int, source: SourceLayout) -> str:
        """Begin a push; answers the collective group."""
        answer: str = self._ask("arm", push_id, policy_version, source)
        return answer

    def disarm(self) -> None:
        """End a push."""
        self._ask("disarm")

    def digests(self) -> dict[tuple[int, int], list[int]]:
        """Of every bucket of the last push's plan, from staging."""
        answer: dict[tuple[int, int], list[int]] = self._ask("digests")
        return answer

    def parameters(self, worker_rank: int) -> dict[str, Tensor]:
        """Copies of what a worker has staged."""
        raw: dict[str, tuple[bytes, tuple[int, ...], str]] = self._ask("parameters", worker_rank)
        return {name: _tensor_of(*value) for name, value in raw.items()}

    def footprint(self) -> Footprint:
        """Of the sink's process."""
        answer: Footprint = self._ask("footprint")
        return answer

    def kill(self) -> None:
        """As the kernel would."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Remove the staging and end the process."""
        if self.process.is_alive():
            self.unstage()
        self._pipe.close()
        self.process.join(10)
        self.kill()

    def _ask(self, name: str, *args: object) -> Any:  # noqa: ANN401 - each command has its own answer
        self._pipe.send((name, args))
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"the sink's process did not answer {name}")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Sink:
    def __init__(self, transport: str, folder: str, bucket_bytes: int, device: str) -> None:
        self._transport = transport
        self._device = device
        self._push = PushSection(shm_dir=folder, bucket_bytes=bucket_bytes)
        self._buffers: dict[int, StagingBuffer] = {}
        self._targets: dict[int, ParameterPieces] = {}
        self._receiver: Receiver | None = None
        self._layout = SinkLayout(server_id="", workers=())
        self._plan: ServerPlan | None = None
        self._serial = 0

    def stage(self, layout: SinkLayout) -> SinkLayout:
        self.unstage()
        for worker in layout.workers:
            self._serial += 1
            name = f"test-{os.getpid()}-{self._serial}"
            buffer = open_staging(self._push, name, worker.staging_bytes, self._device)
            self._buffers[worker.worker_rank] = buffer
            self._targets[worker.worker_rank] = ParameterPieces(worker.parameters, buffer.view, name)
        self._receiver = RECEIVERS[self._transport](self._push, layout, self._targets)
        self._layout = replace(layout, workers=tuple(map(self._reachable, layout.workers)))
        return self._layout

    def _reachable(self, worker: SinkWorkerLayout) -> SinkWorkerLayout:
        assert self._receiver is not None
        address = self._receiver.endpoint(worker.worker_rank)
        endpoints = dict([self._buffers[worker.worker_rank].endpoint]) if address is None else {self._transport: address}
        return replace(worker, endpoints=endpoints)

    def unstage(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._targets.clear()
        while self._buffers:
            self._buffers.popitem()[1].close()

    def arm(self, push_id: str, policy_version: int, source: SourceLayout) -> str:
        assert self._receiver is not None
        self._plan = plan_server(source, self._layout, bucket_bytes=self._push.bucket_bytes, transport=self._transport)
        return self._receiver.arm(push_id, policy_version, self._plan, len(source.places))

    def disarm(self) -> None:
        assert self._receiver is not None
        self._receiver.disarm()

    def digests(self) -> dict[tuple[int, int], list[int]]:
        assert self._plan is not None
        return {
            pair: [bucket_digest(self._targets[pair[1]], bucket) for bucket in self._plan.buckets(*pair)] for pair in self._plan.pairs()
        }

    def parameters(self, worker_rank: int) -> Mapping[str, tuple[bytes, tuple[int, ...], str]]:
        layout = self._layout.workers[worker_rank]
        views = {parameter: self._buffers[worker_rank].view(parameter) for parameter in layout.parameters}
        return {one.name: (as_array(view.cpu()).tobytes(), one.shape, one.dtype) for one, view in views.items()}

    def footprint(self) -> Footprint:
        return Footprint.of_this_process()


def _serve(transport: str, folder: str, bucket_bytes: int, device: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    sink = _Sink(transport, folder, bucket_bytes, device)
    try:
        while True:
            name, args = pipe.recv()
            command: Callable[..., object] = getattr(sink, name)
            try:
                pipe.send(command(*args))
            except Exception as error:  # noqa: BLE001 - the test gets it
                pipe.send(error)
    except EOFError:
        sink.unstage()


def _tensor_of(data: bytes, shape: tuple[int, ...], dtype: str) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)
