"""Stages of a weight push at one rollout server.

    IDLE ─► PREPARED ─► PLANNED ─► VERIFIED ◄─► COMMITTING ─► COMMITTED ─► PREPARED (next push)
              │  ▲         │          │             │
              └──┴─────────┴──────────┴─► IDLE      └─► FAILED (the server ends)

IDLE, PREPARED, PLANNED, VERIFIED: the old version is served. COMMITTED: the new one is. FAILED: unknown, nothing is served.
COMMITTING goes back to VERIFIED when running requests did not end in time; then the old version is served on.
"""

from __future__ import annotations

from enum import StrEnum

from shoal.errors import StateError


class SinkState(StrEnum):
    """Where the current push is."""

    IDLE = "idle"
    PREPARED = "prepared"
    PLANNED = "planned"
    VERIFIED = "verified"
    COMMITTING = "committing"
    COMMITTED = "committed"
    FAILED = "failed"


TRANSITIONS: dict[SinkState, frozenset[SinkState]] = {
    SinkState.IDLE: frozenset({SinkState.PREPARED}),
    SinkState.PREPARED: frozenset({SinkState.PREPARED, SinkState.PLANNED, SinkState.IDLE}),
    SinkState.PLANNED: frozenset({SinkState.PREPARED, SinkState.VERIFIED, SinkState.IDLE}),
    SinkState.VERIFIED: frozenset({SinkState.PREPARED, SinkState.COMMITTING, SinkState.IDLE}),
    SinkState.COMMITTING: frozenset({SinkState.VERIFIED, SinkState.COMMITTED, SinkState.FAILED}),
    SinkState.COMMITTED: frozenset({SinkState.PREPARED}),
    SinkState.FAILED: frozenset(),
}
DROPPABLE = frozenset({SinkState.PREPARED, SinkState.PLANNED, SinkState.VERIFIED})
"""In these states a push can be given up: nothing of it is served."""


def advance(current: SinkState, following: SinkState) -> SinkState:
    """Move on.

    Raises: StateError: the table has no such move; names both.
    """
    if following not in TRANSITIONS[current]:
        allowed = ", ".join(sorted(TRANSITIONS[current])) or "none, the server must be replaced"
        raise StateError(f"a weight push at {current} cannot go to {following}; allowed: {allowed}")
    return following
