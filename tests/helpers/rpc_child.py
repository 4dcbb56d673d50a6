"""Targets of child processes in tests of the wires; importable from anywhere."""

from __future__ import annotations

import asyncio
import sys

from shoal.clients.reward import RewardClient
from tests.helpers.rpc_services import PLAINTEXT, REWARD_SERVICE, FakeReward, register_reward, serving


def describe_scorer(address: str) -> str:
    """Open a channel in this process and ask for the first scorer's name."""

    async def ask() -> str:
        async with RewardClient(address, PLAINTEXT) as client:
            return (await client.describe(timeout_s=10))[0].name

    return asyncio.run(ask())


async def _serve() -> None:
    async with serving(register_reward(FakeReward()), REWARD_SERVICE) as address:
        sys.stdout.write(address + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
