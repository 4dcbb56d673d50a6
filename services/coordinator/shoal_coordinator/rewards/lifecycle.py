"""Drives the reward route: opens it at the start of a run, takes new revisions through their checks, watches gates, and drains.

At the start: the log decides what is active. A log without an active revision gets one from the configuration as soon as servers offer
its scorers. A coordinator that starts again goes on in every stage: what was being checked is checked again from that stage on, what
shadowed shadows on, gates stay armed, and what drained without groups (none outlives the coordinator) is drained.

Used from the event loop alone; `run` must be running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from shoal.config.models import RunConfig
from shoal.errors import ConfigError, InvalidRequestError, NotFoundError, ShoalError, StateError, UnavailableError
from shoal.rpc.channel import split_address
from shoal.telemetry.logs import get_logger
from shoal.telemetry.metrics import gauge
from shoal_coordinator.rewards.admission import Admission, ProbeSamples, RejectedError, RewardServers, ServiceCheck, WarmUpCalls
from shoal_coordinator.rewards.audit_log import COORDINATOR, LogEntry
from shoal_coordinator.rewards.book import MAX_WHY_CHARS, OVER, RouteBook
from shoal_coordinator.rewards.comparison import Comparison
from shoal_coordinator.rewards.gates import Gates, gate_problems
from shoal_coordinator.rewards.offers import (
    NoOfferError,
    Offer,
    OtherCodeError,
    missing_servers,
    offers_of,
    other_code,
    pins_of,
    what_there_is,
)
from shoal_coordinator.rewards.route import RouteComponent, RouteRevision, components_of_config
from shoal_coordinator.rewards.route_record import RouteRecord
from shoal_coordinator.rewards.route_stages import RouteStage
from shoal_coordinator.rewards.static_servers import StaticServers
from shoal_coordinator.waiting import WaitBoard

log = get_logger(__name__)

LOOK_AGAIN_S = 1.0
"""How often gates are looked at, and other code is looked for."""
PATIENCE_S = 30.0
"""At the start: how long after the last reward server has come a scorer that nobody offers is waited for."""
MAX_CHECKS = 2
CONFIGURATION = "configuration"
_REVISION = gauge("coordinator", "route", "revision", "Revision of the reward route that scores new groups.")


class Shadowing(Protocol):
    """The comparisons (`shoal_coordinator.rewards.shadow.ShadowRunner`)."""

    def comparison(self, number: int) -> Comparison:
        """How a revision compares with the active one."""
        ...

    def forget(self, number: int) -> None:
        """Drop a revision's comparison."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteParts:
    """What the lifecycle works with."""

    config: RunConfig
    book: RouteBook
    servers: RewardServers
    statics: StaticServers
    shadow: Shadowing
    calls: WarmUpCalls
    check: ServiceCheck
    waits: WaitBoard


class RouteLifecycle:
    """Opens the route and carries out what users ask of it."""

    def __init__(self, parts: RouteParts, *, patience_s: float = PATIENCE_S) -> None:
        self._parts = parts
        self._book = parts.book
        self._patience_s = patience_s
        reward, coordinator = parts.config.reward, parts.config.coordinator
        self._admission = Admission(
            parts.servers,
            self.offers,
            parts.check,
            wait_s=coordinator.ready_timeout_s,
            max_unscored_share=reward.max_unscored_share,
        )
        self._sources = tuple(sorted(reward.sources))
        self._probes: ProbeSamples | None = None
        self._checks = asyncio.Semaphore(MAX_CHECKS)
        self._checking: set[int] = set()
        self._known_other_code: set[tuple[str, tuple[str, str], str]] = set()
        self._book.subscribe(self._on_entry)
        _REVISION.set(self._book.active_number)

    def offers(self) -> list[Offer]:
        """What servers that take traffic offer now."""
        return offers_of(self._parts.servers.rewards())

    def servers_with_other_code(self) -> list[Offer]:
        """Offers of other code than open revisions have pinned under the same version; they get no work."""
        return other_code(self.offers(), pins_of(self._book.records()))

    def problems(self, record: RouteRecord) -> list[str]:
        """What the gates of an armed revision still miss."""
        return [] if record.gates is None else self._gate_problems(record.revision.number, record.gates)

    def comparison(self, number: int) -> Comparison:
        """How a revision compares with the active one. Raises: NotFoundError: there is none of that number."""
        self._book.record(number)
        return self._parts.shadow.comparison(number)

    async def open(self, probes: ProbeSamples) -> None:
        """Make sure that a revision is active; new ones are checked from now on.

        Args:
            probes: what new revisions are tried on.
        Raises:
            NotFoundError: reward servers are there, but none offers a scorer of the configuration; lists what there is.
            UnavailableError: no server came in time. ConfigError: servers run different code under one version.
        """
        if self._book.active_number:
            self._warn_of_other_configuration()
        else:
            await self._begin()
        self._probes = probes

    async def run(self) -> None:
        """Take up, watch and drain until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._look_once(group)
                await self._book.wait_for_change(LOOK_AGAIN_S)

    async def add(self, label: str, components: Sequence[RouteComponent], addresses: Sequence[str], *, who: str, why: str) -> RouteRevision:
        """Register a revision; its checks begin at once.

        Raises: InvalidRequestError: it cannot make a reward of every row. StateError: the run has not begun. CapacityError: too many.
        """
        self._require_open()
        for component in components:
            self._refuse_unknown_sources(component)
        self._refuse_gaps(components)
        self._refuse_missing_parts(components)
        for address in addresses:
            _check_address(address)
        return await self._book.add(label, components, addresses=addresses, who=who, why=why)

    async def shadow(self, number: int, share: float, *, who: str, why: str) -> None:
        """Shadow a share of the groups; 0 stops it. Raises: StateError, InvalidRequestError, NotFoundError."""
        if share == 0:
            await self._book.stop_shadow(number, who=who, why=why)
        else:
            await self._book.shadow(number, share, who=who, why=why)

    async def activate(self, number: int, gates: Gates | None, *, when_gates_pass: bool, who: str, why: str) -> None:
        """Activate a revision, now or once its comparison passes gates.

        Raises: StateError: not from its stage, its servers are not there, or it does not pass; names each gate. NotFoundError.
        """
        self._book.record(number)
        if when_gates_pass:
            if gates is None:
                raise InvalidRequestError("when_gates_pass is true, but gates is null; give gates to wait for")
            await self._book.arm(number, gates, who=who, why=why)
            return
        await self._book.activate(number, who=who, why=why, gates=gates, check=partial(self._require_fit, number, gates))

    async def rollback(self, *, who: str, why: str) -> RouteRevision:
        """Go back to what was active before. Raises: StateError: there is nothing, or its servers are not there."""
        return await self._book.rollback(who=who, why=why, check=lambda: self._require_servers(self._book.previous_number))

    async def retire(self, number: int, *, who: str, why: str) -> None:
        """Use a revision no more. Raises: StateError: not from its stage. NotFoundError."""
        await self._book.retire(number, who=who, why=why)

    async def _begin(self) -> None:
        for record in self._book.records():
            if record.stage not in OVER:
                # The coordinator ended before it was active; servers may have changed since.
                await self._book.retire(record.revision.number, who=COORDINATOR, why="it never became active")
        configured = components_of_config(self._parts.config.reward)
        pinned = await self._configured(configured)
        number = (await self._book.add(CONFIGURATION, configured, who=CONFIGURATION, why="the run begins")).number
        await self._book.note_checked(number, pinned, why="servers offer its scorers")
        await self._book.note_ready(number, why="the configuration asks for it")
        await self._book.activate(number, who=CONFIGURATION, why="the run begins")

    async def _configured(self, components: Sequence[RouteComponent]) -> tuple[RouteComponent, ...]:
        names = ", ".join(component.scorer for component in components)
        try:
            with self._parts.waits.waiting("coordinator", ["reward"], f"a reward server that offers {names}"):
                return await self._admission.pinned(components, dict, patience_s=self._patience_s)
        except OtherCodeError as error:
            raise ConfigError(str(error)) from error
        except NoOfferError as error:
            if not self.offers():
                raise UnavailableError(f"{error}: start a reward server, and look into the log of the last one") from error
            raise NotFoundError(f"{_setting(components, error)} cannot score: {error}") from error

    def _warn_of_other_configuration(self) -> None:
        active = self._book.active
        configured = components_of_config(self._parts.config.reward)
        if not _is_asked_for(configured, active.components):
            log.warning(
                "configured_reward_not_active",
                active=active.number,
                label=active.label,
                configured=[component.scorer for component in configured],
                reason="the audit log of the run decides; add and activate a route to change it",
            )

    async def _look_once(self, group: asyncio.TaskGroup) -> None:
        self._parts.statics.set_addresses(self._book.addresses())
        self._log_other_code()
        probes = self._probes
        if probes is None:
            return
        try:
            await self._book.drain()
            await self._activate_passed()
        except StateError as error:  # a disk that fails, or somebody else was faster: looked at again
            log.warning("reward_route_not_changed", error=str(error))
        for record in (*self._book.in_stage(RouteStage.REGISTERED), *self._book.in_stage(RouteStage.CHECKED)):
            if record.revision.number not in self._checking:
                self._checking.add(record.revision.number)
                group.create_task(self._take_up(record.revision.number, probes))

    async def _take_up(self, number: int, probes: ProbeSamples) -> None:
        try:
            async with self._checks:
                await self._admit(number, probes)
        except StateError as error:  # it was retired meanwhile, or the disk fails: it is taken up again if it still waits
            log.warning("reward_route_not_checked", revision=number, error=str(error))
            await asyncio.sleep(LOOK_AGAIN_S)
        finally:
            self._checking.discard(number)

    async def _admit(self, number: int, probes: ProbeSamples) -> None:
        try:
            if self._book.stage(number) is RouteStage.REGISTERED:
                components = await self._admission.pinned(self._book.revision(number).components, lambda: pins_of(self._book.records()))
                why = await self._admission.check(components, probes)
                await self._book.note_checked(number, components, why=why)
            if self._book.stage(number) is RouteStage.CHECKED:
                why = await self._admission.warm_up(self._book.revision(number).components, probes, self._parts.calls)
                await self._book.note_ready(number, why=why)
        except (RejectedError, NoOfferError, OtherCodeError) as error:
            await self._book.reject(number, self._with_silent_addresses(number, str(error)))
        except StateError:
            raise
        except ShoalError as error:
            await self._book.reject(number, f"{type(error).__name__}: {error}")

    def _with_silent_addresses(self, number: int, problem: str) -> str:
        silent = self._parts.statics.problems()
        texts = [f"{address} does not answer: {silent[address]}" for address in self._book.record(number).addresses if address in silent]
        return "; ".join([problem, *texts])

    async def _activate_passed(self) -> None:
        for record in self._book.in_stage(RouteStage.SHADOW):
            number = record.revision.number
            if record.gates is None or record.armed_by is None or self.problems(record) or self._missing(record):
                continue
            who, why = record.armed_by
            why = f"its gates have passed: {why}"[:MAX_WHY_CHARS]
            await self._book.activate(number, who=who, why=why, gates=record.gates, check=partial(self._require_fit, number, record.gates))

    def _gate_problems(self, number: int, gates: Gates) -> list[str]:
        comparison, active = self.comparison(number), self._book.active_number
        # One with the revision that was active before says nothing about the present one.
        return gate_problems(gates, comparison if comparison.active == active else Comparison(number=number, active=active))

    def _missing(self, record: RouteRecord) -> list[str]:
        return missing_servers(record.revision.components, self.offers())

    def _require_fit(self, number: int, gates: Gates | None) -> None:
        if gates is not None and (problems := self._gate_problems(number, gates)):
            raise StateError(f"revision {number} of the reward route does not pass: {'; '.join(problems)}")
        self._require_servers(number)

    def _require_servers(self, number: int) -> None:
        record = self._book.record(number)
        if record.stage in _HAS_SERVERS and (missing := self._missing(record)):
            raise StateError(
                f"revision {number} of the reward route cannot score: no server offers {', '.join(missing)} (there is: "
                f"{what_there_is(self.offers())}); start one and try again"
            )

    def _require_open(self) -> None:
        if self._probes is None:
            raise StateError("the run has not begun, so no reward is active yet: wait until it trains")

    def _refuse_gaps(self, components: Sequence[RouteComponent]) -> None:
        for source in self._sources or (None,):
            if not any(component.is_required and _scores(component, source) for component in components):
                rows = "rows of sources that no component names" if source is None else f"rows of source {source!r}"
                raise InvalidRequestError(f"{rows} would have no reward: give a required component for them (sources [] is all)")

    def _refuse_missing_parts(self, components: Sequence[RouteComponent]) -> None:
        """gdpo reads the parts of reward.weights from the records and weighs them itself; a route without them would train nothing."""
        if self._parts.config.algorithm.estimator != "gdpo":
            return
        for source in self._sources or ("",):
            given = {name for part in components if part.applies_to(source) for name in (part.parts or (part.scorer,))}
            if missing := sorted(set(self._parts.config.reward.weights) - given):
                raise InvalidRequestError(
                    f"algorithm.estimator gdpo needs the parts of reward.weights, and the route does not name {missing[0]!r}: "
                    "give it in a component's parts"
                )

    def _refuse_unknown_sources(self, component: RouteComponent) -> None:
        unknown = sorted(set(component.sources) - set(self._sources)) if self._sources else []
        if unknown:
            raise InvalidRequestError(
                f"component {component.scorer!r} names source {unknown[0]!r}, which no row has; "
                f"reward.sources has {', '.join(self._sources)}"
            )

    def _log_other_code(self) -> None:
        found = {(offer.member.info.service_id, offer.key, offer.scorer.fingerprint): offer for offer in self.servers_with_other_code()}
        for known, offer in found.items():
            if known not in self._known_other_code:
                log.warning(
                    "other_code_under_the_same_version",
                    service_id=offer.member.info.service_id,
                    scorer=offer.scorer.name,
                    version=offer.scorer.version,
                    fingerprint=offer.scorer.fingerprint,
                )
        # Servers come and go under new ids: only those that are there are remembered.
        self._known_other_code = set(found)

    def _on_entry(self, entry: LogEntry) -> None:
        _REVISION.set(entry.active)
        if entry.stage in OVER:
            self._parts.shadow.forget(entry.revision)


_HAS_SERVERS = frozenset({RouteStage.READY, RouteStage.SHADOW, RouteStage.DRAINING, RouteStage.DRAINED})


def _scores(component: RouteComponent, source: str | None) -> bool:
    """Whether a component scores the rows of a source; None stands for any source that nobody has named."""
    return not component.sources if source is None else component.applies_to(source)


def _setting(components: Sequence[RouteComponent], error: NoOfferError) -> str:
    """The setting that names the scorer that nobody offers."""
    missing = next((component for component in components if component.scorer == error.scorer), components[0])
    return f"reward.sources of {', '.join(missing.sources)}:" if missing.sources else "reward.scorer"


def _is_asked_for(configured: Sequence[RouteComponent], active: Sequence[RouteComponent]) -> bool:
    """Whether a route is what the configuration asks for; an empty version asks for any."""
    return len(configured) == len(active) and all(
        replace(have, version=have.version if asked.version else "", fingerprint="") == asked
        for asked, have in zip(configured, active, strict=True)
    )


def _check_address(address: str) -> None:
    try:
        split_address(address)
    except ConfigError as error:
        raise InvalidRequestError(str(error)) from error
