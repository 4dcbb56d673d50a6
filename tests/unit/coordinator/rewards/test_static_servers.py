"""Servers that cannot register, over real gRPC: they come, change and go."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from shoal_coordinator.connections import GrpcConnector, RewardCalls
from shoal_coordinator.registry import Registry, RegistryChange, RegistryEvent
from shoal_coordinator.rewards.static_servers import StaticServers, is_static

from shoal.config.models import SecuritySection
from shoal.errors import ConfigError
from shoal.rpc.v1 import reward_pb2_grpc
from shoal.types import ServiceInfo, ServiceKind
from tests.helpers.third_party_reward import ThirdPartyReward

LEASE_S = 0.4


class Rig:
    """Static servers that are being asked, and a port at which one comes and goes."""

    def __init__(self) -> None:
        self.registry = Registry(run_id="run", lease_s=LEASE_S)
        self.statics = StaticServers(self.registry, GrpcConnector(SecuritySection(insecure=True)))
        self.events: list[tuple[RegistryChange, str]] = []
        self.registry.subscribe(self._note)
        self.address = ""

    def _note(self, event: RegistryEvent) -> None:
        self.events.append((event.change, event.info.service_id))

    @property
    def registered(self) -> list[str]:
        return [info.service_id for info in self.registry.services()]

    @asynccontextmanager
    async def serving(self, servicer: ThirdPartyReward) -> AsyncIterator[str]:
        """Serve at this rig's address; the first call chooses it."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
        reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await server.start()
        try:
            yield self.address
        finally:
            await server.stop(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < deadline_s, (self.events, self.statics.problems())
            await asyncio.sleep(0.01)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    work = [asyncio.create_task(rig.statics.run()), asyncio.create_task(rig.registry.run_expiry())]
    yield rig
    for task in work:
        task.cancel()
    results = await asyncio.gather(*work, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results), results


async def test_static_server_is_registered_while_it_answers(rig: Rig) -> None:
    async with rig.serving(ThirdPartyReward()) as address:
        rig.statics.set_addresses([address])
        await rig.until(lambda: rig.registered == [address])
        (info,) = rig.registry.services(ServiceKind.REWARD)
        assert (info.run_id, info.address, is_static(info)) == ("run", address, True)
        renewed = rig.registry.leases()[0].renewed_unix_s
        await rig.until(lambda: rig.registry.leases()[0].renewed_unix_s > renewed + LEASE_S)
    await rig.until(lambda: rig.registered == [])
    assert list(rig.statics.problems()) == [address]
    async with rig.serving(ThirdPartyReward()):
        await rig.until(lambda: rig.registered == [address])
        assert rig.statics.problems() == {}
    changes = [change for change, _ in rig.events]
    assert changes == [RegistryChange.JOINED, RegistryChange.EXPIRED, RegistryChange.JOINED]


async def test_static_server_with_other_code_is_another_start_of_it(rig: Rig) -> None:
    servicer = ThirdPartyReward()
    async with rig.serving(servicer) as address:
        rig.statics.set_addresses([address])
        await rig.until(lambda: rig.registered == [address])
        servicer.fingerprint = "4567"
        await rig.until(lambda: len(rig.events) == 2)
    assert rig.events == [(RegistryChange.JOINED, address), (RegistryChange.REPLACED, address)]


async def test_static_server_leaves_when_nobody_needs_it(rig: Rig) -> None:
    async with rig.serving(ThirdPartyReward()) as address:
        rig.statics.set_addresses([address, "127.0.0.1:1"])
        await rig.until(lambda: rig.registered == [address] and "127.0.0.1:1" in rig.statics.problems())
        rig.statics.set_addresses([])
        await rig.until(lambda: rig.registered == [] and rig.statics.problems() == {})
        assert rig.events[-1] == (RegistryChange.LEFT, address)


async def test_static_server_that_registers_itself_counts_once(rig: Rig) -> None:
    async with rig.serving(ThirdPartyReward()) as address:
        own = ServiceInfo(run_id="", service_id="own", kind=ServiceKind.REWARD, address=address, incarnation="x")
        lease = rig.registry.register(own)
        rig.statics.set_addresses([address])
        renewing = asyncio.create_task(_renew(rig.registry, lease.lease_id))
        await asyncio.sleep(LEASE_S)
        assert rig.registered == ["own"]
        renewing.cancel()
        await rig.until(lambda: rig.registered == [address])


async def _renew(registry: Registry, lease_id: str) -> None:
    while True:
        registry.renew("own", lease_id)
        await asyncio.sleep(LEASE_S / 4)


async def test_static_server_that_hangs_is_given_up_by_its_deadline(rig: Rig) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    silent = await asyncio.start_server(accept, "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    try:
        async with rig.serving(ThirdPartyReward()) as other:
            rig.statics.set_addresses([address, other])
            await rig.until(lambda: address in rig.statics.problems() and rig.registered == [other])
    finally:
        silent.close()


def test_a_server_with_its_own_lease_is_not_static() -> None:
    info = ServiceInfo(run_id="r", service_id="s", kind=ServiceKind.REWARD, address="a:1", incarnation="1234")
    assert not is_static(info)


class BrokenConnector(GrpcConnector):
    """Cannot read its certificate until it is mended."""

    is_mended = False

    def reward(self, address: str) -> RewardCalls:
        if not self.is_mended:
            raise ConfigError("cert.pem cannot be read")
        return super().reward(address)


async def test_server_that_cannot_be_connected_to_is_tried_again_and_costs_nobody_else() -> None:
    rig = Rig()
    connector = BrokenConnector(SecuritySection(insecure=True))
    rig.statics = StaticServers(rig.registry, connector)
    running = asyncio.create_task(rig.statics.run())
    async with rig.serving(ThirdPartyReward()) as address:
        rig.statics.set_addresses([address])
        await rig.until(lambda: rig.statics.problems() == {address: "cert.pem cannot be read"})
        connector.is_mended = True
        await rig.until(lambda: rig.registered == [address])
        connector.is_mended = False
        rig.statics.set_addresses(["127.0.0.1:1"])
        await rig.until(lambda: rig.statics.problems() == {"127.0.0.1:1": "cert.pem cannot be read"})
        rig.statics.set_addresses([])
        await rig.until(lambda: rig.statics.problems() == {} and rig.registered == [])
    running.cancel()
    (result,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError)
