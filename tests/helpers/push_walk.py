"""A random walk of one trainer and two servers through training, pushes that go well, pushes that break, restarts and audits.

After every step each server must serve one complete version, bit for bit what the trainer had at it, and what it says about its staging
must be true. A push in which nothing broke must reach every server.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Literal

import pytest
from shoal_coordinator.audit import compare_digests
from shoal_coordinator.push import WeightPush
from shoal_coordinator.push_report import PushReport
from shoal_rollout.sink_states import SinkState
from torch import Tensor

from shoal.config.models import PushSection
from shoal.errors import ShoalError
from shoal.types import InflightMode, SamplingParams
from shoal.weights.plan import ServerPlan
from tests.helpers.push_walk_model import FROZEN, SHAPES
from tests.helpers.push_walk_server import Script, ScriptedSource, WalkServer, WalkSink
from tests.helpers.push_walk_trainer import WalkGang, initial, random_link_fault, random_rank_fault

Key = tuple[str, int]
"""source_id and policy version: what a set of weights is known by."""
SERVERS = ("a", "b")
CALLS = ("prepare", "plan", "verify", "commit", "abort")
SOURCE_CALLS = ("describe", "prepare", "transfer", "abort")
HOWS = ("before", "after", "always_before", "always_after", "cancel", "cancel_soon", "rival")


class Walk:
    """The state of a walk; `step` takes a random one. With auto, server a shares the trainer's memory (shm) and b is reached over grpc."""

    def __init__(self, folder: Path, seed: int, transport: Literal["auto", "grpc", "collective"] = "auto") -> None:
        self.rng = random.Random(seed)
        self.steps: list[str] = []
        self.push = PushSection(
            transport=transport,
            delta="on",
            bucket_bytes=4096,
            shm_dir=str(folder / "a"),
            prepare_timeout_s=10,
            transfer_timeout_s=10,
            verify_timeout_s=10,
            commit_timeout_s=10,
        )
        self.folders = [folder / name for name in SERVERS]
        for path in self.folders:
            path.mkdir()
        self.servers = {
            "a": WalkServer("a", self.folders[0], self.push, num_workers=2, norm_dtype="bfloat16"),
            "b": WalkServer("b", self.folders[1], self.push, num_workers=1, norm_dtype="float32"),
        }
        self.history: dict[Key, dict[str, Tensor]] = {}
        self.served: dict[str, Key | None] = dict.fromkeys(SERVERS)
        self.plans: dict[str, ServerPlan] = {}
        self.needs_dense: set[str] = set(SERVERS)
        self._num_gangs = 0
        self._num_pushes = 0

    async def start(self) -> None:
        """Start everything; nothing is pushed yet."""
        for server in self.servers.values():
            await server.start()
        self._start_gang(initial(self.rng), 1)

    async def close(self) -> None:
        """End everything."""
        await self.gang.close()
        for server in self.servers.values():
            await server.stop()

    async def left_behind(self) -> list[str]:
        """Staging that `close` should have removed: files, and mappings once the last cancelled stream has ended."""
        for _ in range(40):
            if not (left := self._left()):
                return []
            await asyncio.sleep(0.05)
        return left

    def _left(self) -> list[str]:
        gc.collect()
        files = [path.name for folder in self.folders for path in folder.iterdir()]
        maps = Path("/proc/self/maps").read_text().splitlines()
        return files + [line for line in maps if any(str(folder) in line for folder in self.folders)]

    async def step(self) -> None:
        """A random step, and a look at everything."""
        steps: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (10, self.train),
            (8, self.push_well),
            (8, self.push_broken),
            (2, self.catch_up),
            (2, self.push_expiring),
            (2, self.audit),
            (1, self.restart_server),
            (1, self.restart_trainer),
            (1, self.replay_old_calls),
        ]
        (chosen,) = self.rng.choices([step for _, step in steps], weights=[weight for weight, _ in steps])
        self.steps.append(chosen.__name__)
        await chosen()
        self.check()

    async def train(self) -> None:
        """Change the parameters in some way; a new version."""
        full = {name: tensor.clone() for name, tensor in self.full.items()}
        trained = [name for name in SHAPES if name not in FROZEN]
        kind = self.rng.choice(["none", "few", "few", "some", "many", "tiny", "revert", "special"])
        self.steps[-1] += f" {kind}"
        if kind == "few":
            for name in self.rng.sample(trained, 2):
                full[name].view(-1)[self.rng.randrange(full[name].numel())] += 1.0
        elif kind == "some":
            for name in trained:
                full[name].view(-1)[self.rng.randrange(20) :: 20] += 0.25
        elif kind == "many":
            for name in self.rng.sample(trained, 3):
                full[name] += 0.25
        elif kind == "tiny":
            for name in trained:
                full[name] *= 1 + 1e-4
        elif kind == "special":
            for value in (float("nan"), -0.0, 0.0, float("inf"), 1e-40):
                name = self.rng.choice(trained)
                full[name].view(-1)[self.rng.randrange(full[name].numel())] = value
        elif kind == "revert":
            older = self.rng.choice([key for key in self.history if key[0] == self.gang.source_id])
            full = {name: tensor.clone() for name, tensor in self.history[older].items()}
        await self._hold(full, self.gang.version + 1)

    async def push_well(self) -> None:
        """A push that nothing disturbs but calls that are repeated: every server must have it."""
        script = Script()
        for end, calls in (*((name, CALLS) for name in SERVERS), ("source", SOURCE_CALLS)):
            script.faults |= {(end, call): "twice" for call in calls if self.rng.random() < 0.2}
        self.steps[-1] += f" {sorted(script.faults)}"
        report = await self._push(SERVERS, script)
        assert report is not None
        assert report.failed_servers == {}, report.failed_servers

    async def push_broken(self) -> None:
        """A push in which something breaks, somewhere."""
        script = Script()
        victim = self.rng.choice(SERVERS)
        what = self.rng.choice(["call", "call", "source", "link", "link", "flip", "rank", "crash", "two", "busy", "commit", "commit"])
        for _ in range(2 if what == "two" else 1):
            if what in ("call", "two"):
                script.faults[victim, self.rng.choice(CALLS)] = self._how("leave_out")
            if what in ("source", "two"):
                script.faults["source", self.rng.choice(SOURCE_CALLS)] = self._how()
        if what == "commit":
            # Staging is ahead of what is served from here on.
            script.faults[victim, "commit"] = "always_before"
        if self.rng.random() < 0.3:
            script.faults[victim, "abort"] = "always_before"
        if what == "link":
            fault = random_link_fault(self.rng, victim)
            for transport in self.gang.transports:
                transport.fault = fault
            self.steps[-1] += f" {fault}"
        elif what == "flip":
            script.flipped = victim
        elif what == "rank":
            self.gang.failing_rank = random_rank_fault(self.rng)
        elif what == "crash":
            self.servers[victim].engine.failures[self.rng.choice(["shoal_commit", "resume", "shoal_step_verify", "shoal_plan"])] = (
                ShoalError("the test's engine fails")
            )
        self.steps[-1] += f" {what} {victim} {script.faults} {self.gang.failing_rank} {self.servers[victim].engine.failures}"
        script.on_rival = self._rival
        report = await (self._push_to_busy(victim, script) if what == "busy" else self._push(SERVERS, script))
        if script.flipped:
            assert report is None or victim in report.failed_servers, "a flipped bit was not found"
        for transport in self.gang.transports:
            transport.fault = None
        self.gang.failing_rank = None
        await self._replace_failed()

    async def push_expiring(self) -> None:
        """A push whose time at one server is over before its COMMIT."""
        script = Script()
        script.expiring = self.rng.choice(SERVERS)
        script.faults[script.expiring, self.rng.choice(["plan", "verify", "commit"])] = "slow"
        self.steps[-1] += f" {script.expiring} {script.faults}"
        report = await self._push(SERVERS, script)
        assert report is not None
        assert script.expiring in report.failed_servers

    async def catch_up(self) -> None:
        """Everything to one server."""
        name = self.rng.choice(SERVERS)
        self.needs_dense.add(name)
        report = await self._push([name], Script())
        assert report is not None
        assert report.failed_servers == {}, report.failed_servers

    async def audit(self) -> None:
        """Servers that have the present version must be found equal, with no complaint."""
        current = (self.gang.source_id, self.gang.version)
        plans = {name: self.plans[name] for name in SERVERS if self.served[name] == current}
        if not plans:
            return
        hashes = {name: plan.plan_hash for name, plan in plans.items()}
        trainer = await self.gang.digest(self.gang.version, hashes, timeout_s=10)
        for name, plan in plans.items():
            engine = await self.servers[name].sink.digest(self.gang.version, plan.plan_hash)
            found = compare_digests(name, plan, trainer[name], engine)
            assert not found.error, found
            assert not found.differs, found

    async def restart_server(self) -> None:
        """A server that is started again knows nothing."""
        await self._restart(self.rng.choice(SERVERS))

    async def restart_trainer(self) -> None:
        """A gang that is started again, perhaps with other frozen weights, perhaps at the same version number."""
        full = initial(self.rng) if self.rng.random() < 0.5 else {name: tensor + 0.5 for name, tensor in self.full.items()}
        version = self.gang.version + self.rng.randrange(2)
        await self.gang.close()
        self._start_gang(full, version)

    async def replay_old_calls(self) -> None:
        """Calls of an ended push come late: they are refused, or change nothing."""
        for server in self.servers.values():
            before = server.sink._served_version
            await server.sink.abort("push-0")
            with pytest.raises(ShoalError):
                await server.sink.commit("push-0", 1, InflightMode.KEEP, 5.0)
            with pytest.raises(ShoalError):
                await server.sink.verify("push-0", 1, "", ())
            assert server.sink._served_version == before

    def check(self) -> None:
        """The invariants."""
        for name, server in self.servers.items():
            self._check_served(name, server)
            staged = server.sink.staged
            if staged is not None:
                key = (staged.source_id, staged.policy_version)
                assert (found := server.staged_difference(self.history[key])) == "", f"{name} has not staged {key}: {found}"

    @property
    def full(self) -> dict[str, Tensor]:
        """What the trainer holds."""
        return self.history[self.gang.source_id, self.gang.version]

    def _check_served(self, name: str, server: WalkServer) -> None:
        sink, key = server.sink, self.served[name]
        version = 0 if key is None else key[1]
        assert sink.state not in (SinkState.COMMITTING, SinkState.FAILED), f"{name} is {sink.state}"
        assert server.engine.paused is None, f"{name} is paused"
        assert (sink._served_version, server.engine.version) == (version, str(version)), f"{name} says another version than {version}"
        found = server.served_difference(None if key is None else self.history[key])
        assert found == "", f"{name} does not serve {key}: {found}"

    def _how(self, *more: str) -> str:
        how = self.rng.choice((*HOWS, *more))
        return f"{how} {self.rng.random() * 0.01}" if how == "cancel_soon" else how

    async def _push_to_busy(self, name: str, script: Script) -> PushReport | None:
        """A push that waits in vain for a server's running request: the old version goes on."""
        engine = self.servers[name].engine
        request = asyncio.create_task(engine.sample("request", [1], SamplingParams(max_new_tokens=1)))
        await engine.until_requests(1)
        report = await self._push(SERVERS, script, inflight="wait", commit_timeout_s=1.5)
        assert report is None or name in report.failed_servers
        await engine.abort(["request"])
        await request
        return report

    async def _push(
        self, names: Collection[str], script: Script, *, inflight: str = "", commit_timeout_s: float = 10.0
    ) -> PushReport | None:
        """A push to some servers; None if it was cancelled. Notes what the servers say that they committed."""
        self._num_pushes += 1
        settings = self.push.model_copy(
            update={
                "commit": self.rng.choice(["barrier", "rolling"]),
                "inflight": inflight or self.rng.choice(["keep", "abort", "wait"]),
                "commit_timeout_s": commit_timeout_s,
            }
        )
        sinks = {name: WalkSink(self.servers[name], script, self.rng) for name in names}
        # A coordinator asks for everything after a failure. What staging is said to hold must be enough, so it sometimes does not.
        dense = self.needs_dense & set(names) if self.rng.random() < 0.6 else set()
        transaction = WeightPush(
            ScriptedSource(self.gang, script), sinks, self.gang.version, settings, dense=dense, push_id=f"push-{self._num_pushes}"
        )
        for server in self.servers.values():
            server.committed.clear()
        running = asyncio.create_task(transaction.run())
        script.on_cancel = running.cancel
        script.on_leave_out = lambda name: transaction.leave_out(name, "the test says that it left")
        report: PushReport | None = None
        try:
            report = await running
        except asyncio.CancelledError:
            if not running.cancelled():
                raise
        self._note(names, transaction)
        return report

    def _note(self, names: Collection[str], transaction: WeightPush) -> None:
        for name in names:
            if self.servers[name].committed:
                assert set(self.servers[name].committed) == {self.gang.version}
                self.served[name] = (self.gang.source_id, self.gang.version)
                self.plans[name] = transaction.plans.get(name) or self.plans[name]
        report = transaction.report()
        for name in names:
            is_committed = report.servers[name].is_committed
            assert not is_committed or self.served[name] == (self.gang.source_id, self.gang.version), f"{name} did not commit"
            (self.needs_dense.discard if is_committed else self.needs_dense.add)(name)

    async def _rival(self) -> None:
        """A whole push by another coordinator in the middle of one."""
        self._num_pushes += 1
        sinks = {name: WalkSink(server, Script(), self.rng) for name, server in self.servers.items()}
        rival = WeightPush(ScriptedSource(self.gang, Script()), sinks, self.gang.version, self.push, push_id=f"rival-{self._num_pushes}")
        await rival.run()
        self.plans |= rival.plans

    async def _replace_failed(self) -> None:
        for name, server in self.servers.items():
            server.engine.failures = {}
            if server.sink.state is SinkState.FAILED:
                assert server.failed, f"{name} failed and has not said so"
                await self._restart(name)

    async def _restart(self, name: str) -> None:
        await self.servers[name].stop()
        await self.servers[name].start()
        self.served[name] = None
        self.needs_dense.add(name)

    def _start_gang(self, full: dict[str, Tensor], version: int) -> None:
        self._num_gangs += 1
        self.gang = WalkGang(f"gang-{self._num_gangs}", full, version, self.push)
        self.history[self.gang.source_id, version] = full

    async def _hold(self, full: dict[str, Tensor], version: int) -> None:
        self.history[self.gang.source_id, version] = full
        await self.gang.load(full, version)
