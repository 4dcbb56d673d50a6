"""Whole pushes into a real engine: log-probabilities after the commit are those of a Hugging Face forward of the new weights."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio
from shoal_rollout.sink_states import SinkState
from shoal_rollout.weight_sink import WeightSink

from shoal.config.models import PushSection
from shoal.errors import CapacityError, ShoalError, StateError
from shoal.types import InflightMode, SinkLayout
from tests.helpers.engine_rig import PROMPT
from tests.helpers.inprocess_engine import InProcessEngine
from tests.helpers.staged_copies import trained_tensors
from tests.helpers.tiny_models import Architecture, perturbed_tensors, reference_logprobs, save_tiny_model, save_variant
from tests.helpers.weight_source import FakeSource

if TYPE_CHECKING:
    from shoal_rollout.engine_worker import EngineWorker

BUCKET_BYTES = 65536


class _Rig:
    """One engine, its sink, and a trainer with the same tensors that pushes into it."""

    def __init__(self, folder: Path, staging: Path, *, dtype: str = "float32") -> None:
        self.folder = folder
        self.staging = staging
        self.engine = InProcessEngine(folder, dtype=dtype)
        self.failures: list[str] = []
        self.settings = PushSection(shm_dir=str(staging), bucket_bytes=BUCKET_BYTES)
        self.sink = WeightSink(
            self.engine,
            server_id="rollout-0",
            staging_name="test-rollout-0-p1",
            push=self.settings,
            on_committed=lambda version: None,
            on_failed=self.failures.append,
        )
        self.source = FakeSource({name: tensor.numpy() for name, tensor in trained_tensors(folder).items()}, self.settings)

    def train(self, folder: Path) -> None:
        """Give the trainer the values of a folder."""
        for name, tensor in trained_tensors(folder).items():
            self.source.tensors[name].copy_(tensor)

    async def push(self, version: int) -> str:
        """Every stage; returns the plan's hash."""
        plan_hash = await self.transfer(version)
        await self.sink.commit(f"push-{version}", version, InflightMode.KEEP, 10.0)
        return plan_hash

    async def transfer(self, version: int, *, damage: Callable[[SinkLayout], None] = lambda layout: None) -> str:
        """Every stage before the commit."""
        push_id = f"push-{version}"
        prepared = await self.sink.prepare(push_id, version, 60.0)
        plan_hash = self.source.prepare(push_id, version, prepared.layout, prepared.staged)
        await self.sink.plan(push_id, version, plan_hash, self.source.layout)
        pairs = self.source.transfer(push_id)
        damage(prepared.layout)
        await self.sink.verify(push_id, version, plan_hash, pairs)
        return plan_hash

    def scribble(self) -> None:
        """Overwrite staging, as the next push does while this version is served."""
        for path in self.staging.iterdir():
            with path.open("r+b") as file:
                file.write(b"\x7f" * path.stat().st_size)

    def largest_difference(self, folder: Path, *, seed: int = 1) -> float:
        """Between the engine's log-probabilities and those of a folder's weights."""
        ids, logprobs, _ = self.engine.sample(PROMPT, seed=seed)
        return float(np.abs(logprobs - reference_logprobs(folder, PROMPT, ids)).max())


@pytest_asyncio.fixture
async def start(tmp_path: Path, engine_environment: None) -> AsyncIterator[Callable[..., _Rig]]:
    rigs: list[_Rig] = []

    def make(folder: Path, *, dtype: str = "float32") -> _Rig:
        staging = tmp_path / "staging"
        staging.mkdir(exist_ok=True)
        rigs.append(_Rig(folder, staging, dtype=dtype))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.source.close()
        await rig.sink.close()
        rig.engine.close()


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), ("mixtral", False), ("gpt2", True)])
async def test_commits_serve_exactly_the_new_weights(
    tmp_path: Path, start: Callable[..., _Rig], architecture: Architecture, tied: bool
) -> None:
    folder = save_tiny_model(tmp_path / "model", architecture, tied=tied)
    rig = start(folder)
    await rig.sink.discover(str(folder))
    assert rig.largest_difference(folder) < 1e-4
    for version in (1, 2, 3):
        # The last one differs from the second in one tensor, and is sent as a difference.
        tensors = perturbed_tensors(folder, seed=min(version, 2))
        if version == 3:
            name = next(name for name in tensors if name.endswith(("down_proj.weight", "experts.1.w2.weight", "h.1.mlp.c_proj.weight")))
            tensors[name][:, :16] += 0.25
        target = save_variant(folder, tmp_path / f"v{version}", tensors)
        assert rig.largest_difference(target) > 1e-3, "the new weights must differ, else this test shows nothing"
        rig.train(target)
        plan_hash = await rig.push(version)
        assert await rig.sink.digest(version, plan_hash) == rig.source.digest("rollout-0", plan_hash)
        assert rig.largest_difference(target) < 1e-4
        assert rig.engine.sample(PROMPT)[2] == [str(version)]
    rig.scribble()
    assert rig.largest_difference(target) < 1e-4
    assert not rig.failures


@pytest.mark.parametrize(("architecture", "tied"), [pytest.param("llama", True, marks=pytest.mark.slow), ("qwen2", False)])
async def test_commit_in_bfloat16_equals_an_engine_started_with_the_new_weights(
    tmp_path: Path, start: Callable[..., _Rig], architecture: Architecture, tied: bool
) -> None:
    folder = save_tiny_model(tmp_path / "model", architecture, tied=tied)
    tensors = perturbed_tensors(folder, seed=1)
    target = save_variant(folder, tmp_path / "v1", tensors)
    fresh = InProcessEngine(target, dtype="bfloat16", extension="")
    expected = fresh.sample(PROMPT, seed=3)
    fresh.close()
    rig = start(folder, dtype="bfloat16")
    await rig.sink.discover(str(folder))
    rig.train(target)
    await rig.push(1)
    rig.scribble()
    ids, logprobs, _ = rig.engine.sample(PROMPT, seed=3)
    assert ids == expected[0]
    np.testing.assert_array_equal(logprobs, expected[1])


async def test_damaged_push_leaves_the_old_weights_and_the_next_push_works(tmp_path: Path, start: Callable[..., _Rig]) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2", tied=True)
    target = save_variant(folder, tmp_path / "v2", perturbed_tensors(folder, seed=1))
    rig = start(folder)
    await rig.sink.discover(str(folder))
    rig.train(target)
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(StateError, match=name):
        await rig.transfer(1, damage=lambda layout: _flip_a_bit(layout, name))
    with pytest.raises(StateError):
        await rig.sink.commit("push-1", 1, InflightMode.KEEP, 10.0)
    await rig.sink.abort("push-1")
    assert rig.sink.served_version == 0
    assert rig.largest_difference(folder) < 1e-4

    await rig.push(2)
    assert rig.largest_difference(target) < 1e-4
    assert not rig.failures


async def test_reload_that_fails_in_the_pause_ends_the_server(
    tmp_path: Path, start: Callable[..., _Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / "model", "gpt2", tied=True)
    rig = start(folder)
    await rig.sink.discover(str(folder))
    await rig.transfer(1)
    worker: EngineWorker = rig.engine.worker

    def broken(tensors: object) -> None:
        raise OSError("no memory left")

    assert worker.shoal_sink is not None
    monkeypatch.setattr(rig.engine.model, "load_weights", broken)
    with pytest.raises((ShoalError, OSError), match="no memory left"):
        await rig.sink.commit("push-1", 1, InflightMode.KEEP, 10.0)
    assert rig.sink.state is SinkState.FAILED
    assert rig.failures
    assert rig.sink.served_version == 0


async def test_two_hundred_pushes_reuse_one_staging_file(tmp_path: Path, start: Callable[..., _Rig]) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2", tied=True)
    rig = start(folder)
    await rig.sink.discover(str(folder))
    await rig.push(1)
    files = {path.name: path.stat().st_ino for path in rig.staging.iterdir()}
    for version in range(2, 201):
        rig.source.tensors["model.norm.weight"].add_(0.01)
        rig.source.tensors["model.embed_tokens.weight"].add_(0.01)
        await rig.push(version)
        if version == 50:
            before_bytes = _resident_bytes()
    assert {path.name: path.stat().st_ino for path in rig.staging.iterdir()} == files
    # A leak of the embedding and its head alone (128 KB) would be 19 MB.
    assert _resident_bytes() - before_bytes < 12 << 20
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
            await rig.sink.prepare("push-1", 1, 60.0)
    assert rig.sink.state is SinkState.IDLE
    assert not list(rig.staging.iterdir())
    await rig.push(2)


def _flip_a_bit(layout: SinkLayout, name: str) -> None:
    (worker,) = layout.workers
    start = next(parameter.staging_offset_bytes for parameter in worker.parameters if parameter.name == name)
    with Path(worker.endpoints["shm"]).open("r+b") as file:
        file.seek(start)
        byte = file.read(1)
        file.seek(start)
        file.write(bytes([byte[0] ^ 1]))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
