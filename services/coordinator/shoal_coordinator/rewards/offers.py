"""Which server's scorer a component means: its version, and its code.

Two servers share the work of a scorer only if name, version and fingerprint are equal. A name@version that an open revision has pinned
keeps its code for as long as that revision is open: a server with other code under the same version gets no work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from shoal.errors import ShoalError
from shoal.reward import version_key
from shoal.types import ScorerDescription
from shoal_coordinator.members import RewardMember
from shoal_coordinator.rewards.route import RouteComponent
from shoal_coordinator.rewards.route_record import RouteRecord
from shoal_coordinator.rewards.route_stages import RouteStage

UNPINNED = frozenset({RouteStage.REGISTERED, RouteStage.REJECTED, RouteStage.RETIRED})

Pins: TypeAlias = Mapping[tuple[str, str], str]
"""(name, version) -> fingerprint."""


class NoOfferError(ShoalError):
    """No server offers the scorer that a component asks for; more servers may change that."""

    def __init__(self, message: str, scorer: str) -> None:
        super().__init__(message)
        self.scorer = scorer


class OtherCodeError(ShoalError):
    """A server offers other code under the same version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One scorer of one server that takes traffic."""

    member: RewardMember
    scorer: ScorerDescription

    @property
    def key(self) -> tuple[str, str]:
        """Name and version."""
        return self.scorer.name, self.scorer.version


def offers_of(members: Iterable[RewardMember]) -> list[Offer]:
    """What servers that take traffic offer."""
    return [Offer(member=member, scorer=scorer) for member in members if not member.suspect for scorer in member.scorers]


def pins_of(records: Iterable[RouteRecord]) -> dict[tuple[str, str], str]:
    """What open revisions have pinned."""
    return {
        (component.scorer, component.version): component.fingerprint
        for record in records
        if record.stage not in UNPINNED
        for component in record.revision.components
    }


def pin(components: Sequence[RouteComponent], offers: Sequence[Offer], pins: Pins) -> tuple[RouteComponent, ...]:
    """Components with versions and fingerprints.

    Raises: NoOfferError: lists what there is. OtherCodeError: says who offers which code.
    """
    return tuple(_pin_one(component, offers, pins) for component in components)


def servers_of(component: RouteComponent, offers: Iterable[Offer]) -> list[RewardMember]:
    """The servers that may score a pinned component."""
    return [offer.member for offer in offers if offer.key == _key(component) and offer.scorer.fingerprint == component.fingerprint]


def other_code(offers: Iterable[Offer], pins: Pins) -> list[Offer]:
    """Offers of other code than the one that is pinned for the version."""
    return [offer for offer in offers if pins.get(offer.key, offer.scorer.fingerprint) != offer.scorer.fingerprint]


def missing_servers(components: Iterable[RouteComponent], offers: Sequence[Offer]) -> list[str]:
    """Pinned components that nobody can score now, for messages."""
    return [_name(component) for component in components if not servers_of(component, offers)]


def what_there_is(offers: Iterable[Offer]) -> str:
    """The scorers and who offers them, for messages."""
    servers: dict[tuple[str, str], set[str]] = {}
    for offer in offers:
        servers.setdefault(offer.key, set()).add(offer.member.info.service_id)
    return ", ".join(f"{name} {version} ({', '.join(sorted(ids))})" for (name, version), ids in sorted(servers.items())) or "none at all"


def _pin_one(component: RouteComponent, offers: Sequence[Offer], pins: Pins) -> RouteComponent:
    found = [offer for offer in offers if offer.scorer.name == component.scorer and component.version in ("", offer.scorer.version)]
    if not found:
        wanted = f"{component.scorer!r} version {component.version!r}" if component.version else repr(component.scorer)
        raise NoOfferError(f"no reward server offers scorer {wanted}; there is: {what_there_is(offers)}", component.scorer)
    newest = max((offer.scorer.version for offer in found), key=version_key)
    codes: dict[str, list[str]] = {}
    for offer in found:
        if offer.scorer.version == newest:
            codes.setdefault(offer.scorer.fingerprint, []).append(offer.member.info.service_id)
    pinned = pins.get((component.scorer, newest))
    if pinned is None and len(codes) == 1:
        return replace(component, version=newest, fingerprint=next(iter(codes)))
    if pinned is not None and pinned in codes:
        return replace(component, version=newest, fingerprint=pinned)
    raise OtherCodeError(_other_code_text(f"{component.scorer}@{newest}", codes, pinned))


def _other_code_text(name: str, codes: Mapping[str, Sequence[str]], pinned: str | None) -> str:
    offered = "; ".join(f"{', '.join(servers)}: {code or 'unknown'}" for code, servers in sorted(codes.items()))
    if pinned is None:
        return f"servers offer other code under the same version of {name} ({offered}): give the changed one another version"
    return (
        f"the servers of {name} run other code than the revisions that are open ({offered}; they have {pinned or 'unknown'}): "
        "give the changed one another version, or retire those revisions first"
    )


def _key(component: RouteComponent) -> tuple[str, str]:
    return component.scorer, component.version


def _name(component: RouteComponent) -> str:
    code = f" with code {component.fingerprint}" if component.fingerprint else ""
    return f"{component.scorer}@{component.version}{code}"
