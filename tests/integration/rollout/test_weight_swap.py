"""Weights pushed into a real engine: log-probabilities after the commit are those of a Hugging Face forward of the new weights."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from shoal_rollout.sink_states import SinkState
from shoal_rollout.weight_sink import WeightSink

from shoal.config.models import PushSection
from shoal.errors import CapacityError, StateError
from shoal.types import SinkLayout
from tests.helpers.inprocess_engine import ENGINE_ENVIRONMENT, InProcessEngine
from tests.helpers.tiny_models import Architecture, model_tensors, perturbed_tensors, reference_logprobs, save_tiny_model, save_variant
from tests.helpers.weight_source import FakeSource

PROMPT = [5, 6, 7, 90, 100]


class _Rig:
    """One engine, its sink, and the folder it was loaded from."""

    def __init__(self, folder: Path, staging: Path, *, dtype: str = "float32") -> None:
        self.folder = folder
        self.staging = staging
        self.engine = InProcessEngine(folder, dtype=dtype)
        self.failures: list[str] = []
        self.sink = WeightSink(
            self.engine,
            server_id="rollout-0",
            staging_name="test-rollout-0-p1",
            push=PushSection(shm_dir=str(staging)),
            on_committed=lambda version: None,
            on_failed=self.failures.append,
        )

    async def push(self, source: FakeSource, version: int) -> None:
        push_id = f"push-{version}"
        layout, _ = await self.sink.prepare(push_id, version)
        plan_hash, digests = source.write(layout)
        await self.sink.verify(push_id, version, plan_hash, digests)
        await self.sink.commit(push_id, version)

    def scribble(self) -> None:
        """Overwrite staging, as the next push does while this version is served."""
        for path in self.sink.staging_paths:
            data = Path(path)
            with data.open("r+b") as file:
                file.write(b"\x7f" * data.stat().st_size)


@pytest.fixture(autouse=True)
def _engine_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENGINE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest_asyncio.fixture
async def start(tmp_path: Path, _engine_environment: None) -> AsyncIterator[Callable[..., _Rig]]:
    rigs: list[_Rig] = []

    def make(folder: Path, *, dtype: str = "float32") -> _Rig:
        staging = tmp_path / "staging"
        staging.mkdir(exist_ok=True)
        rigs.append(_Rig(folder, staging, dtype=dtype))
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.sink.close()
        rig.engine.close()


def _largest_difference(rig: _Rig, folder: Path, *, seed: int = 1) -> float:
    ids, logprobs, _ = rig.engine.sample(PROMPT, seed=seed)
    return float(np.abs(logprobs - reference_logprobs(folder, PROMPT, ids)).max())


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), ("llama", False)])
async def test_commit_serves_exactly_the_new_weights(
    tmp_path: Path, start: Callable[..., _Rig], architecture: Architecture, tied: bool
) -> None:
    folder = save_tiny_model(tmp_path / "model", architecture, tied=tied)
    rig = start(folder)
    await rig.sink.discover(str(folder))
    assert _largest_difference(rig, folder) < 1e-4
    for version in (1, 2):
        tensors = perturbed_tensors(folder, seed=version)
        target = save_variant(folder, tmp_path / f"v{version}", tensors)
        assert _largest_difference(rig, target) > 1e-2, "the new weights must differ, else this test shows nothing"
        await rig.push(FakeSource(tensors), version)
        rig.scribble()
        assert _largest_difference(rig, target) < 1e-4
        assert rig.engine.sample(PROMPT)[2] == [str(version)]


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", False), ("llama", True)])
async def test_commit_in_bfloat16_equals_an_engine_started_with_the_new_weights(
    tmp_path: Path, start: Callable[..., _Rig], architecture: Architecture, tied: bool
) -> None:
    folder = save_tiny_model(tmp_path / "model", architecture, tied=tied)
    tensors = perturbed_tensors(folder, seed=1)
    fresh = InProcessEngine(save_variant(folder, tmp_path / "v1", tensors), dtype="bfloat16")
    expected = fresh.sample(PROMPT, seed=3)
    fresh.close()
    rig = start(folder, dtype="bfloat16")
    await rig.sink.discover(str(folder))
    await rig.push(FakeSource(tensors), 1)
    rig.scribble()
    ids, logprobs, _ = rig.engine.sample(PROMPT, seed=3)
    assert ids == expected[0]
    np.testing.assert_array_equal(logprobs, expected[1])


async def test_faulty_pushes_leave_the_old_weights_and_the_next_push_works(tmp_path: Path, start: Callable[..., _Rig]) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2", tied=True)
    tensors = perturbed_tensors(folder, seed=1)
    rig = start(folder)
    await rig.sink.discover(str(folder))
    source = FakeSource(tensors)
    layout, _ = await rig.sink.prepare("push-1", 1)
    plan_hash, digests = source.write(layout)

    missing = digests[:3] + digests[4:]
    with pytest.raises(StateError, match=f"{digests[3].parameter}.*not written exactly once"):
        await rig.sink.verify("push-1", 1, plan_hash, missing)
    with pytest.raises(StateError, match="overlap"):
        await rig.sink.verify("push-1", 1, plan_hash, [*digests, digests[0]])
    with pytest.raises(StateError, match=r"model\.nothing was written, but no region of worker 0 holds it"):
        await rig.sink.verify("push-1", 1, plan_hash, [*digests, replace(digests[0], parameter="model.nothing")])
    with pytest.raises(StateError, match=r"workers \[0\]"):
        await rig.sink.verify("push-1", 1, plan_hash, [*digests, replace(digests[0], worker_rank=1)])

    _flip_a_bit(layout, digests[5].parameter)
    with pytest.raises(StateError, match=f"staged bytes of {digests[5].parameter}"):
        await rig.sink.verify("push-1", 1, plan_hash, digests)
    with pytest.raises(StateError, match="is prepared"):
        await rig.sink.commit("push-1", 1)
    assert rig.sink.state is SinkState.PREPARED
    assert await rig.sink.abort("push-1") == 0
    with pytest.raises(StateError, match="prepare first"):
        await rig.sink.commit("push-1", 1)
    assert rig.sink.served_version == 0
    assert _largest_difference(rig, folder) < 1e-4

    await rig.push(source, 2)
    assert _largest_difference(rig, save_variant(folder, tmp_path / "v2", tensors)) < 1e-4
    assert not rig.failures


async def test_two_hundred_pushes_reuse_one_staging_file(tmp_path: Path, start: Callable[..., _Rig]) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2", tied=True)
    rig = start(folder)
    await rig.sink.discover(str(folder))
    source = FakeSource(model_tensors(folder))
    await rig.push(source, 1)
    files = {path.name: path.stat().st_ino for path in rig.staging.iterdir()}
    for version in range(2, 50):
        await rig.push(source, version)
    before_bytes = _resident_bytes()
    for version in range(50, 201):
        await rig.push(source, version)
    assert {path.name: path.stat().st_ino for path in rig.staging.iterdir()} == files
    # A leak of one model (1.2 MB) a push would be 180 MB.
    assert _resident_bytes() - before_bytes < 40 << 20
    await rig.sink.close()
    assert not list(rig.staging.iterdir())


async def test_too_little_space_is_told_with_numbers_and_what_to_do(
    tmp_path: Path, start: Callable[..., _Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama", tied=True)
    rig = start(folder)
    await rig.sink.discover(str(folder))
    real = os.statvfs(rig.staging)
    full = os.statvfs_result((*real[:4], 1, *real[5:10]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: full)
        with pytest.raises(CapacityError, match=rf"needs \d+ bytes in {rig.staging}, which has {real.f_frsize} free; .*push\.shm_dir"):
            await rig.sink.prepare("push-1", 1)
    assert rig.sink.state is SinkState.IDLE
    assert not list(rig.staging.iterdir())
    await rig.push(FakeSource(model_tensors(folder)), 2)


def _flip_a_bit(layout: SinkLayout, name: str) -> None:
    (worker,) = layout.workers
    start = next(parameter.staging_offset_bytes for parameter in worker.parameters if parameter.name == name)
    with Path(worker.staging_path).open("r+b") as file:
        file.seek(start)
        byte = file.read(1)
        file.seek(start)
        file.write(bytes([byte[0] ^ 1]))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
