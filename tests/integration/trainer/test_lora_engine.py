"""A real engine after pushes of a policy with adapters answers with the policy's own log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from shoal_rollout.weight_sink import WeightSink
from shoal_trainer.actor import Actor
from shoal_trainer.building import build_actor
from shoal_trainer.distributed import RankContext
from shoal_trainer.merging import ServedWeights
from shoal_trainer.models import named_shards
from shoal_trainer.weight_source import WeightSource
from torch.distributed.device_mesh import init_device_mesh

from shoal.config.models import RunConfig, SecuritySection
from shoal.types import InflightMode, TokenSequence
from shoal.types.weights import ServerTransfer, SinkTarget
from shoal.weights.transports.factory import open_source_transport
from tests.helpers.adapters import lora_config
from tests.helpers.engine_rig import PROMPT
from tests.helpers.inprocess_engine import ENGINE_ENVIRONMENT, InProcessEngine
from tests.helpers.tiny_models import Architecture, save_tiny_model
from tests.helpers.trainer_bench import MemoryRecords, even_split, make_batch, ppo_step, ragged_records
from tests.helpers.weight_source import here, identity

NUM_SAMPLES, NUM_TOKENS = 8, 8
SERVER = "rollout-0"


class _Rig:
    """An engine, and an actor in the same process that uses the engine's process group."""

    def __init__(self, folder: Path, staging: Path) -> None:
        self.engine = InProcessEngine(folder)
        torch.set_num_threads(1)
        self.config = _config(folder, staging)
        self.sink = WeightSink(
            self.engine,
            server_id=SERVER,
            staging_name="test-lora-p1",
            push=self.config.push,
            on_committed=lambda version: None,
            on_failed=lambda reason: None,
        )
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        context = RankContext(rank=0, world_size=1, device=torch.device("cpu"), mesh=mesh)
        self.actor: Actor = build_actor(self.config, context, MemoryRecords(ragged_records()))
        self.served = ServedWeights(
            named_shards(self.actor.module), self.config.actor.lora, context.device, lambda: self.actor.policy_version
        )
        self.source = WeightSource(
            self.served.parameters,
            identity(place=here(self.config.push)),
            open_source_transport(self.config.push, SecuritySection()),
            self.config.push,
            policy_version=lambda: self.actor.policy_version,
        )

    def update(self) -> None:
        """One real step."""
        step = self.actor.policy_version + 1
        ppo_step(self.actor, None, make_batch(ragged_records(), even_split(6, 1, 2), step))
        assert self.actor.policy_version == step
        self.served.gather()

    async def push(self) -> tuple[str, ServerTransfer]:
        """Every stage; the plan's hash and what was sent."""
        version, layout = self.actor.policy_version, self.source.describe()
        push_id = f"push-{version}"
        prepared = await self.sink.prepare(push_id, version, 60.0)
        target = SinkTarget(layout=prepared.layout, staged=prepared.staged, dense=prepared.staged is None)
        plan_hash = self.source.prepare(push_id, version, layout, [target])[SERVER].plan_hash
        await self.sink.plan(push_id, version, plan_hash, layout)
        sent = self.source.transfer(push_id, {}).servers[SERVER]
        assert sent.error == ""
        await self.sink.verify(push_id, version, plan_hash, sent.pairs)
        await self.sink.commit(push_id, version, InflightMode.KEEP, 10.0)
        return plan_hash, sent

    def largest_difference(self) -> float:
        """Between the engine's and the actor's log-probabilities of what the engine samples."""
        sampled = [self.engine.sample(PROMPT, seed=seed, num_tokens=NUM_TOKENS) for seed in range(NUM_SAMPLES)]
        scores = self.actor.score_tokens([TokenSequence(prompt_ids=tuple(PROMPT), response_ids=tuple(ids)) for ids, _, _ in sampled])
        pairs = zip(sampled, scores, strict=True)
        return max(float(np.abs(logprobs - np.array(score.logprobs)).max()) for (_, logprobs, _), score in pairs)

    async def close(self) -> None:
        """Let go of staging and the engine."""
        self.source.close()
        await self.sink.close()
        self.engine.close()


def _config(folder: Path, staging: Path) -> RunConfig:
    push = {"shm_dir": str(staging), "bucket_bytes": 65536}
    lora: dict[str, Any] = {"rank": 4, "alpha": 16.0}
    return lora_config(folder, lora, push=push, actor={"lr": 1e-2}, algorithm={"estimator": "grpo"})


@pytest_asyncio.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[Path], _Rig]]:
    for name, value in ENGINE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    rigs: list[_Rig] = []

    def make(folder: Path) -> _Rig:
        rigs.append(_Rig(folder, tmp_path))
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.close()


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), pytest.param("mixtral", False, marks=pytest.mark.slow)])
async def test_engine_answers_with_the_log_probabilities_of_the_adapted_policy(
    tmp_path: Path, start: Callable[[Path], _Rig], architecture: Architecture, tied: bool
) -> None:
    folder = save_tiny_model(tmp_path / "model", architecture, tied=tied)
    rig = start(folder)
    await rig.sink.discover(str(folder))
    assert rig.largest_difference() < 1e-4
    sent_bytes = []
    for _ in range(3):
        rig.update()
        assert rig.largest_difference() > 1e-3, "the new weights must differ, else this test shows nothing"
        plan_hash, sent = await rig.push()
        sent_bytes.append(sent.sent_bytes)
        assert rig.largest_difference() < 1e-4
        assert (
            await rig.sink.digest(rig.actor.policy_version, plan_hash)
            == rig.source.digest(rig.actor.policy_version, {SERVER: plan_hash})[SERVER]
        )
    # Embeddings, norms and biases went once.
    assert sent_bytes[0] == sent.dense_bytes
    assert sent_bytes[1] < sent_bytes[0]
    assert sent_bytes[2] == sent_bytes[1]
