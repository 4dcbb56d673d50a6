"""The REST API over a scripted backend."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from shoal_coordinator.rest import RestServer, create_app
from shoal_coordinator.rest_models import (
    AlertModel,
    AuditModel,
    Command,
    ProbeModel,
    PushModel,
    ServerAuditModel,
    ServiceModel,
    StatusModel,
    WaitModel,
)
from shoal_coordinator.rest_reward_models import (
    ActivateBody,
    AddBody,
    ComparisonModel,
    LogModel,
    ReasonBody,
    RewardsModel,
    RouteModel,
    ShadowBody,
    SlowSamplesModel,
)

from shoal.errors import ConfigError, DeadlineError, NotFoundError, ShoalError, StateError


class ScriptedBackend:
    """A run at step 3 that refuses whatever `refuse` says."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.refuse: str | None = None
        self.verify_timeouts_s: list[float] = []
        self.verify_error: ShoalError | None = None

    def status(self) -> StatusModel:
        wait = WaitModel(waiter="coordinator", waits_for=["critic"], what="update of step 4", since_unix_s=10.0, waited_s=2.0)
        return StatusModel(
            run_id="run",
            state="training",
            state_since_unix_s=9.0,
            step=3,
            total_steps=10,
            policy_version=3,
            waiting_for=[wait],
            evaluations=[],
            pause_requested=False,
            stop_requested=False,
            error=None,
            queue_depth=4,
            started_unix_s=1.0,
            wall_s=11.0,
            run_folder="runs/run",
            pushes=None,
            alert=AlertModel(what="too many samples have no score", service="math@1", error="refused", since_unix_s=8.0),
            route_revision=2,
            grpc_address="127.0.0.1:7000",
        )

    def services(self) -> list[ServiceModel]:
        return []

    def steps(self, after: int, limit: int) -> list[dict[str, float | None]]:
        return [{"step": float(step), "reward": None} for step in range(after + 1, 4)][:limit]

    def pushes(self, limit: int) -> list[PushModel]:
        return []

    def audits(self, limit: int) -> list[AuditModel]:
        return [make_audit()][:limit]

    async def verify_weights(self, timeout_s: float) -> AuditModel:
        self.verify_timeouts_s.append(timeout_s)
        if self.verify_error is not None:
            raise self.verify_error
        return make_audit()

    def command(self, command: Command) -> None:
        if self.refuse is not None:
            raise StateError(self.refuse)
        self.commands.append(command)


class NoRewards:
    """Reward routes have tests of their own; refuses whatever is asked."""

    def rewards(self) -> RewardsModel:
        raise NotImplementedError

    def comparison(self, number: int) -> ComparisonModel:
        raise NotImplementedError

    def reward_log(self, limit: int) -> LogModel:
        raise NotImplementedError

    def slow_samples(self) -> SlowSamplesModel:
        raise NotImplementedError

    async def add_route(self, body: AddBody) -> RouteModel:
        raise NotImplementedError

    async def shadow_route(self, number: int, body: ShadowBody) -> RouteModel:
        raise NotImplementedError

    async def activate_route(self, number: int, body: ActivateBody) -> RouteModel:
        raise NotImplementedError

    async def rollback_route(self, body: ReasonBody) -> RouteModel:
        raise NotImplementedError

    async def retire_route(self, number: int, body: ReasonBody) -> RouteModel:
        raise NotImplementedError


def make_audit() -> AuditModel:
    """Version 3, one server that is equal."""
    probe = ProbeModel(num_tokens=8, max_logprob_difference=0.001, greedy_share=1.0)
    server = ServerAuditModel(
        server_id="rollout-0",
        result="equal",
        num_parameters=2,
        num_pieces=3,
        num_differing=0,
        first_difference=None,
        error=None,
        probe=probe,
        probe_error=None,
    )
    return AuditModel(policy_version=3, is_equal=True, servers=[server], started_unix_s=1.0, duration_s=0.5)


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
async def api(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(backend, NoRewards()))
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as client:
        yield client


async def test_rest_status_says_who_waits_for_whom(api: httpx.AsyncClient) -> None:
    body = (await api.get("/v1/status")).json()
    assert body["state"] == "training"
    assert body["waiting_for"] == [
        {"waiter": "coordinator", "waits_for": ["critic"], "what": "update of step 4", "since_unix_s": 10.0, "waited_s": 2.0}
    ]


async def test_rest_status_shows_the_alert_and_the_route(api: httpx.AsyncClient) -> None:
    body = (await api.get("/v1/status")).json()
    assert body["alert"] == {"what": "too many samples have no score", "service": "math@1", "error": "refused", "since_unix_s": 8.0}
    assert (body["route_revision"], body["grpc_address"]) == (2, "127.0.0.1:7000")


async def test_rest_steps_pages(api: httpx.AsyncClient) -> None:
    body = (await api.get("/v1/steps", params={"after": 1, "limit": 1})).json()
    assert body == {"steps": [{"step": 2.0, "reward": None}]}


@pytest.mark.parametrize("command", list(Command))
async def test_rest_command_reaches_the_run(api: httpx.AsyncClient, backend: ScriptedBackend, command: Command) -> None:
    answer = await api.post(f"/v1/{command}")
    assert answer.status_code == 200
    assert answer.json()["run_id"] == "run"
    assert backend.commands == [command]


async def test_rest_answers_409_to_an_impossible_command(api: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.refuse = "cannot resume a run that is not paused (it is training)"
    answer = await api.post("/v1/resume")
    assert answer.status_code == 409
    assert answer.json()["error"]["what"] == backend.refuse


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/steps?after=-1", 422), ("/v1/steps?limit=x", 422)])
async def test_rest_errors_say_what_value_and_fix(api: httpx.AsyncClient, path: str, status: int) -> None:
    answer = await api.get(path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"what", "value", "fix"}
    assert all(error.values())


async def test_rest_names_the_offending_value(api: httpx.AsyncClient) -> None:
    error = (await api.get("/v1/steps?limit=0")).json()["error"]
    assert error["what"] == "query.limit: Input should be greater than or equal to 1"
    assert error["value"] == "'0'"


async def test_rest_verify_weights_answers_the_comparison(api: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    answer = await api.post("/v1/weights/verify?timeout_s=7")
    assert answer.status_code == 200
    assert answer.json() == make_audit().model_dump()
    assert (await api.get("/v1/audits")).json() == {"audits": [make_audit().model_dump()]}
    await api.post("/v1/weights/verify")
    assert backend.verify_timeouts_s == [7.0, 300.0]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StateError("no weight push has been committed yet"), 409),
        (NotFoundError("no actor gang is registered"), 409),
        (DeadlineError("the audit did not end within 7 s"), 504),
    ],
)
async def test_rest_verify_weights_says_why_it_cannot(
    api: httpx.AsyncClient, backend: ScriptedBackend, error: ShoalError, status: int
) -> None:
    backend.verify_error = error
    answer = await api.post("/v1/weights/verify")
    assert answer.status_code == status
    assert answer.json()["error"]["what"] == str(error)


@pytest.mark.parametrize("timeout_s", ["0", "-1", "4000", "x"])
async def test_rest_verify_weights_refuses_an_unbounded_wait(api: httpx.AsyncClient, timeout_s: str) -> None:
    assert (await api.post(f"/v1/weights/verify?timeout_s={timeout_s}")).status_code == 422


async def test_rest_health_and_metrics(api: httpx.AsyncClient) -> None:
    assert (await api.get("/healthz")).json() == {"status": "ok"}
    assert "python_info" in (await api.get("/metrics")).text


async def test_rest_openapi_documents_every_answer(api: httpx.AsyncClient) -> None:
    paths = (await api.get("/openapi.json")).json()["paths"]
    for path in ("/v1/status", "/v1/services", "/v1/steps", "/v1/pushes", "/v1/audits"):
        assert paths[path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    assert "409" in paths["/v1/pause"]["post"]["responses"]
    assert {"200", "409", "504"} <= set(paths["/v1/weights/verify"]["post"]["responses"])


def test_rest_server_refuses_a_port_in_use(backend: ScriptedBackend) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*set coordinator.rest_port"):
            RestServer(create_app(backend, NoRewards()), "127.0.0.1", port)


async def test_rest_server_serves_in_the_running_loop(backend: ScriptedBackend) -> None:
    server = RestServer(create_app(backend, NoRewards()), "127.0.0.1", 0)
    serving = asyncio.create_task(server.serve())
    await server.wait_started(5.0)
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://127.0.0.1:{server.port}/healthz")).status_code == 200
    server.stop()
    await serving
