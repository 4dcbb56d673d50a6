"""A real engine of two workers that gets its weights over the wire: streams into its staging files, and groups formed by its workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from shoal.clients.rollout import RolloutClient
from shoal.clients.weights import WeightSinkClient
from shoal.config.models import PushSection
from shoal.types import InflightMode, SamplingParams
from tests.helpers.push_trainer import PushTrainer
from tests.helpers.rollout_process import SECURITY, start_rollout
from tests.helpers.tiny_models import perturbed_tensors, reference_logprobs, save_tiny_model, save_variant

PROMPT = [5, 6, 7, 90, 100]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["grpc", "collective"])
async def test_two_workers_are_pushed_to_twice_over_the_wire(tmp_path: Path, transport: Literal["grpc", "collective"]) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    overrides = [f"push.transport={transport}", "rollout.tensor_parallel_size=2", "push.bucket_bytes=65536"]
    server = await start_rollout(tmp_path / "server", model, overrides=overrides)
    push = PushSection(shm_dir=str(server.shm_dir), transport=transport, bucket_bytes=65536)
    trainer = PushTrainer(perturbed_tensors(model, seed=1), push)
    try:
        async with RolloutClient(server.address, SECURITY) as client, WeightSinkClient(server.address, SECURITY) as sink:
            for version in (1, 2):
                tensors = perturbed_tensors(model, seed=version)
                for name, tensor in tensors.items():
                    trainer.tensors[name].copy_(torch.from_numpy(tensor))
                await _push(sink, trainer, version)
                target = save_variant(model, tmp_path / f"v{version}", tensors)
                stream = client.generate(f"r{version}", PROMPT, SamplingParams(max_new_tokens=16, ignore_eos=True), 1, (1,), timeout_s=60)
                (completion,) = [completion async for completion in stream]
                assert [span.policy_version for span in completion.policy_version_spans] == [version]
                expected = reference_logprobs(target, PROMPT, completion.response_ids.tolist())
                np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)
    finally:
        await asyncio.to_thread(trainer.close)
        server.kill()


async def _push(sink: WeightSinkClient, trainer: PushTrainer, version: int) -> None:
    name = f"push-{version}"
    prepared = await sink.prepare(name, version, 120.0, timeout_s=10)
    plan_hash = trainer.plan(prepared.layout).plan_hash
    planned = await sink.plan(name, version, plan_hash, trainer.layout, timeout_s=10)
    pairs = await asyncio.to_thread(trainer.write, prepared.layout, push_id=name, version=version, group=planned.collective_group)
    assert {pair.worker_rank for pair in pairs} == {0, 1}
    await sink.verify(name, version, plan_hash, pairs, timeout_s=20)
    await sink.commit(name, version, InflightMode.KEEP, timeout_s=20)
    assert await sink.digest(version, plan_hash, timeout_s=20) == trainer.digests(prepared.layout)
