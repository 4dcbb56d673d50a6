"""Where the loop is, in <run.folder>/state.json, so that a coordinator that is started again goes on exactly there.

The file has two entries. `current` holds after the last step. `next` is written before the updates of a step are asked for, and holds
once they have committed. So whenever the coordinator ends, the steps that the gangs have committed say which of the two is true:

    gangs at current                      no update of the step has committed: the same prompts are generated and trained again
    gangs at next, or some of them        the step has been trained: go on behind it, its prompts are not trained twice
    gangs that have not trained           the run starts
    anything else                         refused: nobody knows which prompts these gangs have seen

A gang's steps are counted by the gang itself. They differ from the run's: an update that was not applied counts for the run alone, and
the critic is ahead of the actor by the steps of its warm-up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.errors import StateError
from shoal.telemetry.logs import get_logger
from shoal.types import ServiceKind
from shoal_coordinator.kl_controller import KlCoefficients
from shoal_coordinator.prompts import PromptPosition
from shoal_coordinator.report import write_json_atomically

log = get_logger(__name__)

STATE_NAME = "state.json"


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GangMark(_Stored):
    """A gang and how far it is."""

    incarnation: str
    """Differs for every start of its process."""
    step: int = Field(ge=0)
    """Steps that its optimizer has committed; for the actor this is the policy version."""

    def is_at(self, other: GangMark) -> bool:
        """Whether another mark is of the same weights; gangs that have not trained are told apart by their start."""
        return self.step == other.step and (self.step > 0 or self.incarnation == other.incarnation)


class StoredPosition(_Stored):
    """The next prompt to issue."""

    epoch: int = Field(ge=0)
    index: int = Field(ge=0)


class StoredKl(_Stored):
    """The KL coefficients of the next step."""

    kl_coef: float = Field(ge=0)
    kl_loss_coef: float = Field(ge=0)


class LoopState(_Stored):
    """After `step` steps of the run."""

    step: int = Field(ge=0)
    policy_version: int = Field(ge=0)
    """Version of the actor, as in `gangs`; for whoever reads the file."""
    gangs: dict[ServiceKind, GangMark]
    prompts: StoredPosition
    kl: StoredKl

    @model_validator(mode="after")
    def _agrees(self) -> LoopState:
        actor = self.gangs.get(ServiceKind.ACTOR)
        if actor is None or actor.step != self.policy_version:
            raise ValueError(f"policy_version is {self.policy_version}, which should be the step of the actor in gangs")
        return self

    @property
    def position(self) -> PromptPosition:
        """The next prompt to issue."""
        return PromptPosition(epoch=self.prompts.epoch, index=self.prompts.index)

    @property
    def coefficients(self) -> KlCoefficients:
        """The KL coefficients of the next step."""
        return KlCoefficients(kl_coef=self.kl.kl_coef, kl_loss_coef=self.kl.kl_loss_coef)


class StateFile(_Stored):
    """The whole file."""

    schema_version: Literal[1] = 1
    run_id: str
    current: LoopState
    next: LoopState | None = None


def loop_state(step: int, gangs: Mapping[ServiceKind, GangMark], position: PromptPosition, kl: KlCoefficients) -> LoopState:
    """Put a state together."""
    return LoopState(
        step=step,
        policy_version=gangs[ServiceKind.ACTOR].step,
        gangs=dict(gangs),
        prompts=StoredPosition(epoch=position.epoch, index=position.index),
        kl=StoredKl(kl_coef=kl.kl_coef, kl_loss_coef=kl.kl_loss_coef),
    )


def read_state(path: Path) -> StateFile | None:
    """Read the file; None if there is none.

    Raises: StateError: it is not what `LoopJournal` writes.
    """
    try:
        return StateFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        what = _problems(error) if isinstance(error, ValidationError) else str(error)
        fix = "bring it back, or remove it and start the gangs again"
        raise StateError(f"{path} cannot be read as the state of a run ({what}): {fix}") from error


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:3])


def find_state(path: Path, run_id: str, gangs: Mapping[ServiceKind, GangMark]) -> LoopState | None:
    """Where gangs that may have trained are; None if they have not, so that the run starts.

    Raises: StateError: they have, and the file does not say where they are.
    """
    file = read_state(path)
    stored = [] if file is None or file.run_id != run_id else [file.current, *([file.next] if file.next is not None else [])]
    if stored and _are_at(gangs, stored[:1]):
        return stored[0]
    if all(mark.step == 0 for mark in gangs.values()):
        return None
    if len(stored) == 2 and _are_at(gangs, stored):
        return _behind(stored[1], gangs)
    committed = {kind.value: mark.step for kind, mark in gangs.items()}
    known = [{kind.value: mark.step for kind, mark in state.gangs.items()} for state in stored]
    says = f"says {' or '.join(map(str, known))}" if known else "is missing or of another run"
    raise StateError(
        f"the gangs have committed different steps than this run knows of ({committed}; {path} {says}): bring back the file that was "
        "written with them, or start all gangs again"
    )


def _are_at(gangs: Mapping[ServiceKind, GangMark], states: Collection[LoopState]) -> bool:
    """Whether every gang is where one of the states has it."""
    if any(state.gangs.keys() != gangs.keys() for state in states):
        return False
    return all(any(mark.is_at(state.gangs[kind]) for state in states) for kind, mark in gangs.items())


def _behind(state: LoopState, gangs: Mapping[ServiceKind, GangMark]) -> LoopState:
    """The step has been trained; where one gang's update was not applied, or was never asked for, that stays so."""
    late = [kind.value for kind, mark in gangs.items() if not mark.is_at(state.gangs[kind])]
    if late:
        log.warning("update_may_be_missing", step=state.step, gangs=late, reason="the coordinator ended within this step")
    return loop_state(state.step, gangs, state.position, state.coefficients)


class LoopJournal:
    """Keeps the state on disk; used from the event loop alone."""

    def __init__(self, path: Path, run_id: str, start: LoopState) -> None:
        self._path = path
        self._run_id = run_id
        self.state = start

    async def announce(self, position: PromptPosition, kl: KlCoefficients, updating: Collection[ServiceKind]) -> None:
        """Before the next step's updates: write what will hold once they have committed.

        Args:
            position, kl: after that step.
            updating: gangs that will be told to update.
        Raises: StateError: the file cannot be written.
        """
        gangs = {
            kind: mark.model_copy(update={"step": mark.step + 1}) if kind in updating else mark for kind, mark in self.state.gangs.items()
        }
        # Not waiting for the disk: it is for the seconds until `commit`, should this process alone end.
        await self._write(loop_state(self.state.step + 1, gangs, position, kl), durable=False)

    async def commit(self, steps: Mapping[ServiceKind, int], position: PromptPosition, kl: KlCoefficients) -> None:
        """The next step has been trained.

        Args:
            steps: committed steps of each gang that was told to update.
            position, kl: after that step.
        Raises: StateError: the file cannot be written.
        """
        gangs = {kind: mark.model_copy(update={"step": steps.get(kind, mark.step)}) for kind, mark in self.state.gangs.items()}
        self.state = loop_state(self.state.step + 1, gangs, position, kl)
        await self._write(None, durable=True)

    async def _write(self, following: LoopState | None, *, durable: bool) -> None:
        file = StateFile(run_id=self._run_id, current=self.state, next=following)
        try:
            # In a thread: a slow disk must not hold up leases.
            await asyncio.to_thread(write_json_atomically, self._path, file.model_dump(mode="json"), durable=durable)
        except OSError as error:
            raise StateError(f"cannot write {self._path} ({error.strerror}): make room, or make run.folder writable") from error
