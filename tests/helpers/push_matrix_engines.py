"""The failure matrix's cluster with real rollout servers: vLLM engines that serve a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from shoal.clients.rollout import RolloutClient
from shoal.clients.weights import WeightSinkClient
from shoal.config.models import SecuritySection
from shoal.types import PieceDigests
from tests.helpers.push_matrix_cluster import SERVERS, Cluster, Zygote

CALL_TIMEOUT_S = 20.0
STAGE_TIMEOUT_S = 8.0
SECURITY = SecuritySection()


class EngineCluster(Cluster):
    """As `Cluster`; a gang of plain shards pushes a checkpoint's tensors into vLLM.

    Args:
        model: a folder with one safetensors file.
    """

    heal_timeout_s = 180.0

    def __init__(self, zygote: Zygote, folder: Path, model: Path) -> None:
        stages = {f"{stage}_timeout_s": STAGE_TIMEOUT_S for stage in ("prepare", "transfer", "verify", "commit")}
        super().__init__(
            zygote,
            folder,
            push=stages,
            model={"path": str(model)},
            data={"max_prompt_tokens": 16},
            rollout={"max_new_tokens": 32, "kv_cache_bytes": 32 << 20},
            coordinator={"lease_s": 4.0, "ready_timeout_s": 180.0},
        )
        self.checkpoint = str(model)
        self.deadlines_s = 4 * STAGE_TIMEOUT_S
        self._servers: dict[int, subprocess.Popen[bytes]] = {}

    def start_server(self, name: str) -> None:
        """Start `python -m shoal_rollout`."""
        argv = [sys.executable, "-m", "shoal_rollout", "--config", str(self.folder / "run.yaml"), "--service-id", name]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([*argv, "--coordinator", self._coordinator], stdout=log, stderr=log, env=environment)
        self.pids[name] = process.pid
        self._all_pids.add(process.pid)
        self._servers[process.pid] = process

    def ended(self) -> set[str]:
        """Names of the processes that have ended and were not started again."""
        servers = {pid for pid, process in self._servers.items() if process.poll() is not None}
        return super().ended() | {name for name, pid in self.pids.items() if pid in servers}

    def worker_pid(self, server: str) -> int:
        """The engine's process: the only child of a server, the worker inside."""
        children = psutil.Process(self.pids[server]).children()
        engines = [child.pid for child in children if "EngineCore" in " ".join(child.cmdline())]
        assert len(engines) == 1, [child.cmdline() for child in children]
        return engines[0]

    async def live(self, server: str, policy_version: int, plan_hash: str) -> tuple[PieceDigests, ...]:
        """Digests of the live weights of a server that says it serves this version."""
        address = (await self.status())["addresses"][server]
        async with RolloutClient(address, SECURITY) as client, WeightSinkClient(address, SECURITY) as sink:
            assert (await client.describe(timeout_s=CALL_TIMEOUT_S)).policy_version == policy_version
            return await sink.digest(policy_version, plan_hash, timeout_s=CALL_TIMEOUT_S)

    async def plans(self) -> dict[str, str]:
        """Plan hashes of the last push that each server committed."""
        plans: dict[str, Any] = (await self.status())["plans"]
        assert set(plans) == set(SERVERS)
        return plans
