"""What the servicers need of an engine. Imports no vLLM, so that everything above it is tested without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal import errors
from shoal.errors import InternalError, ShoalError, StateError
from shoal.types import InflightMode, SamplingParams
from shoal_rollout.worker_layout import Plain

_WORKER_ERRORS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ShoalError)}


class StillRunningError(StateError):
    """Requests that were waited for did not end in time; the engine goes on with them as if nothing had been asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """What the engine answered for one sample; T tokens.

    versions: (weight version, start, end) for tokens [start, end), or None if the engine did not say.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    versions: Sequence[tuple[str, int, int]] | None


class SamplingEngine(Protocol):
    """Samples tokens."""

    async def sample(self, sample_id: str, prompt_ids: list[int], params: object) -> EngineSample:
        """Sample one response; cancelling aborts it in the engine. sample_id is unique among running ones.

        Raises: UnavailableError: the engine is dead.
        """
        ...

    async def abort(self, sample_ids: Sequence[str]) -> None:
        """Let running samples answer at once with what they have."""
        ...

    def make_params(self, sampling: SamplingParams, stop_ids: Sequence[int], seed: int | None) -> object:
        """Convert sampling parameters; reusable for samples without a seed."""
        ...


class SwappableEngine(Protocol):
    """Lets weights be swapped under running requests."""

    async def call_workers(self, method: str, *args: Plain) -> list[Plain]:
        """Call a worker extension method on every worker; answers by rank.

        Raises: ShoalError: as a worker raised it.
        """
        ...

    async def pause(self, inflight: InflightMode, timeout_s: float) -> int:
        """Stop stepping. Requests that come from now on wait for `resume`.

        Args:
            inflight: What becomes of running requests. keep: they stay; abort: they answer with what they have; wait: they end first.
            timeout_s: How long `wait` may take.
        Returns: requests that were told to end early.
        Raises: StillRunningError: `wait` took too long.
        """
        ...

    async def finish_swap(self, version: str) -> None:
        """While paused: forget all cached keys and values, also of running requests, and tag what follows with a version."""
        ...

    async def resume(self) -> None:
        """Go on stepping."""
        ...


def worker_values(answers: Sequence[Plain]) -> list[Plain]:
    """Take the workers' answers apart.

    Raises: ShoalError: the first one that a worker answered with, as its own class.
    """
    for kind, value in answers:
        if kind != "ok":
            raise _WORKER_ERRORS.get(kind, InternalError)(value)
    return [value for _, value in answers]
