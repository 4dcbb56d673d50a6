"""A page that answers like a coordinator, for tests of the command line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked."""

    method: str
    path: str
    body: Answer


@dataclass(slots=True)
class FakeRest:
    """Answers by "METHOD /path"; several answers to one are given one after the other, the last one again and again."""

    answers: Mapping[str, list[tuple[int, Answer]]]
    address: str = ""
    requests: list[Request] = field(default_factory=list)

    def next_answer(self, asked: str) -> tuple[int, Answer]:
        """The answer to a request."""
        known = self.answers.get(asked)
        if known is None:
            return error(404, "Not Found", "see /docs")
        return known.pop(0) if len(known) > 1 else known[0]


def error(status: int, what: str, fix: str = "look at /v1/rewards") -> tuple[int, Answer]:
    """A coordinator's refusal."""
    return status, {"error": {"what": what, "value": "", "fix": fix}}


@contextmanager
def fake_rest(answers: Mapping[str, Answer | tuple[int, Answer] | list[Answer]]) -> Iterator[FakeRest]:
    """Serve answers, each a body, a status and a body, or a list of bodies."""
    rest = FakeRest({asked: _listed(answer) for asked, answer in answers.items()})

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            rest.requests.append(Request(method=self.command, path=self.path, body=body))
            status, answer = rest.next_answer(f"{self.command} {self.path}")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        rest.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield rest
        finally:
            server.shutdown()
            thread.join()


def _listed(answer: Answer | tuple[int, Answer] | list[Answer]) -> list[tuple[int, Answer]]:
    if isinstance(answer, tuple):
        return [answer]
    return [(200, one) for one in (answer if isinstance(answer, list) else [answer])]
