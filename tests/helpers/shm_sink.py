"""A rollout server without an engine: real staging files, plans and digests; parameters are copied out at COMMIT."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shoal.config.models import PushSection
from shoal.errors import StateError
from shoal.types.weights import (
    InflightMode,
    PairDigests,
    PieceDigests,
    SinkCommitted,
    SinkLayout,
    SinkPlanned,
    SinkPrepared,
    SinkVerified,
    SourceLayout,
)
from tests.helpers.layouts import decoder_sink
from tests.helpers.weight_source import StagingServer


class ShmSink:
    """Follows the sink's protocol over shared memory; `after_staging` may spoil what was staged before VERIFY looks at it."""

    def __init__(self, layout: SinkLayout, folder: str, settings: PushSection) -> None:
        self.staging = StagingServer(layout, folder)
        self.server_id = layout.server_id
        self.served_version = 0
        self.served = self._copies()
        self.after_staging: Callable[[ShmSink], None] = lambda _: None
        self._settings = settings
        self._prepared = self._verified = ""

    @classmethod
    def decoder(
        cls, server_id: str, tp: int, folder: str, settings: PushSection, dtype: str = "float32", *, separate_head: bool = True
    ) -> ShmSink:
        """The fused tensor-parallel decoder of `tests.helpers.layouts`."""
        return cls(decoder_sink(server_id, tp, separate_head=separate_head, dtype=dtype), folder, settings)

    async def prepare(self, push_id: str, policy_version: int, expires_s: float, *, timeout_s: float) -> SinkPrepared:
        self._prepared, self._verified = push_id, ""
        return SinkPrepared(layout=self.staging.layout, served_version=self.served_version, staged=self.staging.staged)

    async def plan(self, push_id: str, policy_version: int, plan_hash: str, source: SourceLayout, *, timeout_s: float) -> SinkPlanned:
        self._require(self._prepared == push_id, f"push {push_id} is not prepared")
        self.staging.plan(source, plan_hash, self._settings)
        return SinkPlanned(num_buckets=0)

    async def verify(
        self, push_id: str, policy_version: int, plan_hash: str, pairs: Sequence[PairDigests], *, timeout_s: float
    ) -> SinkVerified:
        self._require(self._prepared == push_id, f"push {push_id} is not planned")
        self.after_staging(self)
        self.staging.verify(policy_version, pairs)
        self._verified = push_id
        return SinkVerified(num_bytes=len(self.staging.staged_bytes()), verify_ms=0.0)

    async def commit(self, push_id: str, policy_version: int, inflight: InflightMode, *, timeout_s: float) -> SinkCommitted:
        self._require(self._verified == push_id, f"push {push_id} is not verified")
        self.served, self.served_version = self._copies(), policy_version
        return SinkCommitted(policy_version=policy_version, pause_ms=0.0)

    async def abort(self, push_id: str, *, timeout_s: float) -> int:
        self._prepared = self._verified = ""
        return self.served_version

    async def digest(self, policy_version: int, plan_hash: str, *, timeout_s: float) -> tuple[PieceDigests, ...]:
        raise StateError("a server without an engine has no live weights")

    def close(self) -> None:
        """Remove the staging files."""
        self.staging.close()

    def _copies(self) -> list[dict[str, Tensor]]:
        """What is staged, for each worker."""
        workers = self.staging.layout.workers
        return [{name: tensor.clone() for name, tensor in self.staging.parameters(one.worker_rank).items()} for one in workers]

    @staticmethod
    def _require(allowed: bool, refusal: str) -> None:
        if not allowed:
            raise StateError(refusal)
