"""A trainer's end of a push in the test's own process: whole float32 tensors on rank 0, real plans, transports and digests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.config.models import PushSection, SecuritySection
from shoal.types import SinkLayout, SourceLayout, SourceTensor
from shoal.types.weights import BucketEncoding, PairDigests, PieceDigests, Place, TensorShard
from shoal.weights import boxes
from shoal.weights.buckets import Bucket, Piece
from shoal.weights.places import host_id
from shoal.weights.plan import ServerPlan
from shoal.weights.planner import plan_server
from shoal.weights.transports.base import LinkRequest
from shoal.weights.transports.factory import open_source_transport
from shoal.weights.transports.pieces import canonical_digest, digest_of

SECURITY = SecuritySection()


class PushTrainer:
    """Holds every tensor on rank 0.

    Args:
        tensors: by Hugging Face name.
        push: as the server's.
    """

    def __init__(self, tensors: Mapping[str, NDArray[np.float32] | Tensor], push: PushSection, *, source_id: str = "gang") -> None:
        self.tensors = {name: torch.as_tensor(np.ascontiguousarray(tensor)).clone() for name, tensor in tensors.items()}
        self.source_id = source_id
        self._push = push
        self._transport = open_source_transport(push, SECURITY)

    @property
    def layout(self) -> SourceLayout:
        """What rank 0 holds."""
        return SourceLayout(
            source_id=self.source_id,
            tensors=tuple(_whole(name, tuple(tensor.shape)) for name, tensor in self.tensors.items()),
            places=(Place(host_id=host_id(self._push.shm_dir), device="cpu"),),
        )

    def plan(self, layout: SinkLayout) -> ServerPlan:
        """The plan for a server."""
        return plan_server(self.layout, layout, bucket_bytes=self._push.bucket_bytes, transport=self._push.transport)

    def write(
        self,
        layout: SinkLayout,
        *,
        push_id: str = "a",
        version: int = 1,
        unchanged: Collection[str] = (),
        group: str = "",
        timeout_s: float = 10.0,
    ) -> tuple[PairDigests, ...]:
        """Write every bucket densely, but those whose parameters are all `unchanged`; answers the digests of all.

        Args:
            group: as the server's plan answered it.
        """
        plan = self.plan(layout)
        requests = {
            worker.worker_rank: LinkRequest(
                push_id=push_id,
                policy_version=version,
                rank=0,
                world_size=1,
                server_id=layout.server_id,
                worker=worker,
                num_workers=len(layout.workers),
                collective_group=group,
                timeout_s=timeout_s,
            )
            for worker in layout.workers
        }
        return tuple(self._write_pair(plan, requests[worker_rank], unchanged) for _, worker_rank in plan.pairs())

    def digests(self, layout: SinkLayout) -> tuple[PieceDigests, ...]:
        """What an audit of this trainer answers."""
        plan = self.plan(layout)
        return tuple(
            PieceDigests(
                rank=rank,
                worker_rank=worker_rank,
                xxh3=tuple(
                    canonical_digest(self._piece(piece).to(getattr(torch, bucket.dtype)), bucket.dtype)
                    for bucket in plan.buckets(rank, worker_rank)
                    for piece in bucket.pieces
                ),
            )
            for rank, worker_rank in plan.pairs()
        )

    def close(self) -> None:
        """Let go of staging."""
        self._transport.close()

    def _write_pair(self, plan: ServerPlan, request: LinkRequest, unchanged: Collection[str]) -> PairDigests:
        worker = request.worker
        link = self._transport.open(request, plan.transport_of(0, worker.worker_rank))
        told = []
        for bucket in plan.buckets(0, worker.worker_rank):
            if all(piece.parameter in unchanged for piece in bucket.pieces):
                told.append((digest_of(self._pieces(bucket), bucket.dtype), BucketEncoding.UNCHANGED))
            else:
                told.append((link.write_dense(bucket, self._pieces(bucket)), BucketEncoding.DENSE))
        link.finish()
        link.close()
        xxh3, encodings = zip(*told, strict=True)
        return PairDigests(rank=0, worker_rank=worker.worker_rank, xxh3=xxh3, encodings=encodings)

    def _pieces(self, bucket: Bucket) -> list[Tensor]:
        return [self._piece(piece) for piece in bucket.pieces]

    def _piece(self, piece: Piece) -> Tensor:
        tensor = self.tensors[piece.source_name]
        for dim, (offset, size) in enumerate(zip(piece.source_box.offsets, piece.source_box.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


def _whole(name: str, shape: tuple[int, ...]) -> SourceTensor:
    return SourceTensor(name=name, shape=shape, dtype="float32", shards=(TensorShard(rank=0, box=boxes.whole(shape)),))


def with_wrong_digest(pairs: tuple[PairDigests, ...], index: int) -> tuple[PairDigests, ...]:
    """The same, but one digest of the first pair is another bucket's."""
    first = pairs[0]
    xxh3 = tuple(digest ^ (position == index) for position, digest in enumerate(first.xxh3))
    return (replace(first, xxh3=xxh3), *pairs[1:])
