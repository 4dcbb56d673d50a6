"""Scripted ends of a weight push: they keep what a real one would and fail, stall or lie where a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from shoal.errors import ShoalError, StateError
from shoal.types.weights import CopyDigest, SinkCommitted, SinkLayout, SinkVerified, SourcePrepared, SourceShard, SourceTransferred
from shoal.weights.planner import PushPlan, plan_copies

Fault = ShoalError | asyncio.Event | Exception
"""Raised, or waited for (a stage that hangs)."""


async def meet(fault: Fault | None) -> None:
    """Suffer a scripted fault."""
    if isinstance(fault, asyncio.Event):
        await fault.wait()
    elif fault is not None:
        raise fault


class ScriptedSink:
    """A rollout server that serves a version and follows the protocol's rules; `faults[stage]` happen one after the other."""

    def __init__(self, layout: SinkLayout, served_version: int = 0) -> None:
        self.layout = layout
        self.served_version = served_version
        self.faults: dict[str, list[Fault | None]] = {}
        self.lost_answers = 0
        self.pause_ms = 3.0
        self.calls: list[str] = []
        self.commit_timeouts_s: list[float] = []
        self.staged_push: str | None = None
        self.verified_push: str | None = None
        self.entered = {stage: asyncio.Event() for stage in ("prepare", "verify", "commit", "abort")}

    async def prepare(self, push_id: str, policy_version: int, *, timeout_s: float) -> tuple[SinkLayout, int]:
        await self._enter("prepare", timeout_s)
        self.staged_push, self.verified_push = push_id, None
        return self.layout, self.served_version

    async def verify(
        self, push_id: str, policy_version: int, plan_hash: str, digests: Sequence[CopyDigest], *, timeout_s: float
    ) -> SinkVerified:
        await self._enter("verify", timeout_s)
        if self.staged_push != push_id:
            raise StateError(f"push {push_id} is not staged")
        self.verified_push = push_id
        return SinkVerified(num_bytes=len(digests), verify_ms=1.0)

    async def commit(self, push_id: str, policy_version: int, *, timeout_s: float) -> SinkCommitted:
        self.commit_timeouts_s.append(timeout_s)
        await self._enter("commit", timeout_s)
        if self.verified_push != push_id and self.served_version != policy_version:
            raise StateError(f"push {push_id} is not verified")
        self.served_version = policy_version
        self.staged_push = self.verified_push = None
        if self.lost_answers:
            self.lost_answers -= 1
            await asyncio.Event().wait()
        return SinkCommitted(policy_version=policy_version, pause_ms=self.pause_ms)

    async def abort(self, push_id: str, *, timeout_s: float) -> int:
        await self._enter("abort", timeout_s)
        self.staged_push = self.verified_push = None
        return self.served_version

    async def _enter(self, stage: str, timeout_s: float) -> None:
        assert timeout_s > 0
        self.calls.append(stage)
        self.entered[stage].set()
        faults = self.faults.get(stage, [])
        await meet(faults.pop(0) if faults else None)


class ScriptedSource:
    """An actor gang that holds a version; answers a digest for every copy that it plans, except into `unreachable` servers."""

    def __init__(self, shards: Sequence[SourceShard], policy_version: int) -> None:
        self.shards = list(shards)
        self.policy_version = policy_version
        self.faults: dict[str, Fault] = {}
        self.unreachable: set[str] = set()
        self.forgotten: set[str] = set()
        self.other_plan = False
        self.calls: list[str] = []
        self.entered = {stage: asyncio.Event() for stage in ("describe", "prepare", "transfer", "abort")}
        self._plans: dict[str, PushPlan] = {}

    async def describe(self, *, timeout_s: float) -> tuple[list[SourceShard], int]:
        await self._enter("describe", timeout_s)
        return self.shards, self.policy_version

    async def prepare(self, push_id: str, policy_version: int, sinks: Sequence[SinkLayout], *, timeout_s: float) -> SourcePrepared:
        await self._enter("prepare", timeout_s)
        plan = self._plans[push_id] = plan_copies(self.shards, sinks)
        plan_hash = "0" * 64 if self.other_plan else plan.plan_hash
        return SourcePrepared(plan_hash=plan_hash, num_copies=len(plan.copies), num_bytes=plan.num_bytes)

    async def transfer(self, push_id: str, *, timeout_s: float) -> SourceTransferred:
        await self._enter("transfer", timeout_s)
        digests: dict[str, list[CopyDigest]] = {}
        for copy in self._plans[push_id].copies:
            if copy.server_id not in self.unreachable:
                digests.setdefault(copy.server_id, []).append(
                    CopyDigest(worker_rank=copy.worker_rank, parameter=copy.parameter, parameter_box=copy.parameter_box, xxh3=1)
                )
        for server_id in self.forgotten:
            digests[server_id].pop()
        return SourceTransferred(digests=digests, num_bytes=self._plans[push_id].num_bytes, transfer_ms=1.0)

    async def abort(self, push_id: str, *, timeout_s: float) -> None:
        await self._enter("abort", timeout_s)
        self._plans.pop(push_id, None)

    async def _enter(self, stage: str, timeout_s: float) -> None:
        assert timeout_s > 0
        self.calls.append(stage)
        self.entered[stage].set()
        await meet(self.faults.get(stage))


def served_versions(sinks: Mapping[str, ScriptedSink]) -> dict[str, int]:
    """The version each server serves."""
    return {server_id: sink.served_version for server_id, sink in sinks.items()}
