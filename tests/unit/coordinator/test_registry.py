"""Leases, restarts, expiry and waiting for services."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from shoal_coordinator.registry import Registry, RegistryChange, RegistryEvent
from shoal_coordinator.registry_servicer import SERVICE_NAME, RegistryServicer

from shoal.clients.registry import RegistryClient
from shoal.errors import InvalidRequestError, NotFoundError, UnavailableError
from shoal.rpc.v1 import registry_pb2_grpc
from shoal.types import ServiceInfo, ServiceKind
from tests.helpers.rpc_services import PLAINTEXT, serving


class FakeClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_info(service_id: str = "rollout-0", kind: ServiceKind = ServiceKind.ROLLOUT, incarnation: str = "a") -> ServiceInfo:
    return ServiceInfo(run_id="run", service_id=service_id, kind=kind, address="127.0.0.1:1", incarnation=incarnation)


def make_registry(clock: FakeClock) -> tuple[Registry, list[RegistryEvent]]:
    registry = Registry(run_id="run", lease_s=10.0, now_s=clock)
    events: list[RegistryEvent] = []
    registry.subscribe(events.append)
    return registry, events


def test_registry_expires_a_lease_that_is_not_renewed() -> None:
    clock = FakeClock()
    registry, events = make_registry(clock)
    lease = registry.register(make_info())
    clock.now_s += 9.0
    registry.renew("rollout-0", lease.lease_id)
    clock.now_s += 9.0
    assert registry.expire_due() == []
    clock.now_s += 1.0
    assert registry.expire_due() == [make_info()]
    assert [event.change for event in events] == [RegistryChange.JOINED, RegistryChange.EXPIRED]
    with pytest.raises(NotFoundError, match="register again"):
        registry.renew("rollout-0", lease.lease_id)


@pytest.mark.parametrize("kind", list(ServiceKind))
def test_registry_takes_a_service_without_a_run_only_if_it_scores(kind: ServiceKind) -> None:
    registry, _ = make_registry(FakeClock())
    info = dataclasses.replace(make_info("service", kind), run_id="")
    if kind is ServiceKind.REWARD:
        registry.register(info)
        assert registry.services() == (info,)
        return
    with pytest.raises(InvalidRequestError, match="belongs to run ''"):
        registry.register(info)


async def test_registry_servicer_says_which_version_is_required() -> None:
    registry, _ = make_registry(FakeClock())
    async with (
        serving(
            lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(RegistryServicer(registry), server), SERVICE_NAME
        ) as address,
        RegistryClient(address, PLAINTEXT) as client,
    ):
        first = await client.register(make_info(), timeout_s=5.0)
        registry.required_policy_version = 50
        renewed = await client.renew("rollout-0", first.lease_id, timeout_s=5.0)
        again = await client.register(make_info(), timeout_s=5.0)
    assert [grant.required_policy_version for grant in (first, renewed, again)] == [0, 50, 50]


def test_registry_replaces_a_restarted_service_and_ends_the_old_lease() -> None:
    registry, events = make_registry(FakeClock())
    old = registry.register(make_info())
    new = registry.register(make_info(incarnation="b"))
    assert new.lease_id != old.lease_id
    assert [event.change for event in events] == [RegistryChange.JOINED, RegistryChange.REPLACED]
    with pytest.raises(NotFoundError):
        registry.renew("rollout-0", old.lease_id)
    registry.deregister("rollout-0", old.lease_id)
    assert registry.services() == (make_info(incarnation="b"),)


def test_registry_keeps_the_lease_of_a_repeated_registration() -> None:
    registry, events = make_registry(FakeClock())
    first = registry.register(make_info())
    second = registry.register(dataclasses.replace(make_info(), policy_version=3))
    assert second.lease_id == first.lease_id
    assert registry.services()[0].policy_version == 3
    assert len(events) == 1


def test_registry_deregisters_once() -> None:
    registry, events = make_registry(FakeClock())
    lease = registry.register(make_info())
    registry.deregister("rollout-0", lease.lease_id)
    registry.deregister("rollout-0", lease.lease_id)
    assert [event.change for event in events] == [RegistryChange.JOINED, RegistryChange.LEFT]


def test_registry_refuses_another_runs_service() -> None:
    registry, _ = make_registry(FakeClock())
    with pytest.raises(InvalidRequestError, match="belongs to run 'other' but this coordinator drives 'run'"):
        registry.register(dataclasses.replace(make_info(), run_id="other"))


@pytest.mark.parametrize(
    "info",
    [
        dataclasses.replace(make_info(), service_id=""),
        dataclasses.replace(make_info(), address=""),
        dataclasses.replace(make_info(), incarnation=""),
    ],
)
def test_registry_refuses_an_empty_field(info: ServiceInfo) -> None:
    registry, _ = make_registry(FakeClock())
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        registry.register(info)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"service_id": "reward\n0"}, "has control characters"),
        ({"service_id": "r" * 257}, "is too long"),
        ({"address": "nowhere"}, "address 'nowhere' is not host:port"),
        ({"address": "http://h:1"}, "address 'http://h:1' is not host:port"),
    ],
)
def test_registry_refuses_what_nobody_could_show_or_reach(changes: dict[str, str], message: str) -> None:
    registry, events = make_registry(FakeClock())
    with pytest.raises(InvalidRequestError, match=message):
        registry.register(dataclasses.replace(make_info(), **changes))  # type: ignore[arg-type]
    assert (registry.services(), events) == ((), [])


async def test_registry_wait_for_ends_when_the_last_service_comes() -> None:
    registry, _ = make_registry(FakeClock())
    registry.register(make_info("actor", ServiceKind.ACTOR))
    waiting = asyncio.create_task(registry.wait_for({ServiceKind.ACTOR: 1, ServiceKind.ROLLOUT: 2}, timeout_s=5.0))
    registry.register(make_info("rollout-0"))
    await asyncio.sleep(0)
    assert not waiting.done()
    registry.register(make_info("rollout-1"))
    await waiting


async def test_registry_wait_for_names_what_is_missing_and_where_to_look() -> None:
    registry, _ = make_registry(FakeClock())
    registry.register(make_info())
    with pytest.raises(UnavailableError, match="still missing") as caught:
        await registry.wait_for(
            {ServiceKind.ROLLOUT: 2, ServiceKind.CRITIC: 1}, 0.01, is_ready=lambda info: info.kind != ServiceKind.ROLLOUT
        )
    message = str(caught.value)
    assert "2 of 2 rollout services (registered but not ready: rollout-0)" in message
    assert "1 of 1 critic services (none registered since " in message
    assert "look at the log of each rollout, critic service" in message


async def test_registry_wait_for_looks_again_when_readiness_changes() -> None:
    registry, _ = make_registry(FakeClock())
    registry.register(make_info())
    ready: set[str] = set()
    waiting = asyncio.create_task(registry.wait_for({ServiceKind.ROLLOUT: 1}, 5.0, is_ready=lambda info: info.service_id in ready))
    await asyncio.sleep(0)
    ready.add("rollout-0")
    registry.wake_waiters()
    await waiting


@pytest.mark.timeout(10)
async def test_registry_expiry_task_notices_by_itself() -> None:
    registry = Registry(run_id="run", lease_s=0.05)
    expired = asyncio.Event()
    registry.subscribe(lambda event: expired.set() if event.change is RegistryChange.EXPIRED else None)
    registry.register(make_info())
    task = asyncio.create_task(registry.run_expiry())
    await expired.wait()
    task.cancel()
    assert registry.services() == ()
