"""The REST API: run control, services, steps, pushes, health and metrics.

`create_app` knows nothing of the run but `RestBackend`; `RestServer` serves it in the coordinator's own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Annotated, Protocol

import uvicorn
from fastapi import FastAPI, Query
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from shoal.errors import ConfigError
from shoal_coordinator.rest_bodies import BodyLimit
from shoal_coordinator.rest_errors import add_error_handlers
from shoal_coordinator.rest_models import (
    AuditModel,
    AuditsModel,
    Command,
    ErrorModel,
    HealthModel,
    PushesModel,
    PushModel,
    ServiceModel,
    ServicesModel,
    StatusModel,
    StepsModel,
)
from shoal_coordinator.rest_rewards import RewardBackend, add_reward_routes

MAX_STEPS_PER_PAGE = 10_000
MAX_PUSHES_PER_PAGE = 1_000
MAX_AUDITS_PER_PAGE = 100
MAX_VERIFY_S = 3600.0
MAX_BODY_BYTES = 1 << 20
_CONFLICT: dict[int | str, dict[str, object]] = {409: {"model": ErrorModel, "description": "not possible in this state"}}


class RestBackend(Protocol):
    """What the API shows and steers."""

    def status(self) -> StatusModel:
        """Where the run is."""

    def services(self) -> list[ServiceModel]:
        """Registered services."""

    def steps(self, after: int, limit: int) -> list[dict[str, float | None]]:
        """Metrics of up to limit steps with a higher number than after, oldest first."""

    def pushes(self, limit: int) -> list[PushModel]:
        """The last pushes, newest last."""

    def command(self, command: Command) -> None:
        """Pause, resume or stop. Raises: StateError: not possible now."""


class AuditBackend(Protocol):
    """Comparisons of servers with the trainer."""

    def audits(self, limit: int) -> list[AuditModel]:
        """The last audits, newest last."""

    async def verify_weights(self, timeout_s: float) -> AuditModel:
        """Compare now. Raises: StateError: there is nothing to compare. DeadlineError: not done within timeout_s."""
        ...


class Backend(RestBackend, AuditBackend, Protocol):
    """Everything that the API is over."""


def create_app(backend: Backend, rewards: RewardBackend) -> FastAPI:
    """Build the API over the backends of the run and of its reward routes."""
    app = FastAPI(title="Shoal coordinator", version="1", description="Control and watch one training run.")
    _add_reads(app, backend)
    _add_commands(app, backend)
    _add_audits(app, backend)
    add_reward_routes(app, rewards)
    _add_process_routes(app)
    add_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    return app


def _add_reads(app: FastAPI, backend: RestBackend) -> None:
    @app.get("/v1/status", summary="Where the run is and who waits for whom", tags=["run"])
    async def read_status() -> StatusModel:
        return backend.status()

    @app.get("/v1/services", summary="Registered services", tags=["services"])
    async def read_services() -> ServicesModel:
        return ServicesModel(services=backend.services())

    @app.get("/v1/steps", summary="Metrics of the steps", tags=["run"])
    async def read_steps(
        after: Annotated[int, Query(ge=0, description="Only steps with a higher number.")] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_STEPS_PER_PAGE, description="At most so many.")] = 1000,
    ) -> StepsModel:
        return StepsModel(steps=backend.steps(after, limit))

    @app.get("/v1/pushes", summary="Weight pushes", tags=["services"])
    async def read_pushes(
        limit: Annotated[int, Query(ge=1, le=MAX_PUSHES_PER_PAGE, description="At most so many.")] = 100,
    ) -> PushesModel:
        return PushesModel(pushes=backend.pushes(limit))


def _add_commands(app: FastAPI, backend: RestBackend) -> None:
    def run(command: Command) -> StatusModel:
        backend.command(command)
        return backend.status()

    @app.post("/v1/pause", summary="Pause at the next step border", tags=["run"], responses=_CONFLICT)
    async def pause() -> StatusModel:
        return run(Command.PAUSE)

    @app.post("/v1/resume", summary="Go on after a pause", tags=["run"], responses=_CONFLICT)
    async def resume() -> StatusModel:
        return run(Command.RESUME)

    @app.post("/v1/stop", summary="End after the current step", tags=["run"], responses=_CONFLICT)
    async def stop() -> StatusModel:
        return run(Command.STOP)


def _add_audits(app: FastAPI, backend: AuditBackend) -> None:
    late: dict[int | str, dict[str, object]] = {504: {"model": ErrorModel, "description": "not done within timeout_s"}}

    @app.get("/v1/audits", summary="Comparisons of the servers' weights with the trainer's", tags=["services"])
    async def read_audits(
        limit: Annotated[int, Query(ge=1, le=MAX_AUDITS_PER_PAGE, description="At most so many.")] = 10,
    ) -> AuditsModel:
        return AuditsModel(audits=backend.audits(limit))

    summary = "Compare the servers' live weights with the trainer's"

    @app.post("/v1/weights/verify", summary=summary, tags=["services"], responses=_CONFLICT | late)
    async def verify_weights(
        timeout_s: Annotated[float, Query(gt=0, le=MAX_VERIFY_S, description="Seconds to wait for the trainer and to compare.")] = 300.0,
    ) -> AuditModel:
        return await backend.verify_weights(timeout_s)


def _add_process_routes(app: FastAPI) -> None:
    @app.get("/healthz", summary="The process serves", tags=["process"])
    async def read_health() -> HealthModel:
        return HealthModel()

    @app.get("/metrics", summary="Prometheus metrics", tags=["process"], response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the coordinator's `__main__` owns the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


class RestServer:
    """Serves an app on host:port in the running event loop."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        self._socket = bind(host, port)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2)
        self._server = _Server(config)

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._socket.getsockname()[1])

    async def serve(self) -> None:
        """Serve until `stop` or cancellation."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    async def wait_started(self, timeout_s: float) -> None:
        """Wait until requests are answered.

        Raises: TimeoutError: not within timeout_s.
        """
        async with asyncio.timeout(timeout_s):
            while not self._server.started:  # noqa: ASYNC110 - uvicorn offers a flag, no event
                await asyncio.sleep(0.01)

    def stop(self) -> None:
        """Let `serve` return after open requests, at most 2 s later."""
        self._server.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP socket.

    Raises: ConfigError: the port is in use or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"the REST API cannot listen on {host}:{port}: {error.strerror}; "
            "set coordinator.rest_port to a free port (0 picks one) and coordinator.host to an address of this machine"
        ) from error
    return bound
