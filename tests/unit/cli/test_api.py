"""Addresses at which no coordinator answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from shoal.cli.api import CoordinatorApi
from shoal.errors import ConfigError, InvalidRequestError, UnavailableError


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def web_page() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_api_refuses_an_address_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="address 'nonsense:xx' cannot be read"):
        CoordinatorApi("nonsense:xx")


def test_api_says_that_nothing_answers() -> None:
    with (
        CoordinatorApi("127.0.0.1:1") as api,
        pytest.raises(UnavailableError, match=r"no answer from the coordinator at http://127\.0\.0\.1:1"),
    ):
        api.status()


def test_api_tells_another_server_from_a_coordinator(web_page: str) -> None:
    with CoordinatorApi(web_page) as api, pytest.raises(UnavailableError, match="answered, but not as a coordinator"):
        api.status()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "half of a character \udcff"])
def test_api_does_not_send_what_json_cannot_carry(value: object) -> None:
    with CoordinatorApi("127.0.0.1:1") as api, pytest.raises(InvalidRequestError, match="the request cannot be written"):
        api.post("/v1/rewards/routes", {"value": value})
