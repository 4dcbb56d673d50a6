"""Asks reward servers what they offer: those that have joined, and those that a call found unavailable, until they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from shoal.errors import ShoalError
from shoal.telemetry.logs import get_logger
from shoal_coordinator.members import RewardMember

log = get_logger(__name__)

ASK_AGAIN_S = 1.0


class RewardWatch:
    """Used from the event loop alone; `run` must be running for servers to be asked, each on its own: one that hangs holds up no other.

    Args:
        members: the servers there are now.
        on_answer: called when one has answered.
    """

    def __init__(self, members: Callable[[], Collection[RewardMember]], on_answer: Callable[[], None]) -> None:
        self._members = members
        self._on_answer = on_answer
        self._asked: set[RewardMember] = set()
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Look again who has to be asked."""
        self._changed.set()

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for member in self._members():
                    if member.suspect and member not in self._asked:
                        self._asked.add(member)
                        group.create_task(self._ask(member))
                await self._changed.wait()

    async def _ask(self, member: RewardMember) -> None:
        try:
            await member.probe()
        except ShoalError as error:
            log.debug("reward_server_silent", service_id=member.info.service_id, error=str(error))
            member.problem = str(error)
            await asyncio.sleep(ASK_AGAIN_S)
        else:
            member.suspect, member.problem = False, ""
            self._on_answer()
        finally:
            self._asked.discard(member)
            self.wake()
