"""Scripted ends of a weight push: they keep what a real one would and fail, stall or lie where a test says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.config.models import PushSection
from shoal.errors import ShoalError, StateError
from shoal.types.weights import (
    BucketEncoding,
    InflightMode,
    PairDigests,
    PieceDigests,
    PlannedServer,
    ServerTransfer,
    SinkCommitted,
    SinkLayout,
    SinkPlanned,
    SinkPrepared,
    SinkTarget,
    SinkVerified,
    SourceLayout,
    SourceTransferred,
    StagedVersion,
)
from shoal.weights.plan import ServerPlan
from shoal.weights.planner import plan_server
from tests.helpers.layouts import decoder_shapes, decoder_sink, fsdp_source

Fault = ShoalError | asyncio.Event | Exception
"""Raised, or waited for (a stage that hangs)."""

DELTA_PART = 10
"""A delta has so much less bytes than what it stands for."""
_SETTINGS = PushSection()


def never() -> asyncio.Event:
    """What a stage that hangs waits for, unless the test sets it."""
    return asyncio.Event()


async def meet(fault: Fault | None) -> None:
    """Suffer a scripted fault."""
    if isinstance(fault, asyncio.Event):
        await fault.wait()
    elif fault is not None:
        raise fault


def piece_digests(plan: ServerPlan, policy_version: int, corrupt: Mapping[str, int] | None = None) -> tuple[PieceDigests, ...]:
    """Made-up digests of a version, piece by piece; those of corrupt parameters are off by what the mapping says."""
    pairs = []
    for rank, worker_rank in plan.pairs():
        pieces = [piece for bucket in plan.buckets(rank, worker_rank) for piece in bucket.pieces]
        xxh3 = tuple(1000 * policy_version + index + (corrupt or {}).get(piece.parameter, 0) for index, piece in enumerate(pieces))
        pairs.append(PieceDigests(rank=rank, worker_rank=worker_rank, xxh3=xxh3))
    return tuple(pairs)


class ScriptedSink:
    """A rollout server that serves a version and follows the protocol's rules; `faults[stage]` happen one after the other.

    corrupt: parameters whose live weights are wrong until a push sends everything, but for the first `sticky` such pushes.
    lost_answers: commits that happen unanswered.
    """

    def __init__(self, layout: SinkLayout, served_version: int = 0, settings: PushSection = _SETTINGS) -> None:
        self.layout = layout
        self.served_version = served_version
        self.staged: StagedVersion | None = None
        self.faults: dict[str, list[Fault | None]] = {}
        self.lost_answers = 0
        self.pause_ms = 3.0
        self.num_aborted = 0
        self.corrupt: dict[str, int] = {}
        self.sticky = 0
        self.collective_group = ""
        self.calls: list[str] = []
        self.expires_s: list[float] = []
        self.commit_timeouts_s: list[float] = []
        self.inflight: list[InflightMode] = []
        self.staged_push: str | None = None
        self.verified_push: str | None = None
        self.encodings: list[Counter[BucketEncoding]] = []
        self.entered = {stage: asyncio.Event() for stage in ("prepare", "plan", "verify", "commit", "abort", "digest")}
        self._settings = settings
        self._plan: ServerPlan | None = None
        self._source_id = ""

    async def prepare(self, push_id: str, policy_version: int, expires_s: float, *, timeout_s: float) -> SinkPrepared:
        self.expires_s.append(expires_s)
        await self._enter("prepare", timeout_s)
        self.staged_push, self.verified_push = push_id, None
        return SinkPrepared(layout=self.layout, served_version=self.served_version, staged=self.staged)

    async def plan(self, push_id: str, policy_version: int, plan_hash: str, source: SourceLayout, *, timeout_s: float) -> SinkPlanned:
        await self._enter("plan", timeout_s)
        self._require(self.staged_push == push_id, f"push {push_id} is not prepared")
        own = plan_server(source, self.layout, bucket_bytes=self._settings.bucket_bytes, transport=self._settings.transport)
        self._require(own.plan_hash == plan_hash, f"planned {own.plan_hash[:12]}, not {plan_hash[:12]}")
        self._plan, self._source_id, self.staged = own, source.source_id, None
        return SinkPlanned(num_buckets=own.num_buckets, collective_group=self.collective_group)

    async def verify(
        self, push_id: str, policy_version: int, plan_hash: str, pairs: Sequence[PairDigests], *, timeout_s: float
    ) -> SinkVerified:
        await self._enter("verify", timeout_s)
        self._require(self._plan is not None and self.staged_push == push_id, f"push {push_id} is not planned")
        assert self._plan is not None
        self._require(self._plan.coverage_fault(pairs) is None, "not covered")
        self.encodings.append(Counter(encoding for pair in pairs for encoding in pair.encodings))
        self.verified_push, self.staged = push_id, StagedVersion(source_id=self._source_id, policy_version=policy_version)
        return SinkVerified(num_bytes=self._plan.num_bytes, verify_ms=1.0)

    async def commit(self, push_id: str, policy_version: int, inflight: InflightMode, *, timeout_s: float) -> SinkCommitted:
        self.commit_timeouts_s.append(timeout_s)
        self.inflight.append(inflight)
        await self._enter("commit", timeout_s)
        self._require(self.verified_push == push_id or self.served_version == policy_version, f"push {push_id} is not verified")
        if self.verified_push == push_id and set(self.encodings[-1]) == {BucketEncoding.DENSE}:
            self.corrupt = self.corrupt if self.sticky else {}
            self.sticky = max(0, self.sticky - 1)
        self.served_version = policy_version
        self.staged_push = self.verified_push = None
        if self.lost_answers:
            self.lost_answers -= 1
            await asyncio.Event().wait()
        return SinkCommitted(policy_version=policy_version, pause_ms=self.pause_ms, num_aborted=self.num_aborted)

    async def abort(self, push_id: str, *, timeout_s: float) -> int:
        await self._enter("abort", timeout_s)
        self.staged_push = self.verified_push = None
        return self.served_version

    async def digest(self, policy_version: int, plan_hash: str, *, timeout_s: float) -> tuple[PieceDigests, ...]:
        await self._enter("digest", timeout_s)
        self._require(self.served_version == policy_version, f"serves {self.served_version}, not {policy_version}")
        self._require(self._plan is not None and self._plan.plan_hash == plan_hash, "another plan")
        assert self._plan is not None
        return piece_digests(self._plan, policy_version, self.corrupt)

    async def _enter(self, stage: str, timeout_s: float) -> None:
        assert timeout_s > 0
        self.calls.append(stage)
        self.entered[stage].set()
        faults = self.faults.get(stage, [])
        await meet(faults.pop(0) if faults else None)

    @staticmethod
    def _require(condition: bool, message: str) -> None:
        if not condition:
            raise StateError(message)


class ScriptedSource:
    """An actor gang that holds a version; answers a digest for every bucket that it plans.

    unreachable: server to why it was not written to. forgotten: servers for which a digest is missing. other_plan: servers that it plans
    otherwise. unplanned: servers for which it makes no plan. silent: servers of which TRANSFER says nothing.
    """

    def __init__(self, layout: SourceLayout, policy_version: int, settings: PushSection = _SETTINGS) -> None:
        self.layout = layout
        self.policy_version = policy_version
        self.faults: dict[str, Fault] = {}
        self.unreachable: dict[str, str] = {}
        self.forgotten: set[str] = set()
        self.other_plan: set[str] = set()
        self.unplanned: set[str] = set()
        self.silent: set[str] = set()
        self.calls: list[str] = []
        self.targets: list[dict[str, SinkTarget]] = []
        self.groups: dict[str, str] = {}
        self.entered = {stage: asyncio.Event() for stage in ("describe", "prepare", "transfer", "abort", "digest")}
        self._settings = settings
        self._plans: dict[str, ServerPlan] = {}

    async def describe(self, *, timeout_s: float) -> tuple[SourceLayout, int]:
        await self._enter("describe", timeout_s)
        return self.layout, self.policy_version

    async def prepare(
        self, push_id: str, policy_version: int, sinks: Sequence[SinkTarget], *, timeout_s: float
    ) -> dict[str, PlannedServer]:
        await self._enter("prepare", timeout_s)
        self.targets.append({sink.layout.server_id: sink for sink in sinks})
        answer = {}
        for name, sink in self.targets[-1].items():
            plan = plan_server(self.layout, sink.layout, bucket_bytes=self._settings.bucket_bytes, transport=self._settings.transport)
            self._plans[name] = plan
            plan_hash = "0" * 64 if name in self.other_plan else plan.plan_hash
            if name not in self.unplanned:
                answer[name] = PlannedServer(plan_hash=plan_hash, num_bytes=plan.num_bytes)
        return answer

    async def transfer(self, push_id: str, collective_groups: Mapping[str, str], *, timeout_s: float) -> SourceTransferred:
        await self._enter("transfer", timeout_s)
        self.groups = dict(collective_groups)
        servers = {name: self._transfer_to(name, target) for name, target in self.targets[-1].items() if name not in self.silent}
        return SourceTransferred(servers=servers, transfer_ms=1.0)

    def _transfer_to(self, name: str, target: SinkTarget) -> ServerTransfer:
        if name in self.unreachable:
            return ServerTransfer(pairs=(), sent_bytes=0, dense_bytes=0, error=self.unreachable[name])
        base = StagedVersion(source_id=self.layout.source_id, policy_version=self.policy_version - 1)
        is_delta = target.staged == base and not target.dense
        encoding = BucketEncoding.DELTA if is_delta else BucketEncoding.DENSE
        plan = self._plans[name]
        pairs = [
            PairDigests(rank=rank, worker_rank=worker_rank, xxh3=(1,) * num, encodings=(encoding,) * num)
            for rank, worker_rank in plan.pairs()
            for num in [plan.num_buckets_of(rank, worker_rank)]
        ]
        if name in self.forgotten:
            pairs[-1] = replace(pairs[-1], xxh3=pairs[-1].xxh3[1:])
        sent_bytes = plan.num_bytes // DELTA_PART if is_delta else plan.num_bytes
        return ServerTransfer(pairs=tuple(pairs), sent_bytes=sent_bytes, dense_bytes=plan.num_bytes)

    async def abort(self, push_id: str, *, timeout_s: float) -> None:
        await self._enter("abort", timeout_s)

    async def digest(self, policy_version: int, plan_hashes: Mapping[str, str], *, timeout_s: float) -> dict[str, tuple[PieceDigests, ...]]:
        await self._enter("digest", timeout_s)
        if policy_version != self.policy_version:
            raise StateError(f"holds {self.policy_version}, not {policy_version}")
        assert {name: self._plans[name].plan_hash for name in plan_hashes} == dict(plan_hashes)
        return {name: piece_digests(self._plans[name], policy_version) for name in plan_hashes}

    async def _enter(self, stage: str, timeout_s: float) -> None:
        assert timeout_s > 0
        self.calls.append(stage)
        self.entered[stage].set()
        await meet(self.faults.get(stage))


def served_versions(sinks: Mapping[str, ScriptedSink]) -> dict[str, int]:
    """The version each server serves."""
    return {server_id: sink.served_version for server_id, sink in sinks.items()}


def make_source(policy_version: int = 4) -> ScriptedSource:
    """Two ranks with a one-layer decoder."""
    return ScriptedSource(fsdp_source(decoder_shapes(tied=False), 2), policy_version=policy_version)


def make_sinks(*names: str, served_version: int = 3) -> dict[str, ScriptedSink]:
    """Servers "a" and "b", or others, of two workers each."""
    return {name: ScriptedSink(decoder_sink(name, 2), served_version) for name in names or ("a", "b")}
