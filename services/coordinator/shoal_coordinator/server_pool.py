"""Live servers of one kind, and how much work each has: the least loaded one gets the next piece.

Used from the event loop alone. Registration adds a server, an expired lease or fencing removes it; whoever works on it
then is told through `ServerLease.gone`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shoal.errors import UnavailableError
from shoal_coordinator.waiting import WaitBoard

ClientT = TypeVar("ClientT")

RECHECK_S = 0.25
"""What suits may change without the pool: a server learns a scorer, a rest is over."""


@dataclass(slots=True, kw_only=True)
class ServerLease(Generic[ClientT]):
    """A server that work is being given to. outstanding is the work (tokens) on it; gone is set when it leaves the pool."""

    server_id: str
    client: ClientT
    outstanding: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class ServerPool(Generic[ClientT]):
    """Servers by id.

    Args:
        what: names the kind in messages, such as "rollout server".
        waits: shows on whom the dispatcher waits.
    """

    def __init__(self, what: str, waits: WaitBoard) -> None:
        self._what = what
        self._waits = waits
        self._servers: dict[str, ServerLease[ClientT]] = {}
        self._changed = asyncio.Event()

    def add(self, server_id: str, client: ClientT) -> None:
        """Give a server traffic; one under the same id is replaced, as after a restart."""
        self.remove(server_id)
        self._servers[server_id] = ServerLease(server_id=server_id, client=client)
        self._wake()

    def remove(self, server_id: str) -> None:
        """Give a server no more traffic and tell those who wait for its answers; unknown ids are ignored."""
        server = self._servers.pop(server_id, None)
        if server is not None:
            server.gone.set()
            self._wake()

    def server_ids(self) -> tuple[str, ...]:
        """Ids of the servers that take traffic, sorted."""
        return tuple(sorted(self._servers))

    async def pick(
        self,
        timeout_s: float,
        avoid: Collection[str] = (),
        patience_s: float = 1.0,
        suits: Callable[[ServerLease[ClientT]], bool] | None = None,
    ) -> ServerLease[ClientT]:
        """Choose the server with the least outstanding work, waiting for one if there is none.

        Args:
            timeout_s: how long to wait for any server.
            avoid: servers that have just failed; one of them is chosen only when no other came within patience_s.
            patience_s: see avoid; it also spaces retries on a lone server that restarts.
            suits: which servers may be chosen; None: all.
        Raises: UnavailableError: no server within timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        avoid_until = min(deadline, time.monotonic() + patience_s)
        with ExitStack() as shown:
            is_shown = False
            while True:
                self._changed.clear()
                now = time.monotonic()
                server = self.choose(avoid, suits)
                if server is None and now >= avoid_until:
                    server = self.choose((), suits)
                if server is not None:
                    return server
                if now >= deadline:
                    raise self._none_came(timeout_s, suits is not None)
                if not is_shown:
                    shown.enter_context(self._waits.waiting("dispatcher", (self._what,), f"a {self._what} that takes traffic"))
                    is_shown = True
                left_s = (avoid_until if now < avoid_until else deadline) - now
                await self._wait_for_change(left_s if suits is None else min(left_s, RECHECK_S))

    def choose(
        self, avoid: Collection[str] = (), suits: Callable[[ServerLease[ClientT]], bool] | None = None
    ) -> ServerLease[ClientT] | None:
        """The server with the least outstanding work, without waiting; None if there is none."""
        candidates = [server for server_id, server in self._servers.items() if server_id not in avoid and (suits is None or suits(server))]
        return min(candidates, key=lambda server: (server.outstanding, server.server_id), default=None)

    def servers(self) -> tuple[ServerLease[ClientT], ...]:
        """The servers that take traffic, by id."""
        return tuple(server for _, server in sorted(self._servers.items()))

    @contextmanager
    def working(self, server: ServerLease[ClientT], amount: int) -> Iterator[None]:
        """Count amount (tokens) as outstanding on server while the block runs."""
        server.outstanding += amount
        try:
            yield
        finally:
            server.outstanding -= amount

    def _none_came(self, timeout_s: float, is_choosy: bool) -> UnavailableError:
        if is_choosy and self._servers:
            there_is = ", ".join(self.server_ids())
            return UnavailableError(f"no {self._what} was fit for the work for {timeout_s:g} s; there is: {there_is}")
        return UnavailableError(f"no {self._what} was registered for {timeout_s:g} s: start one, and look into the log of the last one")

    async def _wait_for_change(self, timeout_s: float) -> None:
        # Not wait_for: on 3.11 it swallows a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
