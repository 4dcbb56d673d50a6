"""Which commands of a training step have run, and their answers, so that a repeated command gets the first answer.

    IDLE ──forward──► FORWARDED ──advantages──► ADVANTAGES ──update──► UPDATED ──forward of a later step──► FORWARDED
                          └───────────────update (critic)────────────────┘

A forward of the same step with another batch, or of a later step, replaces a step that was not updated.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Generic, TypeVar

from shoal.errors import StateError
from shoal.types import Batch, TrainerRole

Answer = TypeVar("Answer")


class StepStage(StrEnum):
    """How far the current step is."""

    IDLE = "idle"
    FORWARDED = "forward_batch"
    ADVANTAGES = "compute_advantages"
    UPDATED = "update_batch"


TRANSITIONS: dict[TrainerRole, dict[StepStage, frozenset[StepStage]]] = {
    TrainerRole.ACTOR: {
        StepStage.IDLE: frozenset({StepStage.FORWARDED}),
        StepStage.FORWARDED: frozenset({StepStage.FORWARDED, StepStage.ADVANTAGES}),
        StepStage.ADVANTAGES: frozenset({StepStage.FORWARDED, StepStage.UPDATED}),
        StepStage.UPDATED: frozenset({StepStage.FORWARDED}),
    },
    TrainerRole.CRITIC: {
        StepStage.IDLE: frozenset({StepStage.FORWARDED}),
        StepStage.FORWARDED: frozenset({StepStage.FORWARDED, StepStage.UPDATED}),
        StepStage.ADVANTAGES: frozenset(),
        StepStage.UPDATED: frozenset({StepStage.FORWARDED}),
    },
}


class StepLedger(Generic[Answer]):
    """State of one rank's current step; all ranks of a gang see the same commands, so theirs are equal."""

    def __init__(self, role: TrainerRole) -> None:
        self._transitions = TRANSITIONS[role]
        self._batch: Batch | None = None
        self._answers: dict[StepStage, Answer] = {}
        self.stage = StepStage.IDLE
        self.step = 0

    def recall_forward(self, batch: Batch) -> Answer | None:
        """The first answer of a repeated forward, or None if it has to run.

        Raises: StateError: the batch is of an older step.
        """
        if batch.step < self.step:
            raise StateError(f"forward_batch of step {batch.step} comes too late: the gang is at step {self.step}; go on with a later step")
        if batch.step == self.step and (self.stage is StepStage.UPDATED or batch == self._batch):
            return self._answers.get(StepStage.FORWARDED)
        return None

    def recall(self, target: StepStage, step: int) -> Answer | None:
        """The first answer of a repeated command, or None if it has to run.

        Raises: StateError: not allowed now.
        """
        if step == self.step and target in self._answers:
            return self._answers[target]
        if step != self.step or target not in self._transitions[self.stage]:
            raise StateError(f"{target} of step {step} is not possible: the gang's last command was {self.stage} of step {self.step}")
        return None

    def drop(self) -> None:
        """Forget a step that is about to be replaced; an updated one is kept until the new one is there."""
        if self.stage is not StepStage.UPDATED:
            self.stage, self._batch = StepStage.IDLE, None
            self._answers.clear()

    def begin(self, batch: Batch, answer: Answer) -> None:
        """Note that the forward of a step has run."""
        self.stage, self.step, self._batch = StepStage.FORWARDED, batch.step, batch
        self._answers = {StepStage.FORWARDED: answer}

    def advance(self, target: StepStage, answer: Answer) -> None:
        """Note that a later command of the current step has run."""
        if target not in self._transitions[self.stage]:
            raise StateError(f"{target} cannot follow {self.stage}")
        self.stage = target
        self._answers[target] = answer
