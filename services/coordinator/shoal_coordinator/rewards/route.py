"""What a reward is made of: a route revision, which never changes once it exists.

A group is pinned to one revision when it is issued. The reward of a response is the weighted sum over the revision's components that
apply to the source of its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.config.models import RewardSection


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteComponent:
    """One scorer's part of a reward.

    scorer, version: who scores; an empty version is the newest, and is pinned when the route is checked.
    fingerprint: of the scorer's code, pinned when the route is checked; a server whose scorer has another one gets no work of this route.
    weight: factor of what the scorer gives. parts: part of a scorer that gives several -> factor; empty takes the scorer's own total.
    timeout_s: deadline of scoring one group, retries and waiting for a server included.
    is_required: without its score a sample is not scored; an optional one is left out for the whole group if a sibling lacks it.
    sources: rows that it scores, by data.source_key; empty is all.
    """

    scorer: str
    version: str = ""
    fingerprint: str = ""
    weight: float = 1.0
    parts: Mapping[str, float] = field(default_factory=dict)
    timeout_s: float = 30.0
    is_required: bool = True
    sources: tuple[str, ...] = ()

    def applies_to(self, source: str) -> bool:
        """Whether it scores rows of a source; "" is a row without one."""
        return not self.sources or source in self.sources


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRevision:
    """An immutable list of components; number counts from 1 in a run, label is a human's name for it."""

    number: int
    label: str
    components: tuple[RouteComponent, ...]

    def components_for(self, source: str) -> tuple[RouteComponent, ...]:
        """The components that score rows of a source."""
        return tuple(component for component in self.components if component.applies_to(source))


def components_of_config(config: RewardSection) -> tuple[RouteComponent, ...]:
    """The components that the section `reward` asks for: one scorer for all rows, or one for the rows of each source."""
    sources: dict[str, list[str]] = {}
    for source, scorer in config.sources.items():
        sources.setdefault(scorer, []).append(source)
    return tuple(
        RouteComponent(
            scorer=scorer,
            version=version,
            parts=config.weights,
            timeout_s=config.timeout_s,
            sources=tuple(sorted(sources.get(scorer, ()))),
        )
        for scorer, version in config.scorers.items()
    )
