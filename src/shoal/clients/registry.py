"""Keeps a service registered with the coordinator.

    async with LeaseKeeper(coordinator_address, service, security) as lease:
        ...
        lease.policy_version = 7

States: unregistered -> (Register) -> leased -> (Renew at a third of the lease) -> leased; a lost lease registers again, with the
current policy_version. An unreachable coordinator is no end: the keeper goes on trying, since coordinators restart. With every grant
the coordinator says which policy version a rollout server must serve before it answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from shoal.clients.base import ServiceClient
from shoal.codec.services import service_info_to_proto
from shoal.config.models import SecuritySection
from shoal.errors import DeadlineError, NotFoundError, ShoalError, UnavailableError
from shoal.rpc.retry import backoff_s
from shoal.rpc.v1 import registry_pb2, registry_pb2_grpc
from shoal.telemetry.logs import get_logger
from shoal.types import ServiceInfo, ServiceKind

log = get_logger(__name__)

CALL_TIMEOUT_S = 5.0
# A coordinator that grants next to nothing must not make its services spin.
MIN_RENEW_INTERVAL_S = 0.05


def this_process(*, run_id: str, service_id: str, kind: ServiceKind, address: str) -> ServiceInfo:
    """What this process registers as; every call gives another incarnation.

    Args:
        address: host:port that others dial.
    """
    return ServiceInfo(
        run_id=run_id, service_id=service_id, kind=kind, address=address, incarnation=uuid.uuid4().hex, process_id=os.getpid()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGrant:
    """What the registry grants: a lease of so many seconds, and the version that a rollout server must serve before it answers."""

    lease_id: str
    lease_s: float
    required_policy_version: int


class RegistryClient(ServiceClient):
    """Plain calls of the registry."""

    def __init__(self, address: str, security: SecuritySection) -> None:
        super().__init__(address, security)
        self._stub = registry_pb2_grpc.RegistryServiceStub(self._channel)

    async def register(self, service: ServiceInfo, *, timeout_s: float) -> LeaseGrant:
        """Register or replace a service. Raises InvalidRequestError for another run."""
        answer = await self._call(self._stub.Register, service_info_to_proto(service), timeout_s)
        return LeaseGrant(lease_id=answer.lease_id, lease_s=answer.lease_s, required_policy_version=answer.required_policy_version)

    async def renew(self, service_id: str, lease_id: str, *, timeout_s: float) -> LeaseGrant:
        """Extend a lease. Raises NotFoundError once it has expired."""
        request = registry_pb2.RenewRequest(service_id=service_id, lease_id=lease_id)
        answer = await self._call(self._stub.Renew, request, timeout_s)
        return LeaseGrant(lease_id=lease_id, lease_s=answer.lease_s, required_policy_version=answer.required_policy_version)

    async def deregister(self, service_id: str, lease_id: str, *, timeout_s: float) -> None:
        """Give a lease back."""
        request = registry_pb2.DeregisterRequest(service_id=service_id, lease_id=lease_id)
        await self._call(self._stub.Deregister, request, timeout_s)


class LeaseKeeper:
    """Registers a service, renews its lease, registers again when it was lost, deregisters at the end.

    Set `policy_version` whenever the served version changes; a new registration reports it.
    """

    def __init__(
        self,
        coordinator_address: str,
        service: ServiceInfo,
        security: SecuritySection,
        *,
        register_timeout_s: float = 60.0,
        on_required_version: Callable[[int], None] | None = None,
    ) -> None:
        """Prepare; nothing is sent yet.

        Args:
            register_timeout_s: How long the first registration waits for the coordinator, in seconds.
            on_required_version: Called on the event loop whenever the coordinator requires another policy version than before (0 at
                first), before `run` goes on or the context is entered. 0 requires nothing: no version is known yet.
        """
        self.policy_version = service.policy_version
        self._service = service
        self._register_timeout_s = register_timeout_s
        self._on_required_version = on_required_version
        self.required_policy_version = 0
        self._client = RegistryClient(coordinator_address, security)
        self._lease_id = ""
        self._lease_s = 0.0
        self._renewing: asyncio.Task[None] | None = None
        self._owner: asyncio.Task[object] | None = None

    async def run(self) -> None:
        """Register and keep the lease until cancelled; deregisters then.

        Raises: UnavailableError: the coordinator did not answer in time. InvalidRequestError: it runs another run.
        """
        try:
            await self._register(self._register_timeout_s)
            await self._renew_forever()
        finally:
            await self._leave()

    async def __aenter__(self) -> Self:
        """Return once registered. Raises as `run`."""
        try:
            await self._register(self._register_timeout_s)
        except BaseException:  # cancelled too: a registration that may have arrived must not outlive its owner
            await self._leave()
            raise
        self._owner = asyncio.current_task()
        self._renewing = asyncio.create_task(self._renew_forever(), name=f"lease-{self._service.service_id}")
        self._renewing.add_done_callback(self._stop_owner)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Deregister. If keeping the lease failed, the body was cancelled and that failure is raised here."""
        assert self._renewing is not None  # noqa: S101 - __aenter__ made it
        self._renewing.remove_done_callback(self._stop_owner)
        self._renewing.cancel()
        (result,) = await asyncio.gather(self._renewing, return_exceptions=True)
        await self._leave()
        if isinstance(result, Exception):
            if kind is asyncio.CancelledError and self._owner is not None:
                self._owner.uncancel()
            raise result

    def _stop_owner(self, renewing: asyncio.Task[None]) -> None:
        if not renewing.cancelled() and self._owner is not None:
            self._owner.cancel()

    async def _register(self, timeout_s: float | None) -> None:
        """Register, trying again while the coordinator is unavailable; timeout_s None tries for ever."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        attempt = 0
        while True:
            attempt += 1
            service = dataclasses.replace(self._service, policy_version=self.policy_version)
            try:
                self._take(await self._client.register(service, timeout_s=CALL_TIMEOUT_S))
            except (UnavailableError, DeadlineError) as error:
                wait_s = backoff_s(attempt)
                if deadline_s is not None and time.monotonic() + wait_s >= deadline_s:
                    raise UnavailableError(
                        f"coordinator at {self._client.address} did not register {service.service_id} within {timeout_s:g} s "
                        f"({error}); check that it runs and that the address is right"
                    ) from error
                log.debug("register_waits", coordinator=self._client.address, error=str(error))
                await asyncio.sleep(wait_s)
            else:
                log.info("registered", service_id=service.service_id, lease_s=self._lease_s, policy_version=service.policy_version)
                return

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(max(self._lease_s / 3, MIN_RENEW_INTERVAL_S))
            try:
                timeout_s = min(CALL_TIMEOUT_S, self._lease_s / 3)
                self._take(await self._client.renew(self._service.service_id, self._lease_id, timeout_s=timeout_s))
            except NotFoundError:
                log.warning("lease_lost", service_id=self._service.service_id)
                await self._register(None)
            except (UnavailableError, DeadlineError) as error:
                log.warning("renew_failed", coordinator=self._client.address, error=str(error))

    def _take(self, grant: LeaseGrant) -> None:
        self._lease_id, self._lease_s = grant.lease_id, grant.lease_s
        if grant.required_policy_version != self.required_policy_version:
            self.required_policy_version = grant.required_policy_version
            if self._on_required_version is not None:
                self._on_required_version(grant.required_policy_version)

    async def _leave(self) -> None:
        try:
            if self._lease_id:
                await self._client.deregister(self._service.service_id, self._lease_id, timeout_s=CALL_TIMEOUT_S)
        except ShoalError as error:
            # The coordinator may be gone before its services; the lease then runs out.
            log.debug("deregister_failed", error=str(error))
        finally:
            self._lease_id = ""
            await self._client.close()
