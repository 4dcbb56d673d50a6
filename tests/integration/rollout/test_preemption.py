"""Waiting for running requests on an engine whose cache is too small for them: it takes blocks from some and lets others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shoal.clients.rollout import RolloutClient
from shoal.clients.weights import WeightSinkClient
from shoal.config.models import PushSection
from shoal.types import Completion, InflightMode, SamplingParams
from tests.helpers.push_trainer import PushTrainer
from tests.helpers.rollout_process import SECURITY, start_rollout, until_running
from tests.helpers.tiny_models import perturbed_tensors, save_tiny_model

NUM_REQUESTS = 12
CACHE_BYTES = 15 * 128 * 1024
"""A block of 128 tokens takes 128 KiB; every request needs two blocks in the end, and one at first. The engine keeps one for itself."""


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_requests_that_lost_their_cache_end_on_the_old_version_too(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen2", tied=True)
    server = await start_rollout(tmp_path / "server", model, overrides=[f"rollout.kv_cache_bytes={CACHE_BYTES}"])
    try:
        trainer = PushTrainer(perturbed_tensors(model, seed=1), PushSection(shm_dir=str(server.shm_dir)))
        async with RolloutClient(server.address, SECURITY) as client, WeightSinkClient(server.address, SECURITY) as sink:
            prepared = await sink.prepare("one", 1, 120.0, timeout_s=10)
            plan_hash = trainer.plan(prepared.layout).plan_hash
            await sink.plan("one", 1, plan_hash, trainer.layout, timeout_s=10)
            pairs = await asyncio.to_thread(trainer.write, prepared.layout, push_id="one")
            await sink.verify("one", 1, plan_hash, pairs, timeout_s=20)
            running = [asyncio.create_task(_generate(client, index)) for index in range(NUM_REQUESTS)]
            await until_running(client, NUM_REQUESTS)
            # Requests begin in order, so all have begun by then. The cache gets too small when they reach their 129th token.
            await _generate(client, NUM_REQUESTS, num_tokens=1)
            await sink.commit("one", 1, InflightMode.WAIT, timeout_s=60)
            versions = [[span.policy_version for span in (await task).policy_version_spans] for task in running]
            assert versions == [[0]] * NUM_REQUESTS
        trainer.close()
    finally:
        server.kill()


async def _generate(client: RolloutClient, index: int, *, num_tokens: int = 160) -> Completion:
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    (completion,) = [completion async for completion in client.generate(f"r{index}", [5, 6, 7], sampling, 1, (index,), timeout_s=60)]
    return completion
