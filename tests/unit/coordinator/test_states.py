"""The transition table, edge by edge."""

from __future__ import annotations

import itertools

import pytest
from shoal_coordinator.states import TERMINAL_STATES, TRANSITIONS, RunState, StateMachine

from shoal.errors import StateError

ALL_EDGES = list(itertools.product(RunState, RunState))
ALLOWED = {(source, target) for source, targets in TRANSITIONS.items() for target in targets}


def machine_in(state: RunState) -> StateMachine:
    """A machine that reached state by the shortest allowed path."""
    paths: dict[RunState, list[RunState]] = {RunState.STARTING: []}
    frontier = [RunState.STARTING]
    while frontier:
        source = frontier.pop(0)
        for target in sorted(TRANSITIONS[source]):
            if target not in paths:
                paths[target] = [*paths[source], target]
                frontier.append(target)
    machine = StateMachine()
    for target in paths[state]:
        machine.go(target)
    return machine


@pytest.mark.parametrize(("source", "target"), [edge for edge in ALL_EDGES if edge not in ALLOWED])
def test_state_machine_refuses_a_forbidden_edge(source: RunState, target: RunState) -> None:
    machine = machine_in(source)
    with pytest.raises(StateError, match=f"from {source} to {target}"):
        machine.go(target)
    assert machine.state is source


@pytest.mark.parametrize(("source", "target"), sorted(ALLOWED))
def test_state_machine_takes_an_allowed_edge(source: RunState, target: RunState) -> None:
    machine = machine_in(source)
    machine.go(target)
    assert machine.state is target
    assert machine.is_terminal is (target in TERMINAL_STATES)


def test_every_state_has_a_row_and_can_fail_unless_terminal() -> None:
    assert set(TRANSITIONS) == set(RunState)
    for state, targets in TRANSITIONS.items():
        assert (RunState.FAILED in targets) is (state not in TERMINAL_STATES)


def test_training_cannot_be_skipped_to_a_push() -> None:
    machine = machine_in(RunState.ROLLING_OUT)
    with pytest.raises(StateError, match="allowed from here: failed, paused, stopped, training"):
        machine.go(RunState.PUSHING)


def test_state_machine_tells_listeners_and_the_time() -> None:
    times = iter([1.0, 2.0])
    machine = StateMachine(now_unix_s=lambda: next(times))
    seen: list[tuple[RunState, RunState]] = []
    machine.subscribe(lambda old, new: seen.append((old, new)))
    machine.go(RunState.WAITING_FOR_SERVICES)
    assert seen == [(RunState.STARTING, RunState.WAITING_FOR_SERVICES)]
    assert machine.since_unix_s == 2.0


@pytest.mark.parametrize("state", [RunState.ROLLING_OUT, RunState.EVALUATING])
def test_run_can_pause_in_the_midst_of_what_scores_and_go_on_with_it(state: RunState) -> None:
    machine = machine_in(state)
    machine.go(RunState.PAUSED)
    machine.go(state)
    assert machine.state is state


@pytest.mark.parametrize("state", [RunState.STARTING, RunState.FINISHING])
def test_run_pauses_neither_before_it_has_services_nor_while_it_exports(state: RunState) -> None:
    assert RunState.PAUSED not in TRANSITIONS[state]
