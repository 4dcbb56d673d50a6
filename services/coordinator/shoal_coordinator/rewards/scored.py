"""Groups with their scores, and what scoring needs of routes and of those who look on.

Every group is pinned to one revision of the route when it is issued, and all its siblings are scored by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.types import ScoreResult, ScoreSample
from shoal_coordinator.dispatcher import GeneratedGroup
from shoal_coordinator.rewards.route import RouteComponent, RouteRevision


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentResult:
    """What one component of a revision says of one sample; service is the id of the server that answered, "" if none did."""

    component: RouteComponent
    service: str
    result: ScoreResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with one combined result per completion, and what each component of the revision gave it.

    results: reward by completion. components: by completion, one for each component that applies to the row's source.
    samples: what was scored, by completion; for those who look on, and not kept once the group is done.
    """

    group: GeneratedGroup
    revision: int
    results: tuple[ScoreResult, ...]
    components: tuple[tuple[ComponentResult, ...], ...]
    samples: tuple[ScoreSample, ...] = ()


class RoutePin(Protocol):
    """Keeps a revision in use (`shoal_coordinator.rewards.book`)."""

    @property
    def revision(self) -> RouteRevision:
        """What is pinned."""
        ...

    def release(self) -> None:
        """The group has ended, however; releasing twice is harmless."""
        ...


class RouteSource(Protocol):
    """Where groups get their revision (`shoal_coordinator.rewards.book.RouteBook`)."""

    @property
    def active(self) -> RouteRevision:
        """What new groups are scored by."""
        ...

    def pin(self) -> RoutePin:
        """Pin the active revision."""
        ...


class ScoredGroupListener(Protocol):
    """Sees every group that the active route has scored (`shoal_coordinator.rewards.shadow.ShadowRunner`)."""

    def offer(self, scored: ScoredGroup) -> None:
        """Take a group or leave it; never blocks and never raises."""
        ...


class SampleListener(Protocol):
    """Sees live samples (`shoal_coordinator.rewards.probes.ProbeSet`)."""

    def note(self, samples: Sequence[ScoreSample]) -> None:
        """Keep some of them."""
        ...
