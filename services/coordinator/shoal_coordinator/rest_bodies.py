"""A bound on what the REST API reads: the coordinator must not hold whatever somebody sends."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_DROPPED_BYTES = 64 << 20
"""Of a body that is too large: who is cut off while still sending may never see the answer."""


class BodyLimit:
    """ASGI middleware: a body of more than max_bytes is answered with 413, and not kept."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        await self._app(scope, receive if scope["type"] != "http" else _bounded(receive, self._max_bytes), send)


def _bounded(receive: Receive, max_bytes: int) -> Receive:
    num_bytes = 0

    async def receive_some() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes <= max_bytes:
            return message
        while message.get("more_body", False) and num_bytes <= MAX_DROPPED_BYTES:
            message = await receive()
            num_bytes += len(message.get("body", b""))
        raise HTTPException(413, f"the body has more than {max_bytes} bytes")

    return receive_some
