"""One rollout server's end of a push over a scripted engine, with the trainer's end beside it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import torch
from shoal_rollout.weight_sink import WeightSink

from shoal.config.models import PushSection
from shoal.types import InflightMode, SamplingParams, SinkCommitted, SinkPrepared
from shoal.types.weights import PairDigests
from tests.helpers.engine_fakes import SteppedEngine
from tests.helpers.engine_models import PlainModel
from tests.helpers.push_trainer import PushTrainer

_Transport = Literal["shm", "grpc", "collective"]
SHAPES = dict.fromkeys(("a", "b", "c"), (32, 32))
"""Each parameter fills one bucket of 4096 bytes."""
EXPIRES_S = 60.0


class SinkRig:
    """A sink with workers that all hold the whole model, and a trainer whose tensors are constants.

    Args:
        folder: Where staging files go.
    """

    def __init__(self, folder: Path, *, num_workers: int = 1, unreadable: Collection[str] = (), transport: _Transport = "shm") -> None:
        self.folder = folder
        self.push = PushSection(shm_dir=str(folder), bucket_bytes=4096, transport=transport)
        self.models = [PlainModel(SHAPES, unreadable=unreadable) for _ in range(num_workers)]
        self.engine = SteppedEngine(self.models)
        self.committed: list[int] = []
        self.failed: list[str] = []
        self.sink = WeightSink(
            self.engine,
            server_id="rollout-0",
            staging_name="run-rollout-0-p1",
            push=self.push,
            on_committed=self.committed.append,
            on_failed=self.failed.append,
        )
        self.trainer = PushTrainer({name: torch.zeros(shape) for name, shape in SHAPES.items()}, self.push)

    def set(self, **values: float) -> None:
        """Fill tensors of the trainer."""
        for name, value in values.items():
            self.trainer.tensors[name].fill_(value)

    async def to_prepared(self, push_id: str = "a", version: int = 1, *, expires_s: float = EXPIRES_S) -> SinkPrepared:
        """PREPARE, first half."""
        return await self.sink.prepare(push_id, version, expires_s)

    async def to_planned(self, push_id: str = "a", version: int = 1, *, expires_s: float = EXPIRES_S) -> str:
        """PREPARE; answers the plan's hash."""
        prepared = await self.to_prepared(push_id, version, expires_s=expires_s)
        plan_hash = self.trainer.plan(prepared.layout).plan_hash
        await self.sink.plan(push_id, version, plan_hash, self.trainer.layout)
        return plan_hash

    async def write(self, push_id: str = "a", version: int = 1, *, unchanged: Collection[str] = ()) -> tuple[PairDigests, ...]:
        """TRANSFER."""
        prepared = await self.to_prepared(push_id, version)
        return self.trainer.write(prepared.layout, push_id=push_id, version=version, unchanged=unchanged)

    async def to_verified(
        self, push_id: str = "a", version: int = 1, *, unchanged: Collection[str] = (), expires_s: float = EXPIRES_S
    ) -> str:
        """Everything up to VERIFY; answers the plan's hash."""
        plan_hash = await self.to_planned(push_id, version, expires_s=expires_s)
        pairs = await self.write(push_id, version, unchanged=unchanged)
        await self.sink.verify(push_id, version, plan_hash, pairs)
        return plan_hash

    async def commit(self, push_id: str = "a", version: int = 1, inflight: InflightMode = InflightMode.KEEP) -> SinkCommitted:
        """COMMIT."""
        return await self.sink.commit(push_id, version, inflight, 30.0)

    async def push_all(
        self, push_id: str = "a", version: int = 1, *, unchanged: Collection[str] = (), inflight: InflightMode = InflightMode.KEEP
    ) -> str:
        """A whole push; answers the plan's hash."""
        plan_hash = await self.to_verified(push_id, version, unchanged=unchanged)
        await self.commit(push_id, version, inflight)
        return plan_hash

    def live(self, worker: int = 0) -> Mapping[str, float]:
        """The constants that a worker computes with; fails if a parameter is none."""
        values = {}
        for name, weight in self.models[worker].weights.items():
            (value,) = set(weight.flatten().tolist())
            values[name] = value
        return values

    async def close(self) -> None:
        """Remove staging."""
        self.trainer.close()
        await self.sink.close()

    @staticmethod
    def sampling(num_tokens: int) -> SamplingParams:
        """A request of so many tokens."""
        return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)


@asynccontextmanager
async def open_rig(folder: Path, *, num_workers: int = 1, unreadable: Collection[str] = ()) -> AsyncIterator[SinkRig]:
    """A rig that must leave its folder empty, whatever the test did to its engine."""
    rig = SinkRig(folder, num_workers=num_workers, unreadable=unreadable)
    yield rig
    rig.engine.failures, rig.engine.gates = {}, {}
    await rig.close()
    assert os.listdir(folder) == [], "staging was left behind"
