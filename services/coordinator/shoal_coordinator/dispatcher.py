"""Issues prompts to rollout servers and yields finished groups.

Rules:
- A group goes to the server with the least outstanding tokens; all its samples are generated there.
- A server that is unavailable, late, stale, drained, removed from the pool, or that answers nonsense loses the group: it
  is generated again elsewhere, at most rollout.retries times. Seeds come from (run seed, uid, sample, attempt), so a run
  without failures is reproducible whichever server does the work.
- A token of an older policy version than was asked for is refused, whatever the server said when it took the request.
- A group in which a server ended a sample early (finish reason abort, as a weight push may) is generated again, elsewhere if
  possible: a part is never trained as if it were whole. That is no failure of the server; it happens at most MAX_ABORTS times.
- After the last attempt timed out, the samples that did finish are used; without any, the group is dropped and counted.
- Completions without tokens, with an id that cannot be sampled, or with a log-probability that is not finite are excluded and counted:
  they cannot be trained on.

Legend: T response tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import xxhash

from shoal.config.models import RolloutSection
from shoal.errors import CodecError, DeadlineError, InternalError, StateError, UnavailableError
from shoal.telemetry.logs import get_logger
from shoal.types import Completion, SamplingParams
from shoal_coordinator.completions import is_aborted, require_fresh, require_whole, sort_completions
from shoal_coordinator.prompts import PromptTask
from shoal_coordinator.server_pool import ServerLease, ServerPool
from shoal_coordinator.stage_clock import Stage, StageClock

log = get_logger(__name__)

MAX_CONCURRENT_GROUPS = 1024
MAX_ABORTS = 16
RETRY_PATIENCE_S = 1.0
"""How long a server that has just failed is avoided when there is no other; one that ended a sample early is not waited for."""
# StateError: the server's policy is older than asked for.
_RETRIED = (UnavailableError, DeadlineError, StateError, InternalError, CodecError)


class RolloutEndpoint(Protocol):
    """What the dispatcher needs of a rollout client."""

    def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        num_samples: int,
        seeds: Sequence[int] = (),
        min_policy_version: int = 0,
        *,
        timeout_s: float,
    ) -> AsyncGenerator[Completion, None]:
        """Stream the completions of one prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """How to generate for every prompt of a call. seed None leaves sampling to the engine (greedy evaluation)."""

    sampling: SamplingParams
    num_samples: int
    seed: int | None
    min_policy_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedGroup:
    """A prompt's completions from one server, by sample_index; completions may be fewer than asked for, or none.

    num_empty completions had no token, num_outside_vocab an id that cannot be sampled, num_not_finite a log-probability that is not
    finite, num_missing did not finish in time; all are left out. num_aborted were ended early by a server in earlier attempts, and
    generated again.
    """

    task: PromptTask
    attempt: int
    server_id: str
    sampling: SamplingParams
    completions: tuple[Completion, ...]
    num_empty: int = 0
    num_outside_vocab: int = 0
    num_not_finite: int = 0
    num_missing: int = 0
    num_aborted: int = 0


class Dispatcher:
    """Generates groups concurrently; used from the event loop alone.

    Args:
        pool: rollout servers; changes at any time.
        config: deadlines, retries.
        run_id: prefix of request ids.
        vocab_size: sampled ids must be below it.
        clock: counts open Generate calls as rollout time.
        wait_for_server_s: bound of waiting for a server when there is none.
        max_concurrent_groups: most groups in flight.
    """

    def __init__(
        self,
        pool: ServerPool[RolloutEndpoint],
        config: RolloutSection,
        *,
        run_id: str,
        vocab_size: int,
        clock: StageClock,
        wait_for_server_s: float,
        max_concurrent_groups: int = MAX_CONCURRENT_GROUPS,
    ) -> None:
        self._pool = pool
        self._config = config
        self._run_id = run_id
        self._vocab_size = vocab_size
        self._clock = clock
        self._wait_for_server_s = wait_for_server_s
        self._slots = asyncio.Semaphore(max_concurrent_groups)

    def generate(self, tasks: Sequence[PromptTask], request: GenerationRequest) -> AsyncGenerator[list[GeneratedGroup], None]:
        """Generate all tasks alike; see `generate_each`."""
        return self.generate_each([(task, request) for task in tasks])

    async def generate_each(self, work: Sequence[tuple[PromptTask, GenerationRequest]]) -> AsyncGenerator[list[GeneratedGroup], None]:
        """Generate all at once and yield groups as they finish, as many together as have finished meanwhile.

        Close the iterator (`contextlib.aclosing`) when leaving early: that cancels what still runs.
        Raises: ShoalError: a group failed for good; the others are cancelled.
        """
        running = {asyncio.create_task(self._generate_group(task, request)) for task, request in work}
        try:
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                yield [finished.result() for finished in done]
        finally:
            for left in running:
                left.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _generate_group(self, task: PromptTask, request: GenerationRequest) -> GeneratedGroup:
        failed_on: list[str] = []
        aborted_on: list[str] = []
        num_aborted = 0
        patience_s = RETRY_PATIENCE_S
        async with self._slots:
            while True:
                server = await self._pool.pick(self._wait_for_server_s, {*failed_on, *aborted_on}, patience_s)
                finished: list[Completion] = []
                attempt = len(failed_on) + len(aborted_on)
                try:
                    await self._attempt(server, task, request, attempt, finished)
                    aborted = sum(map(is_aborted, finished))
                    if not aborted:
                        return self._as_group(task, request, attempt, server.server_id, finished, num_aborted=num_aborted)
                    aborted_on.append(server.server_id)
                    num_aborted, patience_s = num_aborted + aborted, 0.0
                    if len(aborted_on) > MAX_ABORTS:
                        raise UnavailableError(f"group {task.uid!r} was aborted {len(aborted_on)} times, last on {server.server_id!r}")
                except _RETRIED as error:
                    failed_on.append(server.server_id)
                    patience_s = RETRY_PATIENCE_S
                    if len(failed_on) > self._config.retries or len(aborted_on) > MAX_ABORTS:
                        if not isinstance(error, DeadlineError):
                            raise type(error)(f"group {task.uid!r} failed on {', '.join(failed_on)}; last: {error}") from error
                        whole = [completion for completion in finished if not is_aborted(completion)]
                        require_whole(whole, server.server_id)
                        return self._as_group(task, request, attempt, server.server_id, whole, num_aborted=num_aborted)

    async def _attempt(
        self, server: ServerLease[RolloutEndpoint], task: PromptTask, request: GenerationRequest, attempt: int, finished: list[Completion]
    ) -> None:
        num_tokens = task.prompt_ids.size + request.num_samples * request.sampling.max_new_tokens
        with self._pool.working(server, num_tokens), self._clock.measure(Stage.ROLLOUT):
            await _unless_gone(server, self._collect(server.client, task, request, attempt, finished))
        if sorted(completion.sample_index for completion in finished) != list(range(request.num_samples)):
            raise InternalError(
                f"rollout server {server.server_id!r} answered {len(finished)} of {request.num_samples} completions, or one twice"
            )
        require_whole(finished, server.server_id)

    async def _collect(
        self, client: RolloutEndpoint, task: PromptTask, request: GenerationRequest, attempt: int, finished: list[Completion]
    ) -> None:
        call = client.generate(
            f"{self._run_id}/{task.uid}/{attempt}",
            task.prompt_ids.tolist(),
            request.sampling,
            request.num_samples,
            seeds_of(request, task.uid, attempt),
            request.min_policy_version,
            timeout_s=self._config.request_timeout_s,
        )
        async with aclosing(call) as stream:
            async for completion in stream:
                require_fresh(completion, request.min_policy_version)
                finished.append(completion)

    def _as_group(
        self,
        task: PromptTask,
        request: GenerationRequest,
        attempt: int,
        server_id: str,
        finished: Sequence[Completion],
        *,
        num_aborted: int,
    ) -> GeneratedGroup:
        found = sort_completions(finished, self._vocab_size)
        if found.num_outside_vocab or found.num_not_finite:
            counts = {"num_outside_vocab": found.num_outside_vocab, "num_not_finite": found.num_not_finite}
            log.warning("samples_dropped", server=server_id, vocab_size=self._vocab_size, **counts)
        return GeneratedGroup(
            task=task,
            attempt=attempt,
            server_id=server_id,
            sampling=request.sampling,
            completions=found.usable,
            num_empty=found.num_empty,
            num_outside_vocab=found.num_outside_vocab,
            num_not_finite=found.num_not_finite,
            num_missing=request.num_samples - len(finished),
            num_aborted=num_aborted,
        )


def sample_seed(run_seed: int, uid: str, sample_index: int, attempt: int) -> int:
    """Seed of one sample: 63 bits of xxh3 of its identity."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{uid}/{sample_index}/{attempt}".encode()) & (2**63 - 1)


def seeds_of(request: GenerationRequest, uid: str, attempt: int) -> list[int]:
    """Seeds of all samples of a group; empty for greedy requests."""
    if request.seed is None:
        return []
    return [sample_seed(request.seed, uid, sample_index, attempt) for sample_index in range(request.num_samples)]


def training_request(config: RolloutSection, *, seed: int, stop_token_ids: tuple[int, ...], min_policy_version: int) -> GenerationRequest:
    """Sampling for training, as configured; with ignore_eos no stop id ends a response, only its length does."""
    sampling = SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens,
        stop_token_ids=() if config.ignore_eos else stop_token_ids,
        ignore_eos=config.ignore_eos,
    )
    return GenerationRequest(sampling=sampling, num_samples=config.group_size, seed=seed, min_policy_version=min_policy_version)


async def _unless_gone(server: ServerLease[RolloutEndpoint], work: Coroutine[None, None, None]) -> None:
    """Run work, but give up as soon as the server has left the pool."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(server.gone.wait())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise UnavailableError(f"rollout server {server.server_id!r} left while it was generating")
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
