"""LeaseKeeper against a real registry server."""

from __future__ import annotations

import asyncio
import time

import pytest

from shoal.clients.registry import LeaseKeeper
from shoal.errors import InvalidRequestError, UnavailableError
from shoal.types import ServiceInfo, ServiceKind
from tests.helpers.rpc_services import PLAINTEXT, REGISTRY_SERVICE, FakeRegistry, register_registry, serving

SERVICE = ServiceInfo(
    run_id="run", service_id="rollout-0", kind=ServiceKind.ROLLOUT, address="127.0.0.1:1", incarnation="i", policy_version=3
)
LIMIT_S = 20


async def test_lease_keeper_registers_renews_and_deregisters() -> None:
    registry = FakeRegistry()
    async with serving(register_registry(registry), REGISTRY_SERVICE) as address, asyncio.timeout(LIMIT_S):
        async with LeaseKeeper(address, SERVICE, PLAINTEXT):
            request = registry.registered.get_nowait()
            assert [await registry.renewed.get() for _ in range(3)] == ["rollout-0"] * 3
        assert registry.deregistered.get_nowait() == "lease-1"
    assert (request.run_id, request.address, request.policy_version) == ("run", "127.0.0.1:1", 3)
    assert registry.registered.empty()


async def test_lease_keeper_lost_lease_registers_again_with_the_current_version() -> None:
    registry = FakeRegistry()
    async with serving(register_registry(registry), REGISTRY_SERVICE) as address, asyncio.timeout(LIMIT_S):
        async with LeaseKeeper(address, SERVICE, PLAINTEXT) as lease:
            registry.registered.get_nowait()
            lease.policy_version = 9
            registry.forget()
            assert (await registry.registered.get()).policy_version == 9
            await registry.renewed.get()
        assert registry.deregistered.get_nowait() == "lease-2"


async def test_lease_keeper_tells_each_new_required_version_before_it_is_entered() -> None:
    registry = FakeRegistry()
    registry.required_policy_version = 50
    told: list[int] = []
    async with (
        serving(register_registry(registry), REGISTRY_SERVICE) as address,
        asyncio.timeout(LIMIT_S),
        LeaseKeeper(address, SERVICE, PLAINTEXT, on_required_version=told.append) as lease,
    ):
        assert told == [50]
        await registry.renewed.get()
        registry.required_policy_version = 51
        while len(told) < 2:
            await registry.renewed.get()
        registry.required_policy_version = 0
        registry.forget()
        await registry.registered.get()
        while len(told) < 3:
            await registry.renewed.get()
        assert lease.required_policy_version == 0
    assert told == [50, 51, 0]


async def test_lease_keeper_survives_a_restart_of_the_coordinator() -> None:
    first, second = FakeRegistry(), FakeRegistry()
    async with asyncio.timeout(60):
        async with serving(register_registry(first), REGISTRY_SERVICE) as address:
            lease = await LeaseKeeper(address, SERVICE, PLAINTEXT).__aenter__()
            await first.renewed.get()
        async with serving(register_registry(second), REGISTRY_SERVICE, port=int(address.rpartition(":")[2])):
            assert (await second.registered.get()).service_id == "rollout-0"
            await lease.__aexit__(None, None, None)
            assert second.deregistered.get_nowait() == "lease-1"


async def test_lease_keeper_waits_for_a_coordinator_that_starts_later() -> None:
    registry = FakeRegistry()
    async with serving(register_registry(FakeRegistry()), REGISTRY_SERVICE) as address:
        pass
    async with asyncio.timeout(60):
        run = asyncio.create_task(LeaseKeeper(address, SERVICE, PLAINTEXT).run())
        async with serving(register_registry(registry), REGISTRY_SERVICE, port=int(address.rpartition(":")[2])):
            await registry.renewed.get()
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert registry.deregistered.get_nowait() == "lease-1"


async def test_lease_keeper_absent_coordinator_is_named_after_the_bound() -> None:
    async with serving(register_registry(FakeRegistry()), REGISTRY_SERVICE) as address:
        pass
    start_s = time.monotonic()
    with pytest.raises(UnavailableError, match=rf"coordinator at {address} did not register rollout-0 within 0\.5 s"):
        async with LeaseKeeper(address, SERVICE, PLAINTEXT, register_timeout_s=0.5):
            pytest.fail("the body must not run")
    assert time.monotonic() - start_s < LIMIT_S


async def test_lease_keeper_foreign_run_fails_at_once() -> None:
    registry = FakeRegistry()
    registry.failure = InvalidRequestError("this coordinator runs other, not run")
    async with serving(register_registry(registry), REGISTRY_SERVICE) as address, asyncio.timeout(LIMIT_S):
        with pytest.raises(InvalidRequestError, match="runs other"):
            await LeaseKeeper(address, SERVICE, PLAINTEXT).run()


async def test_lease_keeper_refused_renewal_ends_the_body_with_its_error() -> None:
    registry = FakeRegistry()
    async with serving(register_registry(registry), REGISTRY_SERVICE) as address, asyncio.timeout(LIMIT_S):

        async def hold() -> None:
            async with LeaseKeeper(address, SERVICE, PLAINTEXT):
                registry.failure = InvalidRequestError("this coordinator runs other, not run")
                registry.forget()
                await asyncio.Event().wait()

        with pytest.raises(InvalidRequestError, match="runs other"):
            await hold()
        # The cancellation of the body is spent: the task goes on.
        await asyncio.sleep(0)


async def test_lease_keeper_error_of_the_body_passes_and_deregisters() -> None:
    registry = FakeRegistry()
    async with serving(register_registry(registry), REGISTRY_SERVICE) as address, asyncio.timeout(LIMIT_S):
        with pytest.raises(KeyError):
            async with LeaseKeeper(address, SERVICE, PLAINTEXT):
                raise KeyError("body")
        assert registry.deregistered.get_nowait() == "lease-1"
