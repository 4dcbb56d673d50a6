"""The life of a route revision and the one table of allowed transitions.

    REGISTERED -> CHECKED -> READY <-> SHADOW
        |            |         |         |
        |            |         +----+----+
        v            v              v
     REJECTED <------+           ACTIVE -> DRAINING -> DRAINED -> RETIRED
                                   ^          |           |
                                   +----------+-----------+   (rollback)

CHECKED: every component was described and passed conformance. READY: it scored the probe set. SHADOW: it scores a share of live groups
beside the active one. Exactly one revision is ACTIVE. DRAINING: no new group, but groups pinned to it are open.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from shoal.errors import StateError


class RouteStage(StrEnum):
    """Where a revision is."""

    REGISTERED = "registered"
    CHECKED = "checked"
    READY = "ready"
    SHADOW = "shadow"
    ACTIVE = "active"
    DRAINING = "draining"
    DRAINED = "drained"
    REJECTED = "rejected"
    RETIRED = "retired"


_S = RouteStage

TRANSITIONS: Mapping[RouteStage, frozenset[RouteStage]] = MappingProxyType(
    {
        _S.REGISTERED: frozenset({_S.CHECKED, _S.REJECTED, _S.RETIRED}),
        _S.CHECKED: frozenset({_S.READY, _S.REJECTED, _S.RETIRED}),
        _S.READY: frozenset({_S.SHADOW, _S.ACTIVE, _S.RETIRED}),
        _S.SHADOW: frozenset({_S.READY, _S.ACTIVE, _S.RETIRED}),
        _S.ACTIVE: frozenset({_S.DRAINING}),
        _S.DRAINING: frozenset({_S.DRAINED, _S.ACTIVE}),
        _S.DRAINED: frozenset({_S.ACTIVE, _S.RETIRED}),
        _S.REJECTED: frozenset({_S.RETIRED}),
        _S.RETIRED: frozenset(),
    }
)


def check_transition(number: int, old: RouteStage, new: RouteStage) -> None:
    """Refuse what the table forbids.

    Raises: StateError: names the revision, both stages and what is allowed.
    """
    if new not in TRANSITIONS[old]:
        allowed = ", ".join(sorted(TRANSITIONS[old])) or "none, it is over"
        raise StateError(f"revision {number} of the reward route cannot go from {old} to {new}; allowed from here: {allowed}")
