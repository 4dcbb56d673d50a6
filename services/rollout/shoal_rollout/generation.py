"""Runs Generate calls: one engine request per sample, each completion handed out when it is done.

Concurrency: everything runs on one event loop. A call owns its sample tasks; when its consumer goes away (cancelled call, deadline) they
are cancelled, and each aborts its sample in the engine. Draining refuses new calls and lets running ones end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager

from shoal.errors import CapacityError, InvalidRequestError, UnavailableError
from shoal.telemetry.logs import get_logger
from shoal.telemetry.metrics import counter, gauge
from shoal.types import Completion, SamplingParams
from shoal_rollout.completions import is_dropped, to_completion
from shoal_rollout.engine import SamplingEngine
from shoal_rollout.request_checks import GenerateCall, check_call

log = get_logger(__name__)

MAX_RUNNING_SAMPLES = 65_536
"""Bound of what waits in the engine; above it a call is refused."""

_samples = counter("rollout", "samples", "count", "Samples answered, by finish reason.", ("finish_reason",))
_tokens = counter("rollout", "response_tokens", "count", "Response tokens answered.")
_dropped = counter("rollout", "non_finite_samples", "count", "Samples left out: a token had no finite log-probability.")
_running = gauge("rollout", "running_samples", "count", "Samples in the engine.")


class Generation:
    """All Generate calls of one server."""

    def __init__(
        self,
        engine: SamplingEngine,
        *,
        engine_id: str,
        vocab_size: int,
        max_model_len: int,
        eos_ids: tuple[int, ...],
        required_policy_version: int | None = 0,
    ) -> None:
        """Serve version 0.

        Args:
            required_policy_version: Below it no request is answered; None answers none before `require` was called.
        """
        self.policy_version = 0
        self._required_version = required_policy_version
        self._engine = engine
        self._engine_id = engine_id
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._calls: dict[str, list[str]] = {}
        self._num_running = 0
        self._num_calls = 0
        self._refusal = ""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Samples in the engine."""
        return self._num_running

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return bool(self._refusal)

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Completion]:
        """Sample a group; yields each completion when it is done, in any order.

        Raises: InvalidRequestError: the request is wrong. CapacityError: too much is running.
            UnavailableError: draining, dead, or the served version is older than the run or the request requires.
        """
        self._admit(call)
        with self._counted(call) as sample_ids:
            done: asyncio.Queue[Completion | BaseException] = asyncio.Queue(maxsize=call.num_samples)
            tasks = self._start_samples(call, sample_ids, done)
            try:
                for _ in range(call.num_samples):
                    answer = await done.get()
                    if isinstance(answer, BaseException):
                        raise answer
                    yield answer
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, request_ids: Iterable[str]) -> int:
        """Let running calls answer at once with partial tokens; unknown ids are ignored.

        Returns: the number of samples that were told to end.
        """
        sample_ids = [sample_id for request_id in request_ids for sample_id in self._calls.get(request_id, ())]
        await self._engine.abort(sample_ids)
        return len(sample_ids)

    async def abort_all(self) -> int:
        """Abort everything that runs."""
        return await self.abort(list(self._calls))

    def require(self, policy_version: int) -> None:
        """Answer no request while a version below this one is served. What was required once stays required."""
        if self._required_version is None or policy_version > self._required_version:
            self._required_version = policy_version
            if policy_version > self.policy_version:
                log.warning("behind_required_version", policy_version=self.policy_version, required_policy_version=policy_version)

    def refuse(self, reason: str) -> None:
        """Refuse new calls from now on."""
        self._refusal = reason

    async def drain(self) -> None:
        """Refuse new calls and wait for the running ones."""
        if not self._refusal:
            self.refuse("this server is draining; use another one")
        await self._idle.wait()

    def _admit(self, call: GenerateCall) -> None:
        if self._refusal:
            raise UnavailableError(self._refusal)
        check_call(call, vocab_size=self._vocab_size, max_model_len=self._max_model_len)
        self._check_version(call.min_policy_version)
        if call.request_id in self._calls:
            raise InvalidRequestError(f"request_id {call.request_id!r} is running already; give every attempt its own")
        if self._num_running + call.num_samples > MAX_RUNNING_SAMPLES:
            raise CapacityError(f"{self._num_running} samples are running, at most {MAX_RUNNING_SAMPLES} may; send fewer at once")

    def _check_version(self, min_policy_version: int) -> None:
        if self._required_version is None:
            raise UnavailableError(f"{self._engine_id} has not been told yet which policy version it must serve; use another server")
        for wanted, who in ((self._required_version, "the run requires"), (min_policy_version, "the request wants")):
            if wanted > self.policy_version:
                serves = f"{self._engine_id} serves policy version {self.policy_version}, {who} at least {wanted}"
                raise UnavailableError(f"{serves}; push weights to it first or use another server")

    @contextmanager
    def _counted(self, call: GenerateCall) -> Iterator[list[str]]:
        self._num_calls += 1
        # Unique in the engine whatever the caller's ids look like.
        sample_ids = [f"{self._num_calls}-{index}" for index in range(call.num_samples)]
        self._calls[call.request_id] = sample_ids
        self._count(call.num_samples)
        try:
            yield sample_ids
        finally:
            del self._calls[call.request_id]
            self._count(-call.num_samples)

    def _count(self, change: int) -> None:
        self._num_running += change
        _running.set(self._num_running)
        if self._num_running:
            self._idle.clear()
        else:
            self._idle.set()

    def _start_samples(
        self, call: GenerateCall, sample_ids: list[str], done: asyncio.Queue[Completion | BaseException]
    ) -> list[asyncio.Task[None]]:
        stop_ids = stop_ids_of(call.sampling, self._eos_ids)
        if call.seeds:
            params = [self._engine.make_params(call.sampling, stop_ids, seed) for seed in call.seeds]
        else:
            params = [self._engine.make_params(call.sampling, stop_ids, None)] * call.num_samples
        return [
            asyncio.create_task(self._run_sample(index, sample_id, call.prompt_ids, params[index], done))
            for index, sample_id in enumerate(sample_ids)
        ]

    async def _run_sample(
        self, index: int, sample_id: str, prompt_ids: list[int], params: object, done: asyncio.Queue[Completion | BaseException]
    ) -> None:
        start_s = time.perf_counter()
        try:
            sample = await self._engine.sample(sample_id, prompt_ids, params)
            latency_ms = (time.perf_counter() - start_s) * 1e3
            completion = to_completion(sample, sample_index=index, latency_ms=latency_ms, engine_id=self._engine_id)
        except Exception as error:  # noqa: BLE001 - raised again by the call that owns this task
            done.put_nowait(error)
            return
        _samples.labels(completion.finish_reason.value).inc()
        _tokens.inc(len(completion.response_ids))
        if is_dropped(sample, completion):
            _dropped.inc()
            log.warning("sample_not_finite", sample=sample_id, num_tokens=len(sample.token_ids))
        done.put_nowait(completion)


def stop_ids_of(sampling: SamplingParams, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that end a response, as its last token: the model's unless it ignores them, and the request's own."""
    return sampling.stop_token_ids if sampling.ignore_eos else (*eos_ids, *sampling.stop_token_ids)
