"""Every allowed and every forbidden edge of a route revision's life."""

from __future__ import annotations

import itertools

import pytest
from shoal_coordinator.rewards.route_stages import TRANSITIONS, RouteStage, check_transition

from shoal.errors import StateError

S = RouteStage
ALLOWED = {
    (S.REGISTERED, S.CHECKED),
    (S.REGISTERED, S.REJECTED),
    (S.REGISTERED, S.RETIRED),
    (S.CHECKED, S.READY),
    (S.CHECKED, S.REJECTED),
    (S.CHECKED, S.RETIRED),
    (S.READY, S.SHADOW),
    (S.READY, S.ACTIVE),
    (S.READY, S.RETIRED),
    (S.SHADOW, S.READY),
    (S.SHADOW, S.ACTIVE),
    (S.SHADOW, S.RETIRED),
    (S.ACTIVE, S.DRAINING),
    (S.DRAINING, S.DRAINED),
    (S.DRAINING, S.ACTIVE),
    (S.DRAINED, S.ACTIVE),
    (S.DRAINED, S.RETIRED),
    (S.REJECTED, S.RETIRED),
}


def test_every_stage_has_a_row() -> None:
    assert set(TRANSITIONS) == set(RouteStage)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RouteStage, RouteStage)))
def test_transition_is_allowed_only_by_the_table(old: RouteStage, new: RouteStage) -> None:
    if (old, new) in ALLOWED:
        check_transition(7, old, new)
        return
    with pytest.raises(StateError, match=rf"revision 7 of the reward route cannot go from {old} to {new}"):
        check_transition(7, old, new)
