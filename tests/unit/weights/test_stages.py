"""Every allowed and every forbidden move between push stages."""

from __future__ import annotations

from itertools import product

import pytest

from shoal.errors import StateError
from shoal.weights.stages import TRANSITIONS, PushStage, advance

P = PushStage
ALLOWED = {
    (P.PREPARE, P.TRANSFER),
    (P.TRANSFER, P.VERIFY),
    (P.VERIFY, P.COMMIT),
    (P.COMMIT, P.COMMITTED),
    (P.COMMIT, P.FAILED),
    (P.PREPARE, P.ABORT),
    (P.TRANSFER, P.ABORT),
    (P.VERIFY, P.ABORT),
    (P.ABORT, P.ABORTED),
}


@pytest.mark.parametrize(("current", "following"), sorted(ALLOWED))
def test_advance_allows(current: PushStage, following: PushStage) -> None:
    assert advance(current, following) is following


@pytest.mark.parametrize(("current", "following"), [edge for edge in product(PushStage, PushStage) if edge not in ALLOWED])
def test_advance_forbids(current: PushStage, following: PushStage) -> None:
    with pytest.raises(StateError, match=f"from {current} to {following}"):
        advance(current, following)


def test_transitions_name_every_stage_and_end() -> None:
    assert set(TRANSITIONS) == set(PushStage)
    assert {stage for stage in PushStage if stage.is_terminal} == {P.COMMITTED, P.ABORTED, P.FAILED}
