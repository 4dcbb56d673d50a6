"""One server and the gang that pushes to it, for tests of the transports that cross a wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.types.weights import Box, Place, SinkLayout, SinkRegion
from shoal.weights.buckets import Bucket
from shoal.weights.plan import ServerPlan
from shoal.weights.planner import plan_server
from shoal.weights.transports.staging import ParameterPieces, parameter_view
from tests.helpers.layouts import fsdp_source, rows_of, sink_worker, staged

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


def _index_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))


def cut(full: Mapping[str, Tensor], bucket: Bucket) -> list[Tensor]:
    """A bucket's pieces of whole tensors."""
    return [full[piece.source_name][_index_of(piece.source_box)] for piece in bucket.pieces]


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
