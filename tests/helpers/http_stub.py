"""An HTTP server inside the test that answers as it is told, and notes what it was asked and how much of it at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StubRequest:
    """What came in. number counts from 1; headers have lower-case names."""

    number: int
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True, slots=True)
class StubAnswer:
    """What goes out."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Answering = Callable[[StubRequest], Awaitable[StubAnswer]]


@dataclass(slots=True)
class HttpStub:
    """A running server. max_open: most requests that were open at once."""

    answering: Answering
    port: int = 0
    requests: list[StubRequest] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it ends."""
        try:
            while request := await self._read(reader):
                writer.write(_rendered(await self._answered(request)))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answered(self, request: StubRequest) -> StubAnswer:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            return await self.answering(request)
        finally:
            self.num_open -= 1

    async def _read(self, reader: asyncio.StreamReader) -> StubRequest | None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))) or b"null")
        request = StubRequest(len(self.requests) + 1, head[0].split(" ")[1], headers, body)
        self.requests.append(request)
        return request


@asynccontextmanager
async def http_stub(answering: Answering, port: int = 0) -> AsyncIterator[HttpStub]:
    """Serve on the loopback; port 0 takes a free one."""
    stub = HttpStub(answering)
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        # asyncio reports a connection's task that ends as cancelled.
        with suppress(asyncio.CancelledError):
            await stub.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=4096)
    stub.port = server.sockets[0].getsockname()[1]
    try:
        yield stub
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def json_answer(value: object, status: int = 200, **headers: str) -> StubAnswer:
    """An answer with a JSON body."""
    return StubAnswer(status, json.dumps(value).encode(), headers)


def _rendered(answer: StubAnswer) -> bytes:
    headers = {"Content-Length": str(len(answer.body)), **answer.headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {answer.status} Stub\r\n{lines}\r\n".encode() + answer.body
