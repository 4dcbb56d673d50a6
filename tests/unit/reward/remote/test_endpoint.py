from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from shoal_reward.remote.endpoint import JsonEndpoint
from shoal_reward.remote.settings import EndpointSection

from shoal.errors import CapacityError, CodecError, ConfigError, DeadlineError, InvalidRequestError, UnavailableError
from tests.helpers.http_stub import Answering, StubAnswer, StubRequest, http_stub, json_answer

FAST: dict[str, Any] = {"model": "m", "backoff_s": 0.001, "max_backoff_s": 0.002}
SECRET = "sk-very-secret"  # noqa: S105


def _endpoint(url: str, **settings: object) -> JsonEndpoint:
    return JsonEndpoint(EndpointSection.model_validate({**FAST, "url": url, **settings}))


def _statuses(*statuses: int, **headers: str) -> Answering:
    async def answering(request: StubRequest) -> StubAnswer:
        status = statuses[min(request.number, len(statuses)) - 1]
        return json_answer({"number": request.number}, status, **headers)

    return answering


async def test_two_server_errors_then_the_answer() -> None:
    async with http_stub(_statuses(500, 500, 200)) as stub:
        assert await _endpoint(stub.url).post("/x", {"a": 1}) == {"number": 3}
        assert [(request.path, request.body) for request in stub.requests] == [("/x", {"a": 1})] * 3


async def test_a_server_that_always_fails_is_given_up_after_max_tries() -> None:
    async with http_stub(_statuses(500)) as stub:
        with pytest.raises(UnavailableError, match=r"answered 500: .*given up after 4 tries"):
            await _endpoint(stub.url, max_tries=4).post("/x", {})
        assert len(stub.requests) == 4


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_refusal_is_not_tried_again(status: int) -> None:
    async with http_stub(_statuses(status)) as stub:
        with pytest.raises(InvalidRequestError, match=f"answered {status}"):
            await _endpoint(stub.url).post("/x", {})
        assert len(stub.requests) == 1


async def test_a_redirect_is_refused_and_not_followed() -> None:
    async with http_stub(_statuses(307, Location="/elsewhere")) as stub:
        with pytest.raises(InvalidRequestError, match="redirects are refused"):
            await _endpoint(stub.url).post("/x", {})
        assert [request.path for request in stub.requests] == ["/x"]


async def test_the_pause_that_an_overloaded_server_asks_for_is_kept() -> None:
    async with http_stub(_statuses(429, 200, **{"Retry-After": "1"})) as stub:
        started = time.monotonic()
        assert await _endpoint(stub.url).post("/x", {}) == {"number": 2}
        assert time.monotonic() - started >= 1.0


async def test_a_pause_beyond_the_deadline_is_not_waited_for() -> None:
    async with http_stub(_statuses(429, 200, **{"Retry-After": "3600"})) as stub:
        with pytest.raises(UnavailableError, match=r"asked for a pause of 3600 s; given up after 1 try"):
            await _endpoint(stub.url).post("/x", {})


async def test_a_server_that_refuses_connections_is_reached_once_it_is_up() -> None:
    async with http_stub(_statuses(200)) as earlier:
        port = earlier.port
    endpoint = _endpoint(f"http://127.0.0.1:{port}", max_tries=100, backoff_s=0.1, max_backoff_s=0.1)
    call = asyncio.create_task(endpoint.post("/x", {}))
    await asyncio.sleep(0.3)
    assert not call.done()
    async with http_stub(_statuses(200), port):
        assert await call == {"number": 1}


async def test_a_server_that_stays_away_is_an_error_that_names_it() -> None:
    async with http_stub(_statuses(200)) as earlier:
        url = earlier.url
    with pytest.raises(UnavailableError, match=rf"{url} cannot be reached .*given up after 3 tries"):
        await _endpoint(url, max_tries=3).post("/x", {})


async def test_a_connection_that_breaks_off_is_tried_again() -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        if request.number == 1:
            raise ConnectionError
        return json_answer({})

    async with http_stub(answering) as stub:
        assert await _endpoint(stub.url).post("/x", {}) == {}


async def test_a_silent_server_costs_a_try_its_time_and_then_the_deadline() -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    async with http_stub(answering) as stub:
        with pytest.raises(DeadlineError, match=r"did not answer within .*given up after [23] tries"):
            await _endpoint(stub.url, timeout_s=0.1, deadline_s=0.25).post("/x", {})


async def test_no_more_requests_are_open_than_the_limit_over_all_scorers() -> None:
    num_waiting, all_in = 0, asyncio.Event()

    async def answering(request: StubRequest) -> StubAnswer:
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == 64:
            all_in.set()
        await all_in.wait()
        return json_answer({})

    async with http_stub(answering) as stub:
        endpoints = [_endpoint(stub.url, max_open=64) for _ in range(2)]
        answers = await asyncio.gather(*(endpoints[index % 2].post("/x", {}) for index in range(2000)))
        assert answers == [{}] * 2000
        assert stub.max_open == 64


async def test_waiting_for_a_turn_costs_no_deadline() -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        await asyncio.sleep(0.1)
        return json_answer({})

    async with http_stub(answering) as stub:
        endpoint = _endpoint(stub.url, max_open=1, deadline_s=0.3)
        assert await asyncio.gather(*(endpoint.post("/x", {}) for _ in range(6))) == [{}] * 6


async def test_a_cancelled_call_gives_its_turn_back() -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        if request.number == 1:
            arrived.set()
            await asyncio.Event().wait()
        return json_answer({})

    arrived = asyncio.Event()
    async with http_stub(answering) as stub:
        endpoint = _endpoint(stub.url, max_open=1)
        call = asyncio.create_task(endpoint.post("/x", {}))
        await arrived.wait()
        call.cancel()
        assert await endpoint.post("/x", {}) == {}


@pytest.mark.parametrize("body", [b"", b"<html>", b"[" * 100_000, b"[1]", b"7"])
async def test_an_answer_that_is_no_object_is_an_error_and_not_tried_again(body: bytes) -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        return StubAnswer(body=body)

    async with http_stub(answering) as stub:
        with pytest.raises(CodecError, match="answered 200"):
            await _endpoint(stub.url).post("/x", {})
        assert len(stub.requests) == 1


async def test_an_endless_answer_is_cut_off() -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        return StubAnswer(body=b'{"a": "' + b"x" * 5000 + b'"}')

    async with http_stub(answering) as stub:
        with pytest.raises(CapacityError, match="max_response_bytes, 2000"):
            await _endpoint(stub.url, max_response_bytes=2000).post("/x", {})


async def test_the_token_is_sent_and_shown_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = tmp_path / "key"
    key.write_text(f"{SECRET}\n")

    async def answering(request: StubRequest) -> StubAnswer:
        return json_answer({"error": f"wrong key {SECRET}"}, 401)

    async with http_stub(answering) as stub:
        endpoint = _endpoint(stub.url, api_key_file=str(key))
        with pytest.raises(InvalidRequestError) as raised:
            await endpoint.post("/x", {})
        assert stub.requests[0].headers["authorization"] == f"Bearer {SECRET}"
    assert "***" in str(raised.value)
    assert SECRET not in f"{raised.value} {endpoint!r} {vars(endpoint)} {caplog.text}"


@pytest.mark.parametrize("content", ["", "two words", "schl\u00fcssel", "x" * 20_000])
def test_a_file_without_one_token_is_refused_without_showing_it(tmp_path: Path, content: str) -> None:
    key = tmp_path / "key"
    key.write_text(content)
    with pytest.raises(ConfigError, match="does not hold one token") as raised:
        _endpoint("http://127.0.0.1:1", api_key_file=str(key))
    assert not content or content not in str(raised.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api_key_file .*nowhere cannot be read"):
        _endpoint("https://judge", api_key_file=str(tmp_path / "nowhere"))
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"ca_file .* cannot be read"):
        _endpoint("https://judge", ca_file=str(tmp_path / "ca.pem"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "judge:8000"}, "http://host:port"),
        ({"url": "http://judge/v1?key=1"}, "http://host:port"),
        ({"url": "https://user:word@judge/v1"}, "put the token into a file"),
        ({"url": "http://judge/v1", "api_key_file": "key"}, "travel in the clear"),
    ],
)
def test_addresses_that_would_leak_or_mislead_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EndpointSection.model_validate({"model": "m", **settings})


def test_a_token_may_travel_to_this_machine_or_where_it_is_allowed() -> None:
    for url, insecure in (("http://127.0.0.1:8000", False), ("http://judge", True), ("https://judge", False)):
        assert EndpointSection(model="m", api_key_file="key", url=f"{url}/", insecure=insecure).url == url
