"""Samples without a score: how many there may be, and what a human is told when there are more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.types import ScoreStatus
from shoal_coordinator.alerts import RunAlert
from shoal_coordinator.rewards.combine import name_of
from shoal_coordinator.rewards.scored import ComponentResult, ScoredGroup


def num_unscored(groups: Iterable[ScoredGroup]) -> int:
    """Samples whose combined result is no score."""
    return sum(result.status is not ScoreStatus.SCORED for group in groups for result in group.results)


def is_whole(group: ScoredGroup) -> bool:
    """Whether every sample has a score."""
    return num_unscored([group]) == 0


def unscored_alert(groups: Sequence[ScoredGroup], what: str) -> RunAlert:
    """Name whose fault it is that samples have no score, by the first of them.

    Args:
        groups: at least one sample of them has none.
        what: what the run was doing, and the limit that was passed.
    """
    group, place = next(
        (group, place) for group in groups for place, result in enumerate(group.results) if result.status is not ScoreStatus.SCORED
    )
    return RunAlert(what=what, service=_culprits(groups), error=group.results[place].message)


def _culprits(groups: Iterable[ScoredGroup]) -> str:
    """The scorers, each with its servers, that left required scores out."""
    found: dict[str, set[str]] = {}
    for group in groups:
        for own in group.components:
            for result in own:
                if _is_to_blame(result):
                    found.setdefault(name_of(result), set()).add(result.service)
    return "; ".join(f"{scorer} on {', '.join(sorted(filter(None, services))) or 'no server'}" for scorer, services in found.items())


def _is_to_blame(result: ComponentResult) -> bool:
    return result.component.is_required and result.result.status is not ScoreStatus.SCORED
