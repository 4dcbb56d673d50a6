"""Two engine workers: fused and padded parameters are sharded as the engine shards them, and a push reaches both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from shoal.clients.rollout import RolloutClient
from shoal.clients.weights import WeightSinkClient
from shoal.config.models import PushSection
from shoal.types import Completion, InflightMode, SamplingParams
from tests.helpers.padded_models import make_padding_loud
from tests.helpers.rollout_process import SECURITY, RolloutProcess, start_rollout
from tests.helpers.tiny_models import Architecture, perturbed_tensors, reference_logprobs, save_tiny_model, save_variant
from tests.helpers.weight_source import FakeSource

PROMPT = [5, 6, 7, 90, 100]
NUM_KNOWN = 60
"""The padding is in the shards of both workers, which hold 64 rows each."""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), ("llama", False)])
async def test_push_into_two_workers_serves_exactly_the_new_weights(tmp_path: Path, architecture: Architecture, tied: bool) -> None:
    folder = save_tiny_model(tmp_path / "model", architecture, tied=tied)
    make_padding_loud(folder, NUM_KNOWN)
    server = await start_rollout(tmp_path / "server", folder, overrides=["rollout.tensor_parallel_size=2"])
    try:
        await _check(server, folder)
        tensors = perturbed_tensors(folder, seed=1)
        source = FakeSource(tensors, PushSection(shm_dir=str(server.shm_dir)))
        async with WeightSinkClient(server.address, SECURITY) as sink:
            prepared = await sink.prepare("push-1", 1, 120.0, timeout_s=20)
            assert [worker.worker_rank for worker in prepared.layout.workers] == [0, 1]
            plan_hash = source.prepare("push-1", 1, prepared.layout)
            await sink.plan("push-1", 1, plan_hash, source.layout, timeout_s=20)
            pairs = await asyncio.to_thread(source.transfer, "push-1")
            await sink.verify("push-1", 1, plan_hash, pairs, timeout_s=30)
            await sink.commit("push-1", 1, InflightMode.KEEP, timeout_s=30)
            assert await sink.digest(1, plan_hash, timeout_s=30) == source.digest(prepared.layout.server_id, plan_hash)
        source.close()
        await _check(server, save_variant(folder, tmp_path / "v1", tensors))
        assert not _named_shared_memory(server), "killed processes would leave these behind"
        server.process.terminate()
        assert server.process.wait(20) == 0
        assert not list(server.shm_dir.iterdir())
    finally:
        server.kill()


def _named_shared_memory(server: RolloutProcess) -> set[str]:
    """What the engine's processes have mapped under a name in /dev/shm."""
    lines = [line for process in server.engine_processes() for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    paths = {line[line.find("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
    return {path for path in paths if not path.endswith("(deleted)")}


async def _check(server: RolloutProcess, folder: Path) -> None:
    async with RolloutClient(server.address, SECURITY) as client:
        sampling = SamplingParams(max_new_tokens=16, ignore_eos=True)
        completions: list[Completion] = [c async for c in client.generate("r", PROMPT, sampling, 4, (1, 2, 3, 4), timeout_s=60)]
    for completion in completions:
        assert completion.response_ids.max() < NUM_KNOWN
        expected = reference_logprobs(folder, PROMPT, completion.response_ids.tolist())
        np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-4)
