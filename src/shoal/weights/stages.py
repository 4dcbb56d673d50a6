"""Stages of a weight push and the only moves between them.

    PREPARE ─► TRANSFER ─► VERIFY ─► COMMIT ─► COMMITTED
       │          │          │          └────► FAILED
       └──────────┴──────────┴─► ABORT ──────► ABORTED

Until COMMIT every server keeps the complete old version, so a fault leads to ABORT. From COMMIT on a server may hold the new one:
there is no way back, and the push is COMMITTED if at least one server confirmed it.
"""

from __future__ import annotations

from enum import StrEnum

from shoal.errors import StateError


class PushStage(StrEnum):
    """Where a push is."""

    PREPARE = "prepare"
    TRANSFER = "transfer"
    VERIFY = "verify"
    COMMIT = "commit"
    ABORT = "abort"
    COMMITTED = "committed"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        """Whether the push is over."""
        return not TRANSITIONS[self]


TRANSITIONS: dict[PushStage, frozenset[PushStage]] = {
    PushStage.PREPARE: frozenset({PushStage.TRANSFER, PushStage.ABORT}),
    PushStage.TRANSFER: frozenset({PushStage.VERIFY, PushStage.ABORT}),
    PushStage.VERIFY: frozenset({PushStage.COMMIT, PushStage.ABORT}),
    PushStage.COMMIT: frozenset({PushStage.COMMITTED, PushStage.FAILED}),
    PushStage.ABORT: frozenset({PushStage.ABORTED}),
    PushStage.COMMITTED: frozenset(),
    PushStage.ABORTED: frozenset(),
    PushStage.FAILED: frozenset(),
}


def advance(current: PushStage, following: PushStage) -> PushStage:
    """Move a push on.

    Raises: StateError: the table has no such move; names both stages.
    """
    if following not in TRANSITIONS[current]:
        allowed = ", ".join(sorted(TRANSITIONS[current])) or "none, it is over"
        msg = f"a push cannot go from {current} to {following}; allowed: {allowed}"
        raise StateError(msg)
    return following
