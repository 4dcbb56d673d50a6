"""The reward routes of a run, over the coordinator's REST API."""

from __future__ import annotations

import getpass
import os
from dataclasses import dataclass
from typing import Any

from shoal.cli.api import CoordinatorApi

Route = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Who asks for a change, and why; both stand in the audit log."""

    who: str
    why: str

    @property
    def fields(self) -> dict[str, str]:
        """As fields of a request."""
        return {"who": self.who, "why": self.why}


def login_name() -> str:
    """The user's login name; the number of the user where there is no name for it."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"uid {os.getuid()}"


class RewardRoutes:
    """Reads and changes the reward routes of one run."""

    def __init__(self, api: CoordinatorApi) -> None:
        self._api = api

    def all(self) -> dict[str, Any]:
        """The active revision's number, all revisions, and the reward servers."""
        return self._api.get("/v1/rewards")

    def add(self, body: dict[str, Any], signature: Signature) -> Route:
        """Add a revision."""
        return self._api.post("/v1/rewards/routes", {**body, **signature.fields})

    def shadow(self, number: int, share: float, signature: Signature) -> Route:
        """Let a revision score a share of the live groups beside the active one; 0 ends it."""
        return self._api.post(f"/v1/rewards/routes/{number}/shadow", {"share": share, **signature.fields})

    def activate(self, number: int, gates: dict[str, Any] | None, when_gates_pass: bool, signature: Signature) -> Route:
        """Make a revision the active one: now if its gates pass, or as soon as they do."""
        body = {"gates": gates, "when_gates_pass": when_gates_pass, **signature.fields}
        return self._api.post(f"/v1/rewards/routes/{number}/activate", body)

    def rollback(self, signature: Signature) -> Route:
        """Make the revision active again that was so before; returns it."""
        return self._api.post("/v1/rewards/rollback", dict(signature.fields))

    def retire(self, number: int, signature: Signature) -> Route:
        """End a revision that is not in use."""
        return self._api.post(f"/v1/rewards/routes/{number}/retire", dict(signature.fields))

    def comparison(self, number: int) -> dict[str, Any]:
        """How a shadow compares with the active revision."""
        return self._api.get(f"/v1/rewards/routes/{number}/comparison")

    def log(self, limit: int) -> dict[str, Any]:
        """The last entries of the audit log."""
        return self._api.get(f"/v1/rewards/log?limit={limit}")

    def slow(self) -> dict[str, Any]:
        """The samples that took longest."""
        return self._api.get("/v1/rewards/slow")
