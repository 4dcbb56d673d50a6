"""The gRPC server of a service: limits, keepalive, mTLS, truthful health, one interceptor, an orderly end.

server = RpcServer(host, port, config.security)
server.add(lambda s: add_RewardServiceServicer_to_server(servicer, s), "shoal.rpc.v1.RewardService")
port = await server.start()
server.set_serving(True)
await serve_until_signal(server, drain=servicer.drain)
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2_grpc

from shoal.config.models import SecuritySection
from shoal.errors import ConfigError, StateError
from shoal.rpc.channel import join_address
from shoal.rpc.health import HealthServicer
from shoal.rpc.interceptor import ServiceInterceptor
from shoal.rpc.settings import MAX_CONCURRENT_CALLS, server_options
from shoal.security.tls import read_tls_files
from shoal.telemetry.logs import get_logger

log = get_logger(__name__)


class RpcServer:
    """One listening gRPC server. Create it inside a running event loop."""

    def __init__(self, host: str, port: int, security: SecuritySection) -> None:
        self._host = host
        self._port = port
        self._security = security
        self._health = HealthServicer()
        self._started = False
        self._server = grpc.aio.server(
            interceptors=(ServiceInterceptor(),), options=server_options(), maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    @property
    def port(self) -> int:
        """The bound port.

        Raises: StateError: the server has not started.
        """
        if not self._started:
            raise StateError("the server has no port before start(); call start() first")
        return self._port

    def add(self, register: Callable[[grpc.aio.Server], None], service_name: str) -> None:
        """Add a servicer before start.

        Args:
            register: Called with the grpc.aio server; calls the generated add_..._to_server.
            service_name: Full name for health checks, for example "shoal.rpc.v1.RolloutService".
        """
        if self._started:
            raise StateError(f"cannot add {service_name} after start(); add every service first")
        register(self._server)
        self._health.add_service(service_name)

    async def start(self) -> int:
        """Bind and listen; health stays NOT_SERVING.

        Returns: The bound port.
        Raises: ConfigError: the address cannot be bound, or a PEM file cannot be read.
        """
        self._port = self._bind()
        await self._server.start()
        self._started = True
        log.info("server_listening", address=join_address(self._host, self._port), insecure=self._security.insecure)
        return self._port

    def set_serving(self, serving: bool) -> None:
        """Set the health of this server and all its services."""
        self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones grace_s seconds, then cancel them. Repeating is harmless."""
        self._health.set_serving(False)
        await self._server.stop(grace_s)

    def _bind(self) -> int:
        address = join_address(self._host, self._port)
        try:
            if self._security.insecure:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._credentials())
        except RuntimeError as error:
            raise _bind_error(address) from error
        if port == 0:
            raise _bind_error(address)
        return int(port)

    def _credentials(self) -> grpc.ServerCredentials:
        files = read_tls_files(self._security)
        return grpc.ssl_server_credentials([(files.key, files.cert)], root_certificates=files.ca, require_client_auth=True)


def _bind_error(address: str) -> ConfigError:
    return ConfigError(
        f"cannot listen on {address}: the port is in use or the address is not of this machine; stop the other process, "
        "choose another port, or 0 for a free one"
    )


async def serve_until_signal(
    server: RpcServer,
    *,
    drain: Callable[[], Awaitable[object]] | None = None,
    drain_timeout_s: float = 30.0,
    grace_s: float = 5.0,
    stop_event: asyncio.Event | None = None,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or stop_event; then NOT_SERVING, drain, stop. A second signal skips the draining.

    Args:
        server: Already started.
        drain: Waits for running work; cancelled after drain_timeout_s seconds.
        grace_s: Seconds that running calls get after the drain.
        stop_event: Set by the service itself when it is done.
        on_ready: Called once a signal would be heeded, so that who is told then may send one.
    """
    stop = asyncio.Event() if stop_event is None else stop_event
    hurry = asyncio.Event()
    with_signals = _signals(lambda: hurry.set() if stop.is_set() else stop.set())
    async with with_signals:
        try:
            if on_ready is not None:
                on_ready()
            await stop.wait()
            server.set_serving(False)
            log.info("server_draining")
            if drain is not None:
                await _drain(drain, drain_timeout_s, hurry)
        finally:
            await server.stop(0.0 if hurry.is_set() else grace_s)
            log.info("server_stopped")


@asynccontextmanager
async def _signals(handler: Callable[[], None]) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _drain(drain: Callable[[], Awaitable[object]], timeout_s: float, hurry: asyncio.Event) -> None:
    async def run() -> None:
        await drain()

    tasks = {asyncio.create_task(run()), asyncio.create_task(hurry.wait())}
    done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            # The process ends either way; a failed drain must not keep it from closing its port.
            log.error("drain_failed", error=repr(result))
    if not done:
        log.warning("drain_timed_out", timeout_s=timeout_s)
