"""A run whose coordinator and reward servers are processes that tests kill; the rollout server and the actor are scripted.

async with SwapCluster(folder, redis_url, zygote) as cluster:
    await cluster.serve("old")
    await cluster.steps(1)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx

from shoal.queue.records import RecordReader
from shoal.rpc.v1 import trainer_pb2
from shoal.types import ExperienceRecord
from tests.helpers.coordinator_process import VOCABULARY, CoordinatorProcess, ForkedProcess, running_coordinator, write_config
from tests.helpers.fake_services import Context, FakeActor, FakeRollout
from tests.helpers.plain_http import PLAIN_HTTP
from tests.helpers.push_matrix_cluster import Zygote
from tests.helpers.swap_servers import ScorerKey
from tests.helpers.valkey import free_port

RUN_ID = "test"
NUM_PROMPTS, GROUP_SIZE, NUM_ROWS = 2, 2, 12
TIMEOUT_S = 1.0
"""Of scoring a group: a call has at most NUM_PROMPTS of them."""
LEASE_S = 1.5
UNTIL_S = 30.0
POLL_S = 0.02
WHO = {"who": "ada", "why": "because"}
SCORERS: dict[str, list[ScorerKey]] = {"old": [("old", "1")], "new": [("new", "1")], "other": [("old", "1")], "third": [("old", "1")]}
"""Server -> what it offers; `other` and `third` are replicas of `old`."""


class RecordingActor(FakeActor):
    """Reads the records that it is to train on; trained: step -> records."""

    def __init__(self, coordinator_address: str, redis_url: str) -> None:
        super().__init__(RUN_ID, coordinator_address)
        self._reader = RecordReader(redis_url, RUN_ID)
        self.trained: dict[int, list[ExperienceRecord]] = {}

    async def ForwardBatch(self, request: trainer_pb2.ForwardBatchRequest, context: Context) -> trainer_pb2.ForwardBatchResponse:
        """Read the records."""
        answer = await super().ForwardBatch(request, context)
        batch = self.batches[request.batch.step]
        keys = [ref.key for rank in batch.ranks for mini in rank for micro in mini.micro_batches for ref in micro]
        self.trained[batch.step] = await asyncio.to_thread(self._reader.fetch, keys)
        return answer


class SwapCluster:
    """See the module."""

    def __init__(self, folder: Path, redis_url: str, zygote: Zygote, **sections: dict[str, Any]) -> None:
        self.folder = folder
        self._zygote = zygote
        self.grpc_port = free_port()
        wanted: dict[str, dict[str, Any]] = {
            "run": {"steps": 100_000},
            "data": {"held_out": None},
            "algorithm": {"estimator": "grpo"},
            "rollout": {"prompts_per_step": NUM_PROMPTS, "group_size": GROUP_SIZE, "max_new_tokens": 4},
            # 0: a kill that only one group of a step feels must not let that group be left out.
            "reward": {"scorer": "old", "timeout_s": TIMEOUT_S, "max_unscored_share": 0.0},
            "coordinator": {"grpc_port": self.grpc_port, "rest_port": free_port(), "lease_s": LEASE_S},
        }
        for name, section in sections.items():
            wanted[name] = wanted.get(name, {}) | section
        self._config = write_config(folder, redis_url, **wanted)
        address = f"127.0.0.1:{self.grpc_port}"
        self.rollout = FakeRollout("rollout-0", RUN_ID, address, vocab_size=len(VOCABULARY))
        self.actor = RecordingActor(address, redis_url)
        self._servers: dict[str, ForkedProcess] = {}
        self._stack, self._coordinating = AsyncExitStack(), AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self.start_coordinator()
        for service in (self.rollout, self.actor):
            await self._stack.enter_async_context(service)
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._servers.values():
            process.kill()
            process.wait(10)
        await self._coordinating.aclose()
        await self._stack.aclose()

    # Processes.

    async def start_coordinator(self) -> None:
        """On the same folder and ports as any before."""
        self.coordinator: CoordinatorProcess = await self._coordinating.enter_async_context(running_coordinator(self._config))

    async def kill_coordinator(self) -> None:
        """kill -9."""
        self.coordinator.process.kill()
        await self.coordinator.wait()

    async def serve(self, name: str) -> None:
        """Start a reward server and wait until it takes traffic."""
        self.start_server(name)
        await self.until_ready(name)

    def start_server(self, name: str, *, is_other_code: bool = False) -> None:
        """Start a reward server; is_other_code: what it offers under its version is something else than before."""
        arguments = {"run_id": RUN_ID, "coordinator": f"127.0.0.1:{self.grpc_port}", "folder": str(self.folder), "scorers": SCORERS[name]}
        log = self.folder / f"reward-{name}.log"
        pid = self._zygote.start("reward", log, service_id=f"reward-{name}", is_other_code=is_other_code, **arguments)
        self._servers[name] = ForkedProcess(self._zygote, pid)

    async def until_ready(self, name: str, state: str = "ready") -> None:
        """Wait until a reward server takes traffic, or is in another state."""
        await self.until_rewards(lambda rewards: _states(rewards).get(f"reward-{name}") == state)

    async def kill_server(self, name: str) -> None:
        """kill -9."""
        self._servers[name].kill()
        await asyncio.to_thread(self._servers[name].wait, 10)

    async def stop_server(self, name: str) -> None:
        """SIGTERM, as a user who takes a replica away."""
        self._servers[name].send_signal(15)
        await asyncio.to_thread(self._servers[name].wait, 20)

    # Files.

    def hold(self, name: str, phase: str) -> None:
        """Let a server's calls wait."""
        (self.folder / f"held-reward-{name}-{phase}").unlink(missing_ok=True)
        (self.folder / f"hold-reward-{name}-{phase}").touch()

    def release(self) -> None:
        """Let all calls go on."""
        for file in self.folder.glob("hold-*"):
            file.unlink()

    async def until_held(self, name: str, phase: str) -> None:
        """Wait until a call waits."""
        await self.until_true((self.folder / f"held-reward-{name}-{phase}").exists)

    def break_server(self, name: str, text: str = "") -> None:
        """Let the live samples of a server whose ids have a text be errors; by default all are."""
        (self.folder / f"broken-reward-{name}").write_text(text)

    def repair_server(self, name: str) -> None:
        """Let it score again."""
        (self.folder / f"broken-reward-{name}").unlink()

    def set_slow(self) -> None:
        """Let live calls take long enough that several are open at once."""
        (self.folder / "slow").touch()

    def journal(self, name: str) -> list[dict[str, Any]]:
        """The calls that a server has answered, over all its lives."""
        path = self.folder / f"journal-reward-{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log(self) -> list[dict[str, Any]]:
        """The audit log."""
        content = (self.folder / "run" / "reward_routes.jsonl").read_text()
        return [json.loads(line) for line in content[: content.rfind("\n") + 1].splitlines()]

    # What the coordinator says, and is told.

    async def rewards(self) -> dict[str, Any]:
        """GET /v1/rewards."""
        return await self.coordinator.get("/v1/rewards")

    async def post(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:  # noqa: ANN401
        """POST a command about rewards."""
        url = f"http://{self.coordinator.rest_address}/v1/rewards/{path}"
        async with httpx.AsyncClient(trust_env=False, timeout=10.0, verify=PLAIN_HTTP) as client:
            answer = await client.post(url, json=WHO | body)
        assert answer.status_code == status, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def add(self, timeout_s: float = TIMEOUT_S) -> None:
        """Ask for revision 2, by the new server's scorer."""
        components = [{"scorer": "new", "timeout_s": timeout_s}]
        assert (await self.post("routes", label="new", components=components))["number"] == 2

    async def stages(self) -> dict[int, str]:
        """Stage of each revision."""
        return {route["number"]: route["stage"] for route in (await self.rewards())["revisions"]}

    async def until_stage(self, number: int, *stages: str) -> dict[str, Any]:
        """Wait until a revision is in one of the stages; the revision."""
        rewards = await self.until_rewards(lambda rewards: rewards["revisions"][number - 1]["stage"] in stages)
        route: dict[str, Any] = rewards["revisions"][number - 1]
        return route

    async def until_rewards(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll the rewards until they meet a condition."""
        return await self.until_true_of("/v1/rewards", condition)

    async def until_true_of(self, path: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll a document until it meets a condition."""
        async with asyncio.timeout(UNTIL_S):
            while True:
                document = await self.coordinator.get(path)
                if condition(document):
                    return document
                await asyncio.sleep(POLL_S)

    async def until_refused(self, path: str) -> str:
        """Give a command that cannot be carried out any more as soon as the coordinator knows that a server is gone; why not."""
        await self.until_rewards(lambda rewards: len([1 for state in _states(rewards).values() if state == "ready"]) == 1)
        return str(await self.post(path, status=409))

    async def until_true(self, condition: Callable[[], bool]) -> None:
        """Poll a condition."""
        async with asyncio.timeout(UNTIL_S):
            while not condition():  # noqa: ASYNC110 - other processes make it true
                await asyncio.sleep(POLL_S)

    async def steps(self, number: int) -> None:
        """Wait until so many more steps are trained; nothing must pause them."""
        wanted = len(self.actor.trained) + number
        status = await self.coordinator.until(lambda status: len(self.actor.trained) >= wanted or status["state"] in ("paused", "failed"))
        assert status["state"] not in ("paused", "failed"), status


def _states(rewards: dict[str, Any]) -> dict[str, str]:
    return {server["service_id"]: server["state"] for server in rewards["servers"]}


def check_trained(trained: Mapping[int, Sequence[ExperienceRecord]], num_prompts: int = NUM_PROMPTS) -> dict[int, set[int]]:
    """Every prompt was trained in its step, once, whole, by one revision and that one's scorer; step -> revisions."""
    scorers = {1: "old", 2: "new"}
    assert sorted(trained) == list(range(1, len(trained) + 1))
    revisions: dict[int, set[int]] = {}
    for step, records in trained.items():
        first = (step - 1) * num_prompts
        places = [divmod(place, NUM_ROWS) for place in range(first, first + num_prompts)]
        wanted = [(f"e{epoch}-i{index}", sample) for epoch, index in places for sample in range(GROUP_SIZE)]
        assert sorted((record.group_id, record.sample_index) for record in records) == sorted(wanted), step
        groups = {(record.group_id, record.route_revision) for record in records}
        assert len(groups) == num_prompts, (step, groups)
        for record in records:
            (part,) = record.reward_components
            assert (part.scorer, part.value) == (scorers[record.route_revision], record.reward)
        revisions[step] = {revision for _, revision in groups}
    return revisions


@asynccontextmanager
async def run_in_training(folder: Path, redis_url: str, zygote: Zygote, **sections: dict[str, Any]) -> AsyncIterator[SwapCluster]:
    """A run that trains with the old server; the new one is there too."""
    async with SwapCluster(folder, redis_url, zygote, **sections) as cluster:
        await asyncio.gather(cluster.serve("old"), cluster.serve("new"))
        await cluster.coordinator.until(lambda status: status["step"] >= 1)
        yield cluster
