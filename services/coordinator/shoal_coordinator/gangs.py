"""A trainer gang as the coordinator sees it: commands with deadlines, errors that name the gang and say what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from shoal.errors import ShoalError, StateError
from shoal.types import Batch, ExportResult, ServiceInfo, TokenScores, TokenSequence, TrainerDescription, UpdateResult
from shoal_coordinator.push_calls import WeightSource
from shoal_coordinator.stage_clock import Stage, StageClock
from shoal_coordinator.waiting import WaitBoard

DESCRIBE_TIMEOUT_S = 30.0


class Closable(Protocol):
    """Something that holds a channel."""

    async def close(self) -> None:
        """Close the channel."""
        ...


class TrainerCalls(Protocol):
    """What a gang can be told; `shoal.clients.trainer.TrainerClient`."""

    async def describe(self, *, timeout_s: float) -> TrainerDescription:
        """Facts about the gang."""
        ...

    async def forward_batch(self, batch: Batch, *, timeout_s: float) -> dict[str, float]:
        """Log-probabilities or values of a batch."""
        ...

    async def compute_advantages(self, step: int, kl_coef: float, kl_loss_coef: float, *, timeout_s: float) -> dict[str, float]:
        """Advantages of the batch of this step (actor)."""
        ...

    async def update_batch(self, step: int, *, timeout_s: float) -> UpdateResult:
        """Optimizer steps on the batch of this step."""
        ...

    async def export_model(self, folder: str, *, timeout_s: float) -> ExportResult:
        """Write a Hugging Face folder."""
        ...


class TokenScoring(Protocol):
    """The actor's part in an audit."""

    async def score_tokens(self, sequences: Sequence[TokenSequence], *, timeout_s: float) -> tuple[list[TokenScores], int]:
        """Log-probabilities and greedy choices at the response tokens, and the policy version that they are of."""
        ...


class TrainerConnection(TrainerCalls, TokenScoring, Closable, Protocol):
    """A gang's commands over a channel."""


class SourceConnection(WeightSource, Closable, Protocol):
    """The actor's end of the push over a channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """A registered gang; every call is timed, listed as a wait, and fails with the gang's name.

    source is the actor's end of the weight push. timeout_s is the deadline of one command.
    """

    info: ServiceInfo
    trainer: TrainerConnection
    source: SourceConnection | None
    clock: StageClock
    waits: WaitBoard
    timeout_s: float

    async def describe(self) -> TrainerDescription:
        """Facts about the gang."""
        with self._calling("description"):
            return await self.trainer.describe(timeout_s=DESCRIBE_TIMEOUT_S)

    async def forward_batch(self, batch: Batch) -> dict[str, float]:
        """Log-probabilities (actor) or values (critic)."""
        with self._calling(f"forward pass of step {batch.step}"), self.clock.measure(Stage.FORWARD):
            return await self.trainer.forward_batch(batch, timeout_s=self.timeout_s)

    async def compute_advantages(self, step: int, kl_coef: float, kl_loss_coef: float) -> dict[str, float]:
        """Advantages of the step's batch."""
        with self._calling(f"advantages of step {step}"), self.clock.measure(Stage.ADVANTAGES):
            return await self.trainer.compute_advantages(step, kl_coef, kl_loss_coef, timeout_s=self.timeout_s)

    async def update_batch(self, step: int) -> UpdateResult:
        """Optimizer steps on the step's batch."""
        with self._calling(f"update of step {step}"), self.clock.measure(Stage.UPDATE):
            return await self.trainer.update_batch(step, timeout_s=self.timeout_s)

    async def export_model(self, folder: str) -> ExportResult:
        """Write a Hugging Face folder."""
        with self._calling(f"export to {folder}"):
            return await self.trainer.export_model(folder, timeout_s=self.timeout_s)

    def require_source(self) -> WeightSource:
        """The actor's weights. Raises: StateError: this gang is no actor."""
        if self.source is None:
            raise StateError(f"{self.info.kind} gang {self.info.service_id!r} has no weights to push; only the actor has")
        return self.source

    def connections(self) -> list[Closable]:
        """What to close when the gang is gone."""
        return [self.trainer] if self.source is None else [self.trainer, self.source]

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        info = self.info
        try:
            with self.waits.waiting("coordinator", [info.service_id], what):
                yield
        except ShoalError as error:
            raise type(error)(
                f"the {info.kind} gang {info.service_id!r} at {info.address} failed its {what}: {error}; "
                "look at its log for the cause, remove it, and start the run again"
            ) from error
