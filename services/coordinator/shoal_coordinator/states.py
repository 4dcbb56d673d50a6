"""The run's states and the one table of allowed transitions.

    STARTING -> WAITING_FOR_SERVICES -> EVALUATING -> ROLLING_OUT -> TRAINING -> PUSHING -+-> FINISHING -> FINISHED | STOPPED
                        ^                    ^             ^                              |
                        +--------------------+-------------+--- PAUSED <------------------+

EVALUATING is left out without held-out rows, PUSHING in steps that train the critic alone; WAITING_FOR_SERVICES comes back whenever a
service is missing at a step border. EVALUATING and ROLLING_OUT pause, and come back, when too many samples have no score; stopped then,
the run goes to FINISHING without ending what it was doing. FAILED can be reached from every state that is not final.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType

from shoal.errors import StateError


class RunState(StrEnum):
    """What the run is doing."""

    STARTING = "starting"
    WAITING_FOR_SERVICES = "waiting_for_services"
    EVALUATING = "evaluating"
    ROLLING_OUT = "rolling_out"
    TRAINING = "training"
    PUSHING = "pushing"
    PAUSED = "paused"
    FINISHING = "finishing"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


_S = RunState
TERMINAL_STATES = frozenset({_S.FINISHED, _S.STOPPED, _S.FAILED})
_STEP_BORDER = frozenset({_S.WAITING_FOR_SERVICES, _S.EVALUATING, _S.ROLLING_OUT, _S.PAUSED, _S.FINISHING, _S.STOPPED, _S.FAILED})

TRANSITIONS: Mapping[RunState, frozenset[RunState]] = MappingProxyType(
    {
        _S.STARTING: frozenset({_S.WAITING_FOR_SERVICES, _S.STOPPED, _S.FAILED}),
        _S.WAITING_FOR_SERVICES: _STEP_BORDER - {_S.WAITING_FOR_SERVICES},
        _S.EVALUATING: _STEP_BORDER - {_S.EVALUATING},
        _S.ROLLING_OUT: frozenset({_S.TRAINING, _S.PAUSED, _S.STOPPED, _S.FAILED}),
        _S.TRAINING: _STEP_BORDER | {_S.PUSHING},
        _S.PUSHING: _STEP_BORDER,
        _S.PAUSED: _STEP_BORDER - {_S.PAUSED},
        _S.FINISHING: TERMINAL_STATES,
        _S.FINISHED: frozenset(),
        _S.STOPPED: frozenset(),
        _S.FAILED: frozenset(),
    }
)


class StateMachine:
    """Holds the current state; the only place that changes it.

    Not thread-safe: used from the event loop alone.
    """

    def __init__(self, now_unix_s: Callable[[], float] = time.time) -> None:
        self._now_unix_s = now_unix_s
        self._state = RunState.STARTING
        self._since_unix_s = now_unix_s()
        self._listeners: list[Callable[[RunState, RunState], None]] = []

    @property
    def state(self) -> RunState:
        """The current state."""
        return self._state

    @property
    def since_unix_s(self) -> float:
        """When the current state was entered."""
        return self._since_unix_s

    @property
    def is_terminal(self) -> bool:
        """Whether no further transition is possible."""
        return self._state in TERMINAL_STATES

    def subscribe(self, listener: Callable[[RunState, RunState], None]) -> None:
        """Call listener(old, new) after every transition."""
        self._listeners.append(listener)

    def go(self, target: RunState) -> None:
        """Enter target.

        Raises: StateError: the table forbids it.
        """
        if target not in TRANSITIONS[self._state]:
            allowed = ", ".join(sorted(TRANSITIONS[self._state])) or "none, the run is over"
            raise StateError(f"the run cannot go from {self._state} to {target}; allowed from here: {allowed}")
        old, self._state = self._state, target
        self._since_unix_s = self._now_unix_s()
        for listener in self._listeners:
            listener(old, target)
