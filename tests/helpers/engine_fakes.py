"""Engines of a rollout server that the test drives step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_rollout.engine import EngineSample, StillRunningError
from shoal_rollout.worker_layout import Plain

from shoal.errors import ShoalError
from shoal.types import InflightMode, SamplingParams
from tests.helpers.engine_models import PlainModel, PlainWorkers


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


class FakeSwapper:
    """A `SwappableEngine` over workers with plain models: records every call; fails or blocks where the test says."""

    def __init__(self, models: Sequence[PlainModel]) -> None:
        self.models = list(models)
        self.workers = PlainWorkers(self.models)
        self.calls: list[str] = []
        self.failures: dict[str, ShoalError | RuntimeError] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {}

    async def call_workers(self, method: str, *args: Plain) -> list[Plain]:
        """Answer as workers do."""
        await self.note(method)
        return self.workers.call(method, *args)

    async def pause(self, inflight: InflightMode, timeout_s: float) -> int:
        """Note it."""
        await self.note(f"pause {inflight}")
        return 0

    async def finish_swap(self, version: str) -> None:
        """Note it."""
        await self.note(f"finish_swap {version}")

    async def resume(self) -> None:
        """Note it."""
        await self.note("resume")

    async def note(self, call: str) -> None:
        """Record a call; block or fail it."""
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


@dataclass
class _Running:
    """A request in a `SteppedEngine`; one entry per token."""

    max_tokens: int
    answer: asyncio.Future[EngineSample]
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)

    def end(self, reason: str) -> None:
        """Answer with what is there."""
        changes = [index for index in range(len(self.versions)) if index == 0 or self.versions[index] != self.versions[index - 1]]
        ends = [*changes[1:], len(self.versions)]
        spans = [(self.versions[start], start, end) for start, end in zip(changes, ends, strict=True)] if changes else []
        self.answer.set_result(
            EngineSample(token_ids=list(range(len(self.logprobs))), logprobs=self.logprobs, finish_reason=reason, versions=spans)
        )


class SteppedEngine(FakeSwapper):
    """Also a `SamplingEngine`: every call of `step` gives each running request one token, whose log-probability is a weight.

    Pausing does what vLLM does: requests that come while it is paused are not run before `resume`; keep freezes the running ones, abort
    ends them, wait lets them be stepped to their end.
    """

    def __init__(self, models: Sequence[PlainModel]) -> None:
        super().__init__(models)
        self.version = "0"
        self.requests: dict[str, _Running] = {}
        self.held: set[str] = set()
        self.paused: InflightMode | None = None
        self._changed = asyncio.Event()

    async def sample(self, sample_id: str, prompt_ids: list[int], params: object) -> EngineSample:
        """Wait for the test's steps."""
        assert isinstance(params, SamplingParams)
        request = _Running(params.max_new_tokens, asyncio.get_running_loop().create_future())
        self.requests[sample_id] = request
        if self.paused is not None:
            self.held.add(sample_id)
        self._changed.set()
        return await request.answer

    async def abort(self, sample_ids: Sequence[str]) -> None:
        """End requests with what they have."""
        for sample_id in sample_ids:
            self._end(sample_id, "abort")

    def make_params(self, sampling: SamplingParams, stop_ids: Sequence[int], seed: int | None) -> object:
        """Show what was asked for."""
        return sampling

    def step(self, num_steps: int = 1) -> None:
        """Sample that many tokens of every request that may run."""
        for _ in range(num_steps):
            for sample_id in [name for name in self.requests if name not in self.held]:
                if self.paused is not InflightMode.KEEP:
                    self._step_one(sample_id, self.requests[sample_id])

    async def until_requests(self, count: int) -> None:
        """Wait until exactly that many requests are in the engine."""
        while len(self.requests) != count:
            self._changed.clear()
            await self._changed.wait()

    async def pause(self, inflight: InflightMode, timeout_s: float) -> int:
        """See `SwappableEngine.pause`."""
        self.paused = inflight
        await self.note(f"pause {inflight}")
        running = [name for name in self.requests if name not in self.held]
        if inflight is InflightMode.ABORT:
            await self.abort(running)
            return len(running)
        if inflight is InflightMode.WAIT:
            await self._wait(timeout_s)
        return 0

    async def finish_swap(self, version: str) -> None:
        """Tag the tokens that follow."""
        await super().finish_swap(version)
        self.version = version

    async def resume(self) -> None:
        """Run everything."""
        await super().resume()
        self.paused = None
        self.held.clear()

    async def _wait(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while self.requests.keys() - self.held:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            await self.resume()
            raise StillRunningError("requests did not end") from error

    def _step_one(self, sample_id: str, request: _Running) -> None:
        request.logprobs.append(float(self.models[0].weights["a"].flatten()[0]))
        request.versions.append(self.version)
        if len(request.logprobs) == request.max_tokens:
            self._end(sample_id, "length")

    def _end(self, sample_id: str, reason: str) -> None:
        self.requests.pop(sample_id).end(reason)
        self._changed.set()
