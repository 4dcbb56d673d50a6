"""What a run trains on: prompts, the path from prompts to queued experience, held-out evaluation, the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from shoal.config.models import RunConfig
from shoal.errors import StateError, UnavailableError
from shoal.queue.entries import QueuedGroup
from shoal.queue.experience import ExperienceQueue
from shoal.telemetry.logs import get_logger
from shoal.types import Int32Array
from shoal_coordinator.alerts import Attention
from shoal_coordinator.collected import CollectedExperience
from shoal_coordinator.data_loading import LoadedData, load_data
from shoal_coordinator.dispatcher import Dispatcher, RolloutEndpoint, training_request
from shoal_coordinator.evaluation import Evaluation, evaluate, greedy_request
from shoal_coordinator.experience import CollectionPlan, ExperienceCollector
from shoal_coordinator.prompts import PromptPosition, PromptSource
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.probes import ProbeSet
from shoal_coordinator.rewards.row_check import RowCheck, RunRows
from shoal_coordinator.rewards.scored import RouteSource, ScoredGroupListener
from shoal_coordinator.rewards.scoring import GroupScorer
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import StageClock

log = get_logger(__name__)

REDIS_START_S = 30.0
"""The queue's server may be started together with the coordinator."""
REDIS_RETRY_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardAccess:
    """What a workload needs to have its groups scored.

    calls: the way to the reward servers. routes: which revision scores new groups. attention: pauses the run when too many samples have
    no score. shadow: sees every group that was scored. rows: checks rows of the data.
    """

    calls: ScorerCalls
    routes: RouteSource
    attention: Attention
    shadow: ScoredGroupListener | None = None
    rows: RowCheck | None = None


class GroupQueue(Protocol):
    """What a step needs of the experience queue."""

    async def take_groups(self, num_groups: int, timeout_s: float) -> list[QueuedGroup]:
        """Take groups for a step."""
        ...

    async def ack(self, groups: Sequence[QueuedGroup]) -> None:
        """The step that used them has committed."""
        ...

    async def depth(self) -> int:
        """Groups in the queue."""
        ...


class Workload(Protocol):
    """What the run's loop needs."""

    @property
    def queue(self) -> GroupQueue:
        """Where experience waits for training."""
        ...

    @property
    def has_held_out(self) -> bool:
        """Whether there is something to evaluate on."""
        ...

    @property
    def probes(self) -> ProbeSet:
        """Samples to try a new revision of the reward route on."""
        ...

    @property
    def position(self) -> PromptPosition:
        """The next prompt to issue."""
        ...

    def seek(self, position: PromptPosition) -> None:
        """Go on at a position. Raises: StateError: there is no such prompt."""
        ...

    def probe_prompts(self, num_prompts: int) -> Sequence[Int32Array]:
        """Up to so many prompts for audits; [P] ids each."""
        ...

    async def collect(self, policy_version: int) -> CollectedExperience:
        """Generate, score and queue the next step's groups. Raises: StoppedWhilePausedError: see `ExperienceCollector.collect`."""
        ...

    async def evaluate(self, policy_version: int) -> Evaluation:
        """Evaluate on the held-out rows. Raises: StoppedWhilePausedError: see `shoal_coordinator.evaluation.evaluate`."""
        ...


class TrainingWorkload:
    """The real workload, over pools of servers that others fill."""

    def __init__(
        self,
        config: RunConfig,
        data: LoadedData,
        queue: ExperienceQueue,
        rollout_pool: ServerPool[RolloutEndpoint],
        rewards: RewardAccess,
        clock: StageClock,
    ) -> None:
        self._config = config
        self._data = data
        self.queue = queue
        self._source = self._source_at(PromptPosition())
        self._rewards = rewards
        self._scorer = GroupScorer(rewards.calls, data.tokenizer, clock, source_key=config.data.source_key)
        self.probes = ProbeSet.from_rows(data.train, data.tokenizer, source_key=config.data.source_key)
        if rewards.rows is not None:
            rewards.rows.set_rows(RunRows(train=data.train, held_out=data.held_out, tokenizer=data.tokenizer))
        self._dispatcher = Dispatcher(
            rollout_pool,
            config.rollout,
            run_id=config.run.id,
            vocab_size=data.vocab_size,
            clock=clock,
            wait_for_server_s=config.coordinator.ready_timeout_s,
        )
        self._collector = ExperienceCollector(
            self._dispatcher,
            self._scorer,
            queue,
            routes=rewards.routes,
            attention=rewards.attention,
            clock=clock,
            run_id=config.run.id,
            tokenizer_hash=data.tokenizer.tokenizer_hash,
            max_unscored_share=config.reward.max_unscored_share,
            shadow=rewards.shadow,
            probes=self.probes,
        )

    @property
    def has_held_out(self) -> bool:
        """Whether there are held-out rows."""
        return bool(self._data.held_out)

    @property
    def position(self) -> PromptPosition:
        """The next prompt to issue."""
        return self._source.position

    def seek(self, position: PromptPosition) -> None:
        """Issue prompts from a position on.

        Raises: StateError: the rows have no such place.
        """
        if position.index >= len(self._data.train):
            raise StateError(
                f"the run stopped at place {position.index} of its prompts, but {self._config.data.train} has {len(self._data.train)} "
                "usable rows: bring back the rows that it was started with"
            )
        self._source = self._source_at(position)

    def probe_prompts(self, num_prompts: int) -> Sequence[Int32Array]:
        """The first held-out rows; training rows where there are none."""
        rows = self._data.held_out or self._data.train
        return [row.prompt_ids for row in rows[:num_prompts]]

    async def collect(self, policy_version: int) -> CollectedExperience:
        """Generate, score and queue the next prompts with servers of at least policy_version."""
        rollout = self._config.rollout
        stop_ids = self._data.stop_token_ids
        plan = CollectionPlan(
            num_groups=rollout.prompts_per_step,
            request=training_request(rollout, seed=self._config.run.seed, stop_token_ids=stop_ids, min_policy_version=policy_version),
            greedy=greedy_request(rollout, stop_ids, policy_version) if "greedy" in self._config.algorithm.needs else None,
            max_refills=rollout.max_refills if rollout.dynamic_sampling else None,
        )
        return await self._collector.collect(self._source.take, plan)

    async def evaluate(self, policy_version: int) -> Evaluation:
        """Evaluate servers of at least policy_version on the held-out rows."""
        return await evaluate(
            self._data.held_out,
            self._dispatcher,
            self._scorer,
            self._config,
            routes=self._rewards.routes,
            attention=self._rewards.attention,
            stop_token_ids=self._data.stop_token_ids,
            min_policy_version=policy_version,
        )

    def _source_at(self, position: PromptPosition) -> PromptSource:
        return PromptSource(self._data.train, seed=self._config.run.seed, shuffle=self._config.data.shuffle, position=position)


@asynccontextmanager
async def open_workload(
    config: RunConfig, rollout_pool: ServerPool[RolloutEndpoint], rewards: RewardAccess, clock: StageClock
) -> AsyncIterator[TrainingWorkload]:
    """Load data and connect to Redis; closes the queue at the end.

    The queue is emptied: what an earlier coordinator of this run queued but did not train is generated again.

    Raises: ConfigError, DataError, UnavailableError: say what is wrong and what to do.
    """
    queue = await _connect(config)
    try:
        await queue.clear()
        data = await asyncio.to_thread(load_data, config)
        yield TrainingWorkload(config, data, queue, rollout_pool, rewards, clock)
    finally:
        await queue.close()


async def _connect(config: RunConfig) -> ExperienceQueue:
    deadline_s = asyncio.get_running_loop().time() + REDIS_START_S
    while True:
        try:
            return await ExperienceQueue.connect(config.redis.url, config.run.id, config.coordinator.max_pending_groups)
        except UnavailableError as error:
            if asyncio.get_running_loop().time() >= deadline_s:
                raise
            log.info("redis_waits", error=str(error))
            await asyncio.sleep(REDIS_RETRY_PAUSE_S)
