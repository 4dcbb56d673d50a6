"""Which revision of the route scores each group that was issued together."""

from __future__ import annotations

from collections.abc import Iterable

from shoal_coordinator.rewards.route import RouteRevision
from shoal_coordinator.rewards.scored import RoutePin, RouteSource


class GroupPins:
    """One pin per group, taken when it is issued; a context manager that releases what is left, however the groups ended.

    Args:
        routes: where pins come from.
        group_ids: the groups that are issued now.
    """

    def __init__(self, routes: RouteSource, group_ids: Iterable[str]) -> None:
        self._routes = routes
        self._group_ids = tuple(group_ids)
        self._pins: dict[str, RoutePin] = {}

    def __enter__(self) -> GroupPins:
        for group_id in self._group_ids:
            self._pins[group_id] = self._routes.pin()
        return self

    def __exit__(self, *_: object) -> None:
        for group_id in list(self._pins):
            self.release(group_id)

    def revision(self, group_id: str) -> RouteRevision:
        """What scores the group."""
        return self._pins[group_id].revision

    def renew(self, group_id: str) -> None:
        """Pin the group to the active revision instead; only while nobody is scoring it."""
        old, self._pins[group_id] = self._pins[group_id], self._routes.pin()
        old.release()

    def release(self, group_id: str) -> None:
        """The group is done."""
        self._pins.pop(group_id).release()
