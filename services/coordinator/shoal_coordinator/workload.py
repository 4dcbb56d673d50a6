"""What a run trains on: prompts, the path from prompts to queued experience, held-out evaluation, the queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from shoal.config.models import RunConfig
from shoal.errors import ConfigError, UnavailableError
from shoal.queue.entries import QueuedGroup
from shoal.queue.experience import ExperienceQueue
from shoal.telemetry.logs import get_logger
from shoal.types import Int32Array
from shoal_coordinator.dispatcher import Dispatcher, RolloutEndpoint, training_request
from shoal_coordinator.evaluation import Evaluation, evaluate
from shoal_coordinator.experience import CollectedExperience, ExperienceCollector
from shoal_coordinator.prompts import LengthRule, PromptPosition, PromptRow, PromptSource, load_prompt_rows
from shoal_coordinator.scoring import GroupScorer, RewardEndpoint
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import StageClock
from shoal_coordinator.tokenizing import HuggingFaceTokenizer, ModelLimits, load_tokenizer, read_model_limits, stop_ids

log = get_logger(__name__)

REDIS_START_S = 30.0
"""The queue's server may be started together with the coordinator."""
REDIS_RETRY_PAUSE_S = 0.5
PROGRESS_LOG_S = 5.0


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

    def seek(self, step: int) -> None:
        """Go on as after `step` completed steps."""
        ...

    def probe_prompts(self, num_prompts: int) -> Sequence[Int32Array]:
        """Up to so many prompts for audits; [P] ids each."""
        ...

    async def collect(self, policy_version: int) -> CollectedExperience:
        """Generate, score and queue the next step's groups."""
        ...

    async def evaluate(self, policy_version: int) -> Evaluation:
        """Greedy accuracy on the held-out rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedData:
    """Tokenised rows and what their model says."""

    tokenizer: HuggingFaceTokenizer
    train: list[PromptRow]
    held_out: list[PromptRow]
    stop_token_ids: tuple[int, ...]
    vocab_size: int


def load_data(config: RunConfig) -> LoadedData:
    """Read tokenizer and rows; slow, so call it in a thread.

    Raises: ConfigError: the model's folder is unusable. DataError: a file or row is.
    """
    limits = read_model_limits(config.model.path)
    _check_context(config, limits)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    rule = LengthRule(
        max_prompt_tokens=config.data.max_prompt_tokens,
        overlong=config.data.overlong,
        vocab_size=limits.vocab_size,
        max_context=limits.max_context,
        max_new_tokens=config.rollout.max_new_tokens,
    )
    train = load_prompt_rows(
        config.data.train,
        config.data,
        tokenizer,
        rule,
        min_rows=config.rollout.prompts_per_step,
        progress=progress_log(config.data.train),
    )
    held_out: list[PromptRow] = []
    if config.data.held_out is not None:
        held_out = load_prompt_rows(config.data.held_out, config.data, tokenizer, rule, max_rows=config.evaluation.max_prompts)
    log.info("data_loaded", train_rows=len(train), held_out_rows=len(held_out))
    return LoadedData(
        tokenizer=tokenizer, train=train, held_out=held_out, stop_token_ids=stop_ids(tokenizer, limits), vocab_size=limits.vocab_size
    )


def _check_context(config: RunConfig, limits: ModelLimits) -> None:
    new_tokens = config.rollout.max_new_tokens
    if limits.max_context is not None and new_tokens >= limits.max_context:
        raise ConfigError(
            f"rollout.max_new_tokens is {new_tokens}, but the context of model {config.model.path} has {limits.max_context} tokens, prompt "
            f"included: lower it below {limits.max_context}"
        )


def progress_log(path: str, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """A callback for (tokenised, all) rows that logs every PROGRESS_LOG_S seconds, so that a large file is seen to advance."""
    last_s = clock()

    def report(num_done: int, num_rows: int) -> None:
        nonlocal last_s
        if clock() - last_s >= PROGRESS_LOG_S:
            last_s = clock()
            log.info("data_loading", path=path, num_done=num_done, num_rows=num_rows)

    return report


class TrainingWorkload:
    """The real workload, over pools of servers that others fill."""

    def __init__(
        self,
        config: RunConfig,
        data: LoadedData,
        queue: ExperienceQueue,
        rollout_pool: ServerPool[RolloutEndpoint],
        reward_pool: ServerPool[RewardEndpoint],
        clock: StageClock,
    ) -> None:
        self._config = config
        self._data = data
        self.queue = queue
        self._source = self._source_at(PromptPosition())
        self._scorer = GroupScorer(reward_pool, config.reward, data.tokenizer, clock, wait_for_server_s=config.coordinator.ready_timeout_s)
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
            clock=clock,
            run_id=config.run.id,
            tokenizer_hash=data.tokenizer.tokenizer_hash,
            max_unscored_share=config.reward.max_unscored_share,
            scorer_name=config.reward.scorer,
        )

    @property
    def has_held_out(self) -> bool:
        """Whether there are held-out rows."""
        return bool(self._data.held_out)

    def seek(self, step: int) -> None:
        """Issue prompts as after `step` steps, each of which takes rollout.prompts_per_step."""
        epoch, index = divmod(step * self._config.rollout.prompts_per_step, len(self._data.train))
        self._source = self._source_at(PromptPosition(epoch=epoch, index=index))

    def probe_prompts(self, num_prompts: int) -> Sequence[Int32Array]:
        """The first held-out rows; training rows where there are none."""
        rows = self._data.held_out or self._data.train
        return [row.prompt_ids for row in rows[:num_prompts]]

    async def collect(self, policy_version: int) -> CollectedExperience:
        """Generate, score and queue the next prompts with servers of at least policy_version."""
        rollout = self._config.rollout
        tasks = self._source.take(rollout.prompts_per_step)
        request = training_request(
            rollout, seed=self._config.run.seed, stop_token_ids=self._data.stop_token_ids, min_policy_version=policy_version
        )
        return await self._collector.collect(tasks, request)

    async def evaluate(self, policy_version: int) -> Evaluation:
        """Greedy accuracy of servers of at least policy_version."""
        return await evaluate(
            self._data.held_out,
            self._dispatcher,
            self._scorer,
            self._config.rollout,
            stop_token_ids=self._data.stop_token_ids,
            min_policy_version=policy_version,
        )

    def _source_at(self, position: PromptPosition) -> PromptSource:
        return PromptSource(self._data.train, seed=self._config.run.seed, shuffle=self._config.data.shuffle, position=position)


@asynccontextmanager
async def open_workload(
    config: RunConfig, rollout_pool: ServerPool[RolloutEndpoint], reward_pool: ServerPool[RewardEndpoint], clock: StageClock
) -> AsyncIterator[TrainingWorkload]:
    """Load data and connect to Redis; closes the queue at the end.

    The queue is emptied: what an earlier coordinator of this run queued but did not train is generated again.

    Raises: ConfigError, DataError, UnavailableError: say what is wrong and what to do.
    """
    queue = await _connect(config)
    try:
        await queue.clear()
        data = await asyncio.to_thread(load_data, config)
        yield TrainingWorkload(config, data, queue, rollout_pool, reward_pool, clock)
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
