"""Reward routes in memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from shoal_coordinator.alerts import RunAlert, StoppedWhilePausedError
from shoal_coordinator.rewards.route import RouteComponent, RouteRevision, components_of_config
from shoal_coordinator.rewards.scored import RouteSource

from shoal.config.models import RewardSection

FAKE_VERSION = "3"
"""Of every scorer of FakeReward."""


def component(scorer: str = "sum", **settings: object) -> RouteComponent:
    """A component of the version that FakeReward offers."""
    return RouteComponent(scorer=scorer, **{"version": FAKE_VERSION, **settings})  # type: ignore[arg-type]


def revision(*components: RouteComponent, number: int = 1) -> RouteRevision:
    """A revision of these components; of `sum` alone without any."""
    return RouteRevision(number=number, label=f"r{number}", components=components or (component(),))


def revision_of(section: RewardSection) -> RouteRevision:
    """What a configuration asks for, as pinned when the run starts."""
    pinned = [
        component(each.scorer, version=each.version or FAKE_VERSION, parts=each.parts, timeout_s=each.timeout_s, sources=each.sources)
        for each in components_of_config(section)
    ]
    return revision(*pinned)


class CountedRoutes(RouteSource, Protocol):
    """A route that says how many pins are open."""

    @property
    def num_open(self) -> int:
        """Pins that were not released."""
        ...


@dataclass
class FakePin:
    """Counts how often it is released."""

    revision: RouteRevision
    routes: FakeRoutes = field(repr=False, compare=False)
    num_releases: int = 0

    def release(self) -> None:
        """See the class."""
        self.num_releases += 1
        self.routes.open_pins[self.revision.number] -= 1


@dataclass
class FakeRoutes:
    """A route whose active revision tests change; open_pins by revision."""

    active: RouteRevision = field(default_factory=revision)
    open_pins: Counter[int] = field(default_factory=Counter)
    pins: list[FakePin] = field(default_factory=list)

    def pin(self) -> FakePin:
        """Pin what is active."""
        self.open_pins[self.active.number] += 1
        self.pins.append(FakePin(self.active, self))
        return self.pins[-1]

    @property
    def num_open(self) -> int:
        """Pins that were not released."""
        return sum(self.open_pins.values())


@dataclass
class FakeAttention:
    """Whoever pauses meets repairs: each alert is answered by the next of them; without any the run is stopped."""

    repairs: list[object] = field(default_factory=list)
    alerts: list[RunAlert] = field(default_factory=list)

    async def wait_for_resume(self, alert: RunAlert) -> None:
        """See the class."""
        self.alerts.append(alert)
        if not self.repairs:
            raise StoppedWhilePausedError(f"stopped: {alert.what}: {alert.error}")
        repair = self.repairs.pop(0)
        assert callable(repair)
        repair()
