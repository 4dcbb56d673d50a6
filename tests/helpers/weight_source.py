"""A one-rank trainer's end of a push, in the test's own process: whole float32 tensors, the real planner and transport."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.types import CopyDigest, SinkLayout, SourceShard
from shoal.weights import boxes
from shoal.weights.planner import plan_copies
from shoal.weights.transports.shm import ShmSourceTransport


class FakeSource:
    """Holds every checkpoint tensor on rank 0."""

    def __init__(self, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        self.tensors = {name: torch.from_numpy(np.ascontiguousarray(tensor)) for name, tensor in tensors.items()}
        self._transport = ShmSourceTransport()

    def write(self, layout: SinkLayout) -> tuple[str, list[CopyDigest]]:
        """Plan and write everything that a server needs; returns plan hash and digests."""
        plan = plan_copies(self._shards(), [layout])
        writers = {worker.worker_rank: self._transport.open(worker) for worker in layout.workers}
        digests = []
        for copy in plan.copies:
            source = self.tensors[copy.source_name]
            for dim, (offset, size) in enumerate(zip(copy.source_box.offsets, copy.source_box.sizes, strict=True)):
                source = source.narrow(dim, offset, size)
            xxh3 = writers[copy.worker_rank].write(copy.parameter, copy.parameter_box, source)
            digests.append(CopyDigest(worker_rank=copy.worker_rank, parameter=copy.parameter, parameter_box=copy.parameter_box, xxh3=xxh3))
        return plan.plan_hash, digests

    def close(self) -> None:
        """Let go of staging."""
        self._transport.close()

    def _shards(self) -> list[SourceShard]:
        return [
            SourceShard(name=name, shape=tuple(tensor.shape), dtype="float32", rank=0, box=boxes.whole(tuple(tensor.shape)))
            for name, tensor in self.tensors.items()
        ]
