"""What the registry knows about a service."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ServiceKind(StrEnum):
    """What a registered service does."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    ACTOR = "actor"
    CRITIC = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """A registered service. address is host:port; policy_version matters for rollout servers only."""

    run_id: str
    service_id: str
    kind: ServiceKind
    address: str
    incarnation: str
    policy_version: int = 0
    process_id: int = 0
