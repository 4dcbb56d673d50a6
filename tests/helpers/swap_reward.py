"""A reward server as a process of its own, registered with a coordinator; files in its folder say how it behaves.

hold-<service>-<phase>: calls of that phase (check, warm, live) wait while the file is there; the first of them writes
held-<service>-<phase>. broken-<service>: every live sample whose id has the file's text is an error. slow: live calls of all servers take
SLOW_S. Every answered call is a line of journal-<service>.jsonl, which outlives a kill.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from shoal_reward.scoring import ScoringPool
from shoal_reward.service import RewardService
from shoal_reward.servicer import SERVICE_NAME, RewardServicer

from shoal.clients.registry import LeaseKeeper, this_process
from shoal.config.models import SecuritySection
from shoal.reward import ScorerRegistry
from shoal.rpc.server import RpcServer, serve_until_signal
from shoal.rpc.v1 import reward_pb2
from shoal.rpc.v1.common_pb2 import SCORE_STATUS_ERROR
from shoal.rpc.v1.reward_pb2_grpc import add_RewardServiceServicer_to_server
from shoal.types import ServiceKind
from tests.helpers.swap_servers import registry_of

POLL_S = 0.01
SLOW_S = 0.03
SECURITY = SecuritySection(insecure=True)


def phase_of(sample_id: str) -> str:
    """What a call is for."""
    return {"check": "check", "probe": "warm"}.get(sample_id.split("-")[0], "live")


class HeldServicer(RewardServicer):
    """The real servicer, which does what the files say."""

    def __init__(self, service: RewardService, folder: Path) -> None:
        super().__init__(service)
        self._id = service.service_id
        self._folder = folder
        self._journal = os.open(folder / f"journal-{self._id}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:  # noqa: ANN401 - gRPC's name
        """Score a batch."""
        ids = [sample.sample_id for sample in request.samples]
        phase = phase_of(ids[0]) if ids else "check"
        await self._wait_while_held(phase)
        if phase == "live" and (self._folder / "slow").exists():
            await asyncio.sleep(SLOW_S)
        response = await super().Score(request, context)
        broken = self._folder / f"broken-{self._id}"
        if phase == "live" and broken.exists():
            text = broken.read_text()
            for result in response.results:
                if text in result.sample_id:
                    result.ClearField("value")
                    result.status, result.message = SCORE_STATUS_ERROR, "scripted"
        line = {"phase": phase, "scorer": request.scorer, "version": response.version, "ids": ids}
        os.write(self._journal, json.dumps(line).encode() + b"\n")
        return response

    async def _wait_while_held(self, phase: str) -> None:
        hold = self._folder / f"hold-{self._id}-{phase}"
        if hold.exists():
            (self._folder / f"held-{self._id}-{phase}").touch()
        while hold.exists():  # noqa: ASYNC110 - another process removes it
            await asyncio.sleep(POLL_S)


def main(service_id: str, run_id: str, coordinator: str, folder: str, scorers: list[tuple[str, str]], is_other_code: bool) -> int:
    """Serve until a signal; is_other_code: under the same names and versions."""
    registry = registry_of([(name, version) for name, version in scorers], is_other_code=is_other_code)
    asyncio.run(_serve(service_id, run_id, coordinator, Path(folder), registry))
    return 0


async def _serve(service_id: str, run_id: str, coordinator: str, folder: Path, registry: ScorerRegistry) -> None:
    service = RewardService(service_id=service_id, registry=registry, pool=ScoringPool(1))
    server = RpcServer("127.0.0.1", 0, SECURITY)
    servicer = HeldServicer(service, folder)
    server.add(lambda target: add_RewardServiceServicer_to_server(servicer, target), SERVICE_NAME)
    port = await server.start()
    server.set_serving(True)
    info = this_process(run_id=run_id, service_id=service_id, kind=ServiceKind.REWARD, address=f"127.0.0.1:{port}")
    async with LeaseKeeper(coordinator, info, SECURITY):
        await serve_until_signal(server)
