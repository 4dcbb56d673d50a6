"""A rollout server without an engine: real staging files, real digests, parameters swapped at COMMIT."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.errors import StateError
from shoal.types.weights import Box, CopyDigest, SinkCommitted, SinkLayout, SinkParameter, SinkRegion, SinkVerified, SinkWorkerLayout
from shoal.weights.transports.shm import ShmSinkTransport
from shoal.weights.verification import verify_staging
from tests.helpers.layouts import decoder_sink, stack_rows, staged

_serial = itertools.count()


class ShmSink:
    """Follows the sink's protocol over shared memory; `after_staging` may spoil what was staged before VERIFY looks at it."""

    def __init__(self, layout: SinkLayout, folder: str) -> None:
        self._folder = folder
        self._layout = layout
        self._transports: list[ShmSinkTransport] = []
        self._staged_push = self._verified_push = ""
        self.served_version = 0
        self.served: list[dict[str, Tensor]] = [
            {parameter.name: _empty(parameter) for parameter in worker.parameters} for worker in layout.workers
        ]
        self.after_staging: Callable[[ShmSink], None] = lambda _: None

    @classmethod
    def copying(cls, server_id: str, shapes: Mapping[str, tuple[int, ...]], folder: str) -> ShmSink:
        """One worker whose parameters are the source tensors themselves."""
        parameters, staging_bytes = staged(shapes)
        regions = [region for name, shape in shapes.items() for region in stack_rows(name, [(name, shape, 0, shape[0])] if shape else [])]
        scalars = [_scalar_region(name) for name, shape in shapes.items() if not shape]
        worker = SinkWorkerLayout(
            worker_rank=0, parameters=parameters, regions=(*regions, *scalars), staging_path="", staging_bytes=staging_bytes
        )
        return cls(SinkLayout(server_id=server_id, workers=(worker,)), folder)

    @classmethod
    def decoder(cls, server_id: str, tp: int, folder: str, dtype: str = "float32", *, separate_head: bool = True) -> ShmSink:
        """The fused tensor-parallel decoder of `tests.helpers.layouts`."""
        return cls(decoder_sink(server_id, tp, separate_head=separate_head, dtype=dtype), folder)

    def stage(self) -> SinkLayout:
        """Allocate staging once, and answer where it is."""
        if not self._transports:
            for worker in self._layout.workers:
                name = f"test-{self._layout.server_id}-{worker.worker_rank}-{next(_serial)}"
                self._transports.append(ShmSinkTransport(self._folder, name, worker.staging_bytes))
        workers = [replace(worker, staging_path=one.address) for worker, one in zip(self._layout.workers, self._transports, strict=True)]
        return replace(self._layout, workers=tuple(workers))

    def staged(self, worker_rank: int) -> dict[str, Tensor]:
        """Views of what is staged."""
        parameters = self._layout.workers[worker_rank].parameters
        return {parameter.name: self._transports[worker_rank].tensor(parameter) for parameter in parameters}

    def digest_of(self, worker_rank: int) -> Callable[[SinkParameter, Box], int]:
        """The digest function of one worker's staging."""
        return self._transports[worker_rank].digest

    def close(self) -> None:
        """Remove the staging files."""
        for transport in self._transports:
            transport.close()
        self._transports = []

    async def prepare(self, push_id: str, policy_version: int, *, timeout_s: float) -> tuple[SinkLayout, int]:
        self._staged_push, self._verified_push = push_id, ""
        return self.stage(), self.served_version

    async def verify(
        self, push_id: str, policy_version: int, plan_hash: str, digests: Sequence[CopyDigest], *, timeout_s: float
    ) -> SinkVerified:
        if push_id != self._staged_push:
            raise StateError(f"push {push_id} is not staged")
        self.after_staging(self)
        num_bytes = sum(sum(verify_staging(worker, digests, self.digest_of(worker.worker_rank))) for worker in self._layout.workers)
        self._verified_push = push_id
        return SinkVerified(num_bytes=num_bytes, verify_ms=0.0)

    async def commit(self, push_id: str, policy_version: int, *, timeout_s: float) -> SinkCommitted:
        if push_id != self._verified_push:
            raise StateError(f"push {push_id} is not verified")
        self.served = [
            {name: tensor.clone() for name, tensor in self.staged(worker.worker_rank).items()} for worker in self._layout.workers
        ]
        self.served_version = policy_version
        return SinkCommitted(policy_version=policy_version, pause_ms=0.0)

    async def abort(self, push_id: str, *, timeout_s: float) -> int:
        self._staged_push = self._verified_push = ""
        return self.served_version


def expected_parameters(worker: SinkWorkerLayout, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a worker must hold, cut straight from the full tensors; zero where no region is."""
    expected = {parameter.name: _empty(parameter) for parameter in worker.parameters}
    for region in worker.regions:
        source = full[region.source_name][_index(region.source_box)]
        expected[region.parameter][_index(region.parameter_box)] = source.to(expected[region.parameter].dtype)
    return expected


def _empty(parameter: SinkParameter) -> Tensor:
    return torch.zeros(parameter.shape, dtype=getattr(torch, parameter.dtype))


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))


def _scalar_region(name: str) -> SinkRegion:
    return SinkRegion(parameter=name, source_name=name, source_box=Box(offsets=(), sizes=()), parameter_box=Box(offsets=(), sizes=()))
