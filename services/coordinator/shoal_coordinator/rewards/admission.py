"""What a new revision has to show before it may score: servers that offer its scorers, that behave, and that score a probe set."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from shoal.conformance import ConformanceReport, Endpoint
from shoal.errors import ShoalError
from shoal.types import ScoreResult, ScoreSample, ScoreStatus
from shoal_coordinator.members import RewardMember
from shoal_coordinator.rewards.offers import (
    NoOfferError,
    Offer,
    OtherCodeError,
    Pins,
    missing_servers,
    pin,
    servers_of,
    what_there_is,
)
from shoal_coordinator.rewards.route import RouteComponent

CHECK_SAMPLES = 16
WARM_UP_SAMPLES = 32
CHECK_BATCH = 64
"""Samples of the largest batch of the checks: they share the server with a run, and a judge's answers cost money."""
LOOK_AGAIN_S = 1.0
OTHER_CODE_PATIENCE_S = 5.0
"""A server with the right code may be on its way back."""


class RejectedError(ShoalError):
    """A revision did not pass; the message is shown to whoever added it."""


class RewardServers(Protocol):
    """The reward servers there are now (`shoal_coordinator.fleet.Fleet`)."""

    def rewards(self) -> Sequence[RewardMember]:
        """All of them, suspects included."""
        ...

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when a server has come, gone or changed, or after timeout_s."""
        ...


class ProbeSamples(Protocol):
    """What new scorers are tried on (`shoal_coordinator.rewards.probes.ProbeSet`)."""

    def samples(self, limit: int, *, sources: Collection[str] = ()) -> list[ScoreSample]:
        """At most so many samples of rows of these sources; of all if empty."""
        ...


class WarmUpCalls(Protocol):
    """How samples reach servers (`shoal_coordinator.rewards.calls.ScorerCalls`)."""

    async def score(self, component: RouteComponent, samples: Sequence[ScoreSample], num_groups: int) -> tuple[str, list[ScoreResult]]:
        """Score samples within the component's deadline; a failing service gives error results."""
        ...


class ServiceCheck(Protocol):
    """The conformance checks of one server (`shoal.conformance.check_service`)."""

    async def __call__(
        self, endpoint: Endpoint, *, wanted: Sequence[tuple[str, str]], samples: Sequence[ScoreSample], timeout_s: float, large_batch: int
    ) -> ConformanceReport:
        """Check the wanted scorers of a server."""
        ...


class Admission:
    """Takes revisions through their checks.

    Args:
        offers: what servers that take traffic offer now.
        wait_s: how long a revision waits for servers that offer its scorers, in seconds.
        max_unscored_share: above this share of errors on the probe set a revision is rejected.
    """

    def __init__(
        self,
        servers: RewardServers,
        offers: Callable[[], list[Offer]],
        check: ServiceCheck,
        *,
        wait_s: float,
        max_unscored_share: float,
    ) -> None:
        self._servers = servers
        self._offers = offers
        self._check = check
        self._wait_s = wait_s
        self._max_unscored_share = max_unscored_share

    async def pinned(
        self, components: Sequence[RouteComponent], pins: Callable[[], Pins], *, patience_s: float | None = None
    ) -> tuple[RouteComponent, ...]:
        """Wait for servers that offer all scorers, and pin versions and fingerprints.

        Args:
            patience_s: give up so long after the last server has come, if there is one; None waits on.
        Raises: NoOfferError: somebody is missing. OtherCodeError: servers do not agree on the code.
        """
        deadline_s = time.monotonic() + self._wait_s
        seen: list[str] = []
        changed_s = time.monotonic()
        while True:
            offers = self._offers()
            if seen != (seen := sorted(f"{offer.member.info.service_id} {offer.key}" for offer in offers)):
                changed_s = time.monotonic()
            try:
                return pin(components, offers, pins())
            except OtherCodeError:
                give_up_s = min(deadline_s, changed_s + OTHER_CODE_PATIENCE_S)
                if time.monotonic() >= give_up_s:
                    raise
            except NoOfferError:
                give_up_s = min(deadline_s, changed_s + patience_s) if seen and patience_s is not None else deadline_s
                if time.monotonic() >= give_up_s:
                    raise
            await self._servers.wait_for_change(min(LOOK_AGAIN_S, max(0.0, give_up_s - time.monotonic())))

    async def check(self, components: Sequence[RouteComponent], probes: ProbeSamples) -> str:
        """Check every server of pinned components; returns a sentence for the log.

        Raises: RejectedError: names the server, the scorer, what is wrong and what to do.
        """
        wanted: dict[str, tuple[RewardMember, list[RouteComponent]]] = {}
        offers = self._offers()
        for component in components:
            for member in servers_of(component, offers):
                wanted.setdefault(member.info.service_id, (member, []))[1].append(component)
        for member, own in wanted.values():
            await self._check_server(member, own, probes)
        return f"passed by {', '.join(sorted(wanted))}"

    async def warm_up(self, components: Sequence[RouteComponent], probes: ProbeSamples, calls: WarmUpCalls) -> str:
        """Score the probe set by every component; returns a sentence for the log.

        Raises: RejectedError: too many errors; has the first one.
        """
        await self._wait_for_servers(components)
        num_scored = 0
        for component in components:
            samples = _distinct(probes.samples(WARM_UP_SAMPLES, sources=component.sources))
            if samples:
                server, results = await calls.score(component, samples, 1)
                self._refuse_errors(component, server, results)
                num_scored += sum(result.status is ScoreStatus.SCORED for result in results)
        return f"{num_scored} scores of the probe set"

    async def _check_server(self, member: RewardMember, components: Sequence[RouteComponent], probes: ProbeSamples) -> None:
        sources = {source for component in components for source in component.sources}
        of_all = any(not component.sources for component in components)
        report = await self._check(
            member.client,
            wanted=sorted({(component.scorer, component.version) for component in components}),
            samples=probes.samples(CHECK_SAMPLES, sources=() if of_all else sources),
            timeout_s=max(component.timeout_s for component in components),
            large_batch=CHECK_BATCH,
        )
        if not report.passed:
            first = report.failures[0]
            what = f"{first.scorer or 'the server'} failed the check {first.name!r}: {first.detail}"
            more = (
                f" ({len(report.failures) - 1} more; shoal reward check {member.info.address} lists all)"
                if len(report.failures) > 1
                else ""
            )
            raise RejectedError(f"server {member.info.service_id}: {what}; {first.fix}{more}")

    async def _wait_for_servers(self, components: Sequence[RouteComponent]) -> None:
        deadline_s = time.monotonic() + self._wait_s
        while missing := missing_servers(components, self._offers()):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                there_is = what_there_is(self._offers())
                raise RejectedError(f"no server offered {', '.join(missing)} for {self._wait_s:g} s; there is: {there_is}")
            await self._servers.wait_for_change(min(LOOK_AGAIN_S, left_s))

    def _refuse_errors(self, component: RouteComponent, server: str, results: Sequence[ScoreResult]) -> None:
        errors = [result.message for result in results if result.status is ScoreStatus.ERROR]
        if len(errors) > self._max_unscored_share * len(results):
            raise RejectedError(
                f"{component.scorer}@{component.version} ({server or 'no server answered'}) could not score {len(errors)} of "
                f"{len(results)} samples of the probe set, the first for: {errors[0]}"
            )


def _distinct(samples: Sequence[ScoreSample]) -> list[ScoreSample]:
    """Under ids of their own: a made sample and a live one may be of the same row."""
    return [replace(sample, sample_id=f"probe-{index}/{sample.sample_id}") for index, sample in enumerate(samples)]
