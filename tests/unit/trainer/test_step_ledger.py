"""The transition table of a training step and the answers that it keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shoal_trainer.step_ledger import TRANSITIONS, StepLedger, StepStage

from shoal.errors import StateError
from shoal.types import Batch, TrainerRole
from tests.helpers.trainer_bench import RUN_ID, even_split, make_batch, ragged_records

PATHS: dict[StepStage, list[StepStage]] = {
    StepStage.IDLE: [],
    StepStage.FORWARDED: [StepStage.FORWARDED],
    StepStage.ADVANTAGES: [StepStage.FORWARDED, StepStage.ADVANTAGES],
    StepStage.UPDATED: [StepStage.FORWARDED, StepStage.ADVANTAGES, StepStage.UPDATED],
}


def batch_of(step: int) -> Batch:
    return make_batch(ragged_records(2), even_split(2, 1, 1), step)


def ledger_at(stage: StepStage, role: TrainerRole = TrainerRole.ACTOR) -> StepLedger[str]:
    ledger: StepLedger[str] = StepLedger(role)
    for target in PATHS[stage]:
        if target is StepStage.FORWARDED:
            ledger.begin(batch_of(3), "forward")
        elif target in TRANSITIONS[role][ledger.stage]:
            ledger.advance(target, target.value)
    return ledger


@pytest.mark.parametrize("stage", list(StepStage))
@pytest.mark.parametrize("target", [StepStage.ADVANTAGES, StepStage.UPDATED])
def test_step_ledger_allows_exactly_the_edges_of_its_table(stage: StepStage, target: StepStage) -> None:
    ledger = ledger_at(stage)
    done = target in PATHS[stage]
    if done:
        assert ledger.recall(target, 3) == target.value
    elif target in TRANSITIONS[TrainerRole.ACTOR][stage]:
        assert ledger.recall(target, 3) is None
    else:
        with pytest.raises(StateError, match=target.value):
            ledger.recall(target, 3)


def test_step_ledger_of_a_critic_updates_without_advantages() -> None:
    ledger = ledger_at(StepStage.FORWARDED, TrainerRole.CRITIC)
    assert ledger.recall(StepStage.UPDATED, 3) is None
    with pytest.raises(StateError):
        ledger.recall(StepStage.ADVANTAGES, 3)


@pytest.mark.parametrize("step", [2, 4])
def test_step_ledger_refuses_commands_of_another_step(step: int) -> None:
    with pytest.raises(StateError, match="step"):
        ledger_at(StepStage.ADVANTAGES).recall(StepStage.UPDATED, step)


def test_step_ledger_answers_a_repeated_forward_and_refuses_an_older_one() -> None:
    ledger = ledger_at(StepStage.FORWARDED)
    assert ledger.recall_forward(batch_of(3)) == "forward"
    assert ledger.recall_forward(batch_of(4)) is None
    with pytest.raises(StateError, match="too late"):
        ledger.recall_forward(batch_of(2))


def test_step_ledger_runs_another_batch_of_an_unfinished_step_but_not_of_a_finished_one() -> None:
    other = Batch(run_id=RUN_ID, step=3, ranks=((),))
    assert ledger_at(StepStage.ADVANTAGES).recall_forward(other) is None
    assert ledger_at(StepStage.UPDATED).recall_forward(other) == "forward"


def test_step_ledger_tells_a_repeated_batch_from_one_of_equal_records_that_was_put_together_again() -> None:
    again = replace(batch_of(3), batch_id="of a coordinator that was started again")
    for stage in (StepStage.FORWARDED, StepStage.ADVANTAGES):
        assert ledger_at(stage).recall_forward(again) is None
    assert ledger_at(StepStage.UPDATED).recall_forward(again) == "forward"


def test_step_ledger_that_dropped_an_unfinished_step_allows_only_a_forward() -> None:
    ledger = ledger_at(StepStage.ADVANTAGES)
    ledger.drop()
    with pytest.raises(StateError):
        ledger.recall(StepStage.UPDATED, 3)
    assert ledger.recall_forward(batch_of(3)) is None


def test_step_ledger_keeps_a_finished_step_until_the_next_forward_has_run() -> None:
    ledger = ledger_at(StepStage.UPDATED)
    ledger.drop()
    assert ledger.recall(StepStage.UPDATED, 3) == StepStage.UPDATED.value
