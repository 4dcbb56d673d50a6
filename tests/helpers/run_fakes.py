"""An in-process coordinator over scripted clients: no sockets, no Redis, no model. Tests gate it with events.

async with RunHarness(tmp_path, steps=2) as run:
    run.join_all()
    await run.until(RunState.FINISHED)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from shoal_coordinator.app import Coordinator
from shoal_coordinator.collected import CollectedExperience
from shoal_coordinator.evaluation import Evaluation
from shoal_coordinator.metrics_sink import JsonLinesSink, MetricsSink
from shoal_coordinator.prompts import PromptPosition
from shoal_coordinator.rewards.probes import ProbeSet
from shoal_coordinator.states import RunState
from shoal_coordinator.workload import Workload

from shoal.config.load import build_config
from shoal.config.models import MAX_SCORED_SEQUENCES
from shoal.errors import InvalidRequestError, ShoalError, UnavailableError
from shoal.queue.entries import QueuedGroup
from shoal.types import (
    Batch,
    Completion,
    ExportResult,
    Int32Array,
    PairDigests,
    RecordRef,
    RolloutDescription,
    SamplingParams,
    ScorerDescription,
    ScoreResult,
    ScoreSample,
    ServiceInfo,
    ServiceKind,
    SinkLayout,
    SinkVerified,
    TokenScores,
    TokenSequence,
    TrainerDescription,
    TrainerRole,
    UpdateResult,
)
from tests.helpers.coordinator_fakes import make_completion
from tests.helpers.fake_push_ends import make_layout, make_source_layout
from tests.helpers.push_fakes import ScriptedSink, ScriptedSource

GREEDY_ID = 7
KINDS = {"rollout-0": ServiceKind.ROLLOUT, "reward-0": ServiceKind.REWARD, "actor": ServiceKind.ACTOR, "critic": ServiceKind.CRITIC}


class ClosableSink(ScriptedSink):
    """A sink over a channel: once it is closed, what waits for an answer fails."""

    def __init__(self, layout: SinkLayout, served_version: int = 0) -> None:
        super().__init__(layout, served_version)
        self.closed = asyncio.Event()

    async def close(self) -> None:
        self.closed.set()

    async def verify(
        self, push_id: str, policy_version: int, plan_hash: str, pairs: Sequence[PairDigests], *, timeout_s: float
    ) -> SinkVerified:
        verifying = asyncio.create_task(super().verify(push_id, policy_version, plan_hash, pairs, timeout_s=timeout_s))
        closing = asyncio.create_task(self.closed.wait())
        try:
            await asyncio.wait({verifying, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not verifying.done():
                raise UnavailableError("the connection was closed")
            return verifying.result()
        finally:
            verifying.cancel()
            closing.cancel()
            await asyncio.gather(verifying, closing, return_exceptions=True)


class ClosableSource(ScriptedSource):
    """A source over a channel that was never opened."""

    async def close(self) -> None:
        """Nothing to close."""


class ScriptedTrainer:
    """A gang that keeps a log of its commands; `fail` raises at a command such as "update 2", `gates` makes it wait."""

    def __init__(self, role: TrainerRole, log: list[str], source: ScriptedSource | None = None) -> None:
        self.role = role
        self.step = 0
        self.fail: dict[str, ShoalError] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.applies = True
        self.kl_per_response = 1.0
        self.kl_coefs: list[tuple[float, float]] = []
        self.batches: list[Batch] = []
        self._log = log
        self._source = source

    async def describe(self, *, timeout_s: float) -> TrainerDescription:
        return TrainerDescription(service_id=self.role, role=self.role, world_size=1, num_parameters=4, step=self.step, has_reference=True)

    async def forward_batch(self, batch: Batch, *, timeout_s: float) -> dict[str, float]:
        assert sum(len(refs) for rank in batch.ranks for mini in rank for refs in mini.micro_batches) == 4
        self.batches.append(batch)
        await self._command(f"forward {batch.step}")
        if self.role is TrainerRole.CRITIC:
            return {"value_mean": 0.5}
        return {"kl": 0.1 * batch.step, "kl_per_response": self.kl_per_response}

    async def compute_advantages(self, step: int, kl_coef: float, kl_loss_coef: float, *, timeout_s: float) -> dict[str, float]:
        self.kl_coefs.append((kl_coef, kl_loss_coef))
        await self._command(f"advantages {step}")
        return {"advantage_std": 1.0}

    async def update_batch(self, step: int, *, timeout_s: float) -> UpdateResult:
        await self._command(f"update {step}")
        if self.applies:
            self.step += 1
        if self._source is not None:
            self._source.policy_version = self.step
        return UpdateResult(policy_version=self.step, applied=self.applies, metrics={"loss": 0.5, "grad_norm": 1.0})

    async def score_tokens(self, sequences: Sequence[TokenSequence], *, timeout_s: float) -> tuple[list[TokenScores], int]:
        await self._command("score")
        if len(sequences) > MAX_SCORED_SEQUENCES:
            raise InvalidRequestError(f"{len(sequences)} sequences are to be scored")
        scores = [
            TokenScores(logprobs=(-1.5,) * len(sequence.response_ids), greedy_ids=(GREEDY_ID,) * len(sequence.response_ids))
            for sequence in sequences
        ]
        return scores, self.step

    async def export_model(self, folder: str, *, timeout_s: float) -> ExportResult:
        await self._command("export")
        return ExportResult(folder=folder, policy_version=self.step, num_bytes=16)

    async def close(self) -> None:
        """Nothing to close."""

    async def _command(self, name: str) -> None:
        self._log.append(f"{self.role} {name}")
        if name in self.gates:
            await self.gates[name].wait()
        if name in self.fail:
            raise self.fail[name]


class SilentRollout:
    """Serves what its sink serves. The fake workload does not ask it to generate; audits do: GREEDY_ID, then something else."""

    def __init__(self, sink: ScriptedSink | None = None) -> None:
        self.sink = ScriptedSink(make_layout("rollout-0")) if sink is None else sink
        self.generate_error: ShoalError | None = None
        self.logprob = -1.0
        self.num_described = 0
        self.described = asyncio.Event()

    async def describe(self, *, timeout_s: float) -> RolloutDescription:
        self.num_described += 1
        self.described.set()
        return RolloutDescription(
            service_id="rollout-0",
            model="fake",
            vocab_size=8,
            max_model_len=8,
            tensor_parallel_size=1,
            weight_dtype="float32",
            policy_version=self.sink.served_version,
            num_running=0,
            draining=False,
        )

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        num_samples: int,
        seeds: Sequence[int] = (),
        min_policy_version: int = 0,
        *,
        timeout_s: float,
    ) -> AsyncGenerator[Completion, None]:
        assert min_policy_version == self.sink.served_version
        assert (sampling.temperature, num_samples, list(seeds)) == (0.0, 1, [])
        if self.generate_error is not None:
            raise self.generate_error
        completion = make_completion(0, [GREEDY_ID, 1], policy_version=self.sink.served_version)
        yield replace(completion, rollout_logprobs=np.full(2, self.logprob, np.float32))

    async def close(self) -> None:
        """Nothing to close."""


class SilentReward:
    """Offers one scorer, and is never asked to score."""

    async def describe(self, *, timeout_s: float) -> list[ScorerDescription]:
        return [ScorerDescription(name="arithmetic", version="1", description="", fingerprint="a1")]

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing to close."""


class ScriptedConnector:
    """Hands out one scripted client per address."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.source_end = ClosableSource(make_source_layout(), 0)
        self.actor = ScriptedTrainer(TrainerRole.ACTOR, self.log, self.source_end)
        self.critic = ScriptedTrainer(TrainerRole.CRITIC, self.log)
        self.sinks: dict[str, ClosableSink] = {}
        self.rollouts: dict[str, SilentRollout] = {}

    def rollout(self, address: str) -> SilentRollout:
        return self.rollouts.setdefault(address, SilentRollout(self.sink(address)))

    def sink(self, address: str) -> ClosableSink:
        return self.sinks.setdefault(address, ClosableSink(make_layout(address.removesuffix(":1"))))

    def source(self, address: str) -> ClosableSource:
        return self.source_end

    def trainer(self, address: str) -> ScriptedTrainer:
        return self.actor if address.startswith("actor") else self.critic

    def reward(self, address: str) -> SilentReward:
        return SilentReward()


class ListQueue:
    """Groups in memory."""

    def __init__(self) -> None:
        self.groups: list[QueuedGroup] = []
        self.acked: list[str] = []

    async def take_groups(self, num_groups: int, timeout_s: float) -> list[QueuedGroup]:
        return self.groups[:num_groups]

    async def ack(self, groups: Sequence[QueuedGroup]) -> None:
        self.acked += [group.group_id for group in groups]
        self.groups = [group for group in self.groups if group.group_id not in self.acked]

    async def depth(self) -> int:
        return len(self.groups)


class FakeWorkload:
    """Two groups of two samples a step, with made-up rewards; the step `hold_at` sets `holding` and waits for `release`.

    Step n takes the prompts up to index 2n.
    """

    def __init__(self, log: list[str], held_out: bool) -> None:
        self.queue = ListQueue()
        self.has_held_out = held_out
        self.probes = ProbeSet()
        self.hold_at: int | None = None
        self.holding = asyncio.Event()
        self.release = asyncio.Event()
        self.position = PromptPosition()
        self.mean_reward = 0.0
        self._log = log

    def seek(self, position: PromptPosition) -> None:
        self.position = position

    def probe_prompts(self, num_prompts: int) -> Sequence[Int32Array]:
        return [np.array([1, 2, 3], np.int32)] * num_prompts

    async def collect(self, policy_version: int) -> CollectedExperience:
        step = self.position.index // 2 + 1
        if step == self.hold_at:
            self.holding.set()
            await self.release.wait()
        self.position = PromptPosition(index=2 * step)
        self._log.append(f"collect {step} at version {policy_version}")
        self.queue.groups += [_group(f"s{step}-g{index}") for index in range(2)]
        return CollectedExperience(
            num_groups=2, rewards=[1.0, 0.0, 1.0, 0.0], lengths=[3] * 4, stopped=[True] * 4, policy_versions={policy_version}
        )

    async def evaluate(self, policy_version: int) -> Evaluation:
        self._log.append(f"evaluate version {policy_version}")
        return Evaluation(
            accuracy=0.1 * policy_version, mean_reward=self.mean_reward, policy_versions=(policy_version,), num=10, num_unscored=0
        )


def _group(group_id: str) -> QueuedGroup:
    refs = tuple(
        RecordRef(key=f"{group_id}-{index}", group_id=group_id, num_prompt_tokens=2, num_response_tokens=3, reward=1.0)
        for index in range(2)
    )
    return QueuedGroup(entry_id=group_id, group_id=group_id, refs=refs)


class RunHarness:
    """A coordinator whose run is executing; services join when the test says so."""

    def __init__(
        self,
        folder: Path,
        *,
        held_out: bool = False,
        estimator: str = "gae",
        connector: ScriptedConnector | None = None,
        **sections: dict[str, Any],
    ) -> None:
        tree: dict[str, Any] = {
            "run": {"id": "test", "folder": str(folder), "steps": 3} | sections.pop("run", {}),
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"} | ({"held_out": "held_out.jsonl"} if held_out else {}),
            "algorithm": {"estimator": estimator},
            "coordinator": {"ready_timeout_s": 5.0, "lease_s": 1.5} | sections.pop("coordinator", {}),
        } | sections
        self.config = build_config(tree)
        self.connector = ScriptedConnector() if connector is None else connector
        self.workload = FakeWorkload(self.connector.log, held_out)
        self._sink = MetricsSink([JsonLinesSink(folder)])
        self.coordinator = Coordinator(self.config, self._sink, connector=self.connector, make_workload=self._open_workload)
        self._tasks: list[asyncio.Task[None]] = []
        self._reached: dict[RunState, asyncio.Event] = {state: asyncio.Event() for state in RunState}
        self.states: list[RunState] = []

    @property
    def log(self) -> list[str]:
        """What the services were told, in order."""
        return self.connector.log

    async def __aenter__(self) -> Self:
        self.coordinator.machine.subscribe(self._note)
        work = [self.coordinator.run.execute(), self.coordinator.fleet.run(), self.coordinator.rewards.run()]
        self._tasks = [asyncio.create_task(task) for task in work]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sink.__exit__()
        self.coordinator.close()
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results

    def cancel_run(self) -> None:
        """As SIGTERM does."""
        self._tasks[0].cancel()

    def join(self, service_id: str, *, incarnation: str = "a", policy_version: int = 0) -> str:
        """Register a service; its lease id."""
        info = ServiceInfo(
            run_id="test",
            service_id=service_id,
            kind=KINDS.get(service_id, ServiceKind.ROLLOUT),
            address=f"{service_id}:1",
            incarnation=incarnation,
            policy_version=policy_version,
        )
        return self.coordinator.registry.register(info).lease_id

    def join_all(self) -> None:
        """Register one service of each kind."""
        for service_id in KINDS:
            self.join(service_id)

    async def until(self, state: RunState, timeout_s: float = 10.0) -> None:
        """Wait until the run has been in a state since the last call for it."""
        try:
            await asyncio.wait_for(self._reached[state].wait(), timeout_s)
        except TimeoutError:
            raise AssertionError(f"no {state}; states {self.states}, error {self.coordinator.run.progress.error}") from None
        self._reached[state].clear()

    async def until_true(self, condition: Any, timeout_s: float = 10.0) -> None:  # noqa: ANN401
        """Wait for a condition that no event announces."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"condition not met; states {self.states}"
            await asyncio.sleep(0.005)

    def _note(self, old: RunState, new: RunState) -> None:
        self.states.append(new)
        self._reached[new].set()

    @asynccontextmanager
    async def _open_workload(self) -> AsyncIterator[Workload]:
        yield self.workload
