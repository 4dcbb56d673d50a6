"""`shoal weights verify` and the line about pushes, against a page that answers like a coordinator."""

from __future__ import annotations

import copy
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.cli.status import push_text
from shoal.cli.weights import verify_weights
from shoal.errors import DeadlineError, StateError, UnavailableError

EQUAL: dict[str, Any] = {
    "policy_version": 4,
    "is_equal": True,
    "started_unix_s": 1.0,
    "duration_s": 0.5,
    "servers": [
        {
            "server_id": "rollout-0",
            "result": "equal",
            "num_parameters": 12,
            "num_pieces": 30,
            "num_differing": 0,
            "first_difference": None,
            "error": None,
            "probe": {"num_tokens": 64, "max_logprob_difference": 0.00042, "greedy_share": 0.96875},
            "probe_error": None,
        }
    ],
}


@contextmanager
def answering(status: int, body: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """A coordinator with one answer; its address, and the requests that it got."""
    requests: list[str] = []

    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(self.requestline)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


def run_verify(body: dict[str, Any], *, as_json: bool = False) -> tuple[int, str]:
    out = io.StringIO()
    with answering(200, body) as (address, _):
        code = verify_weights(address, 7.0, Console(file=out, width=200), as_json=as_json)
    return code, out.getvalue()


def with_server(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    audit = copy.deepcopy(EQUAL)
    change(audit["servers"][0])
    return audit | {"is_equal": audit["servers"][0]["result"] == "equal"}


def test_verify_shows_every_server_and_succeeds_if_all_are_equal() -> None:
    code, text = run_verify(EQUAL)
    assert code == 0
    assert text.splitlines()[0] == "policy version 4, compared in 0.5 s"
    assert text.splitlines()[2].split() == ["rollout-0", "equal", "12", "30", "0", "0.00042", "96.9%"]


def test_verify_names_the_first_parameter_that_differs_and_fails() -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight of worker 1 (from model.layers.0.self_attn.k_proj.weight of rank 0)"
    code, text = run_verify(with_server(lambda server: server.update(result="differs", num_differing=3, first_difference=name)))
    assert code == 1
    assert f"rollout-0: the first parameter that differs is {name}" in text


def test_verify_fails_if_a_server_could_not_be_compared() -> None:
    changes = {"result": "unknown", "error": "down [now]", "probe": None, "probe_error": "draining"}
    code, text = run_verify(with_server(lambda server: server.update(changes)))
    assert code == 1
    assert "rollout-0: its weights could not be compared: down [now]" in text
    assert "rollout-0: no probe: draining" in text


def test_verify_says_if_a_log_probability_was_not_finite() -> None:
    probe = {"num_tokens": 4, "max_logprob_difference": None, "greedy_share": 1.0}
    _, text = run_verify(with_server(lambda server: server.update(probe=probe)))
    assert text.splitlines()[2].split()[-3:] == ["not", "finite", "100.0%"]


def test_verify_prints_the_answer_as_json() -> None:
    code, text = run_verify(EQUAL, as_json=True)
    assert (code, json.loads(text)) == (0, EQUAL)


@pytest.mark.parametrize(("status", "error"), [(409, StateError), (504, DeadlineError)])
def test_verify_says_why_nothing_was_compared(status: int, error: type[Exception]) -> None:
    body = {"error": {"what": "no weight push has been committed yet", "value": "/v1/weights/verify", "fix": "wait"}}
    with answering(status, body) as (address, _), pytest.raises(error, match=r"^no weight push has been committed yet$"):
        verify_weights(address, 7.0, Console(file=io.StringIO()), as_json=False)


def test_verify_says_that_nothing_answers() -> None:
    with pytest.raises(UnavailableError, match="is the run up"):
        verify_weights("127.0.0.1:1", 7.0, Console(file=io.StringIO()), as_json=False)


def test_verify_is_a_command_that_passes_its_deadline_on() -> None:
    differs = with_server(lambda server: server.update(result="differs", num_differing=1, first_difference="w"))
    with answering(200, differs) as (address, requests):
        result = CliRunner().invoke(app, ["weights", "verify", "--address", address, "--timeout-s", "9", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == differs
    assert requests == ["POST /v1/weights/verify?timeout_s=9 HTTP/1.1"]


def test_status_tells_of_the_last_push_and_of_failures() -> None:
    pushes = {
        "num_pushes": 9,
        "num_failed_servers": 0,
        "policy_version": 8,
        "num_servers": 2,
        "total_s": 1.234,
        "sent_bytes": 5_400_000,
        "dense_bytes": 540_000_000,
        "delta_share": 0.01,
        "max_pause_ms": 12.34,
        "last_audit": None,
    }
    line = "last push: version 8 to 2 servers in 1.23 s, sent 5.4 of 540.0 MB (1.0%), pause 12.3 ms"
    assert push_text(pushes) == line
    failing = pushes | {"num_failed_servers": 3, "last_audit": "differs"}
    assert push_text(failing) == f"{line}; 3 servers missed in 9 pushes; last audit: differs"
