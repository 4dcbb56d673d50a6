"""Engines of a rollout server that the test drives step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_rollout.engine import EngineSample
from shoal_rollout.worker_layout import Plain, layout_to_plain

from shoal.errors import ShoalError
from shoal.types import SamplingParams, SinkWorkerLayout


@dataclass
class Request:
    """What the engine was asked."""

    prompt_ids: list[int]
    params: object
    answer: asyncio.Future[EngineSample]


@dataclass
class FakeSampler:
    """A `SamplingEngine`: samples run until the test, or an abort, answers them."""

    running: dict[str, Request] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def sample(self, sample_id: str, prompt_ids: list[int], params: object) -> EngineSample:
        """Wait for the test."""
        assert sample_id not in self.running
        answer: asyncio.Future[EngineSample] = asyncio.get_running_loop().create_future()
        self.running[sample_id] = Request(prompt_ids, params, answer)
        self.changed.set()
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled.append(sample_id)
            raise
        finally:
            del self.running[sample_id]

    async def abort(self, sample_ids: Sequence[str]) -> None:
        """Answer with one token."""
        self.aborted.extend(sample_ids)
        for sample_id in sample_ids:
            self.finish(sample_id, num_tokens=1, reason="abort")

    def make_params(self, sampling: SamplingParams, stop_ids: Sequence[int], seed: int | None) -> object:
        """Show what was asked for."""
        return sampling, tuple(stop_ids), seed

    async def until_running(self, count: int) -> list[str]:
        """Wait for that many samples; answers their ids in order."""
        while len(self.running) < count:
            self.changed.clear()
            await self.changed.wait()
        return sorted(self.running)

    def finish(self, sample_id: str, *, num_tokens: int = 2, reason: str = "stop", logprob: float = -1.0, version: str = "0") -> None:
        """Answer one sample."""
        sample = EngineSample(
            token_ids=list(range(num_tokens)),
            logprobs=[logprob] * num_tokens,
            finish_reason=reason,
            versions=[(version, 0, num_tokens)] if num_tokens else [],
        )
        self.running[sample_id].answer.set_result(sample)


@dataclass
class FakeSwapper:
    """A `SwappableEngine`: records every call; fails or blocks where the test says."""

    layouts: Sequence[SinkWorkerLayout] = ()
    calls: list[str] = field(default_factory=list)
    failures: dict[str, ShoalError | RuntimeError] = field(default_factory=dict)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    reached: dict[str, asyncio.Event] = field(default_factory=dict)
    verify_steps: int = 2

    async def call_workers(self, method: str, *args: Plain) -> list[Plain]:
        """Answer as workers would."""
        await self._note(method)
        if method == "shoal_prepare":
            return [layout_to_plain(layout) for layout in self.layouts]
        if method == "shoal_step_verify":
            is_done = self.calls.count(method) % self.verify_steps == 0
            return [[is_done, 100] for _ in self.layouts]
        return [None for _ in self.layouts]

    async def pause(self) -> None:
        """Note it."""
        await self._note("pause")

    async def finish_swap(self, version: str) -> None:
        """Note it."""
        await self._note(f"finish_swap {version}")

    async def resume(self) -> None:
        """Note it."""
        await self._note("resume")

    async def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.gates:
            self.reached[call].set()
            await self.gates[call].wait()
        if call in self.failures:
            raise self.failures[call]

    def hold(self, call: str) -> tuple[asyncio.Event, asyncio.Event]:
        """Block a call: answers (reached, release)."""
        self.gates[call], self.reached[call] = asyncio.Event(), asyncio.Event()
        return self.reached[call], self.gates[call]
