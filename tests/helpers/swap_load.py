"""Groups that flow through the real reward path while somebody swaps the reward.

Real: the book with its log on disk, lifecycle, shadow, calls over gRPC, scoring, collecting, evaluation, the queue in Redis. Made up: the
answers (`coordinator_fakes.FakeRollout`) and the training (records are read and acknowledged).

    async with SwapLoad(folder, redis_url, Mode(name="plain"), seed=1) as load:
        await load.run(num_swaps=100)
    check_load(load)
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

from shoal_coordinator.alerts import RunAlert
from shoal_coordinator.connections import GrpcConnector
from shoal_coordinator.dispatcher import Dispatcher, RolloutEndpoint
from shoal_coordinator.evaluation import Evaluation, evaluate, greedy_request
from shoal_coordinator.experience import CollectionPlan, ExperienceCollector
from shoal_coordinator.fleet import Fleet
from shoal_coordinator.prompts import PromptRow, PromptTask
from shoal_coordinator.push_history import PushHistory
from shoal_coordinator.registry import Registry
from shoal_coordinator.rewards import assembly
from shoal_coordinator.rewards.audit_log import LOG_NAME, LogEntry, RouteAction
from shoal_coordinator.rewards.book import RouteBook, RoutePin
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.rewards.probes import ProbeSet
from shoal_coordinator.rewards.route import RouteRevision
from shoal_coordinator.rewards.route_stages import RouteStage
from shoal_coordinator.rewards.scored import ScoredGroup
from shoal_coordinator.rewards.scoring import GroupScorer
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import StageClock
from shoal_coordinator.waiting import WaitBoard

from shoal.errors import StateError
from shoal.queue.experience import ExperienceQueue
from shoal.queue.records import RecordReader
from shoal.types import ExperienceRecord, ServiceInfo, ServiceKind
from tests.helpers.coordinator_fakes import VOCAB_SIZE, FakeTokenizer, make_request, rollout_pool
from tests.helpers.swap_modes import (
    EXTRA_REVISIONS,
    FIRST_REVISIONS,
    GROUP_SIZE,
    HANGING,
    LEASE_S,
    NUM_GROUPS,
    OFFERS,
    UNTIL_S,
    WHO,
    WHY,
    Mode,
    config_of,
    exact,
    is_of_c,
    probe_of,
    prompt_ids_of,
    row_of,
    task_of,
)
from tests.helpers.swap_recording import DurableLog, Issued, RecordingCalls, SlowRollout
from tests.helpers.swap_servers import Faults, Journal, ScorerKey, journalling_servers


class SwapLoad:
    """See the module; `run` once. What has been seen is in the attributes afterwards."""

    def __init__(self, folder: Path, redis_url: str, mode: Mode, seed: int) -> None:
        self.folder = folder / mode.name
        self.mode = mode
        self.rng = random.Random(seed)
        self.config = config_of(self.folder, redis_url, mode, seed)
        self.journal, self.asked = Journal(), Counter[tuple[bool, str, str, str]]()
        self.faults = Faults(rng=self.rng, failing_share=mode.failing_share)
        self.durable = DurableLog(self.folder / LOG_NAME)
        self.issued: dict[str, Issued] = {}
        self.evaluations: list[tuple[str, Issued, Evaluation]] = []
        self.records: list[ExperienceRecord] = []
        self.step_s: list[float] = []
        self.problems: list[str] = []
        self.done: Counter[str] = Counter()
        self.num_refused = 0
        self.num_pauses = 0
        self.repair: Callable[[], Awaitable[object]] | None = None
        self.pinned: list[int] = []
        self._position = 0
        self._num_added = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        stack = self._stack
        stack.enter_context(mock.patch("os.fsync", self.durable.fsync))
        self.addresses = await stack.enter_async_context(journalling_servers(OFFERS, self.journal, self.faults))
        self._build()
        self._running = [asyncio.create_task(self.fleet.run()), asyncio.create_task(self.path.run())]
        for service_id in ("a", "b"):
            self._register(service_id)
        redis = self.config.redis.url
        self.queue = await ExperienceQueue.connect(redis, self.config.run.id, 1000)
        stack.push_async_callback(self.queue.close)
        self._reader = RecordReader(redis, self.config.run.id)
        await self.path.lifecycle.open(ProbeSet([probe_of(index) for index in range(16)]))
        self.collector = self._collector()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._running:
            task.cancel()
        ended = await asyncio.gather(*self._running, return_exceptions=True)
        self.path.close()
        await self._stack.aclose()
        assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended

    @property
    def book(self) -> RouteBook:
        """The book of routes."""
        return self.path.book

    async def run(self, num_swaps: int) -> None:
        """Let groups flow until the active revision has changed so often, and everything that was added has been checked."""
        async with self._in_time():
            await self.add_ready(FIRST_REVISIONS)
            for number in self._numbers(RouteStage.READY)[-2:]:
                await self.path.lifecycle.shadow(number, 1.0, who=WHO, why=WHY)
            if self.mode.hangs:
                await self._let_a_shadow_hang()
            async with asyncio.TaskGroup() as group:
                flowing = [group.create_task(self._flow())]
                if self.mode.evaluates:
                    flowing.append(group.create_task(self._evaluate()))
                other = group.create_task(self._change_others())
                await self._swap(num_swaps)
                other.cancel()
                self._is_over = True
                await asyncio.wait(flowing)
            await self._until(lambda: not self.book.in_stage(RouteStage.DRAINING))

    async def add_ready(self, number: int) -> list[int]:
        """Add revisions and wait until they may be used."""
        for _ in range(number):
            await self._add()
        await self._until(lambda: len(self.book.in_stage(RouteStage.READY)) >= number)
        return self._numbers(RouteStage.READY)

    async def flow_until(self, condition: Callable[[], bool]) -> None:
        """Let groups flow until something has happened."""
        self._is_over = False
        async with self._in_time(), asyncio.TaskGroup() as group:
            flowing = group.create_task(self._flow())
            await self._until(condition)
            self._is_over = True
            await flowing

    _is_over = False

    async def _flow(self) -> None:
        plan = CollectionPlan(
            num_groups=NUM_GROUPS,
            request=make_request(GROUP_SIZE),
            greedy=greedy_request(self.config.rollout, (), 0) if self.mode.has_greedy else None,
            max_refills=self.mode.max_refills,
        )
        while not self._is_over:
            started_s = time.monotonic()
            collected = await self.collector.collect(self._take, plan)
            self.step_s.append(time.monotonic() - started_s)
            groups = await self.queue.take_groups(collected.num_groups, 10.0)
            assert len(groups) == collected.num_groups
            for group in groups:
                self.records += await asyncio.to_thread(self._reader.fetch, [ref.key for ref in group.refs])
            await self.queue.ack(groups)

    def _take(self, num_prompts: int) -> list[PromptTask]:
        first, self._position = self._position, self._position + num_prompts
        tasks = [task_of(index) for index in range(first, self._position)]
        for task in tasks:
            self.issued[task.group_id] = Issued(self.book.active_number, str(task.row["data_source"]))
        return tasks

    async def _evaluate(self) -> None:
        rows = [PromptRow(row_index=index, prompt_ids=prompt_ids_of(index), text=f"row {index}", row=row_of(index)) for index in range(6)]
        while not self._is_over:
            version = 1 + len(self.evaluations)
            issued = self.issued[f"eval-v{version}"] = Issued(self.book.active_number)
            result = await evaluate(
                rows,
                self.dispatcher,
                self.scorer,
                self.config,
                routes=self,
                attention=self,
                stop_token_ids=(),
                min_policy_version=version,
            )
            issued.is_done = True
            self.evaluations.append((f"eval-v{version}", issued, result))

    @property
    def active(self) -> RouteRevision:
        """See `RouteSource`."""
        return self.book.active

    def pin(self) -> RoutePin:
        """Pin the active revision, which the disk must know to be active; the last line may not have taken effect yet."""
        pin = self.book.pin()
        self.pinned.append(pin.revision.number)
        if pin.revision.number not in self.durable.active[-2:]:
            self.problems.append(f"revision {pin.revision.number} was pinned, but the disk says {self.durable.active[-2:]}")
        return pin

    def offer(self, scored: ScoredGroup) -> None:
        """A group is done, all but its pin's release; pass it on to the shadow."""
        issued = self.issued[scored.group.task.group_id]
        if issued.is_done:
            self.problems.append(f"group {scored.group.task.group_id} was done twice")
        if self.book.stage(scored.revision) not in (RouteStage.ACTIVE, RouteStage.DRAINING):
            self.problems.append(f"a group was scored by revision {scored.revision}, which is {self.book.stage(scored.revision)}")
        issued.is_done = True
        self.path.shadow.offer(scored)

    async def wait_for_resume(self, alert: RunAlert) -> None:
        """Repair the reward or go back to the one before, as chance has it."""
        assert self.mode.breaks or self.mode.pauses, alert
        self.num_pauses += 1
        await (self.repair or self._repair)()

    async def _repair(self) -> None:
        await asyncio.sleep(self.rng.random() * 0.01)
        if self._may_roll_back() and self.rng.random() < 0.5:
            await self._tried(self.path.lifecycle.rollback(who=WHO, why=WHY))
        if self._key_of(self.book.active_number) in self.faults.broken:
            self.faults.broken = frozenset()

    def _key_of(self, number: int) -> ScorerKey:
        component = self.book.revision(number).components[0]
        return component.scorer, component.version

    def _see_entry(self, entry: LogEntry) -> None:
        self.done[entry.action] += 1
        # After a pause groups are pinned anew.
        if entry.action is RouteAction.DRAIN and not (self.mode.breaks or self.mode.pauses):
            left = [name for name, issued in self.issued.items() if issued.revision == entry.revision and not issued.is_done]
            if left:
                self.problems.append(f"revision {entry.revision} was drained while it had {left}")

    async def _swap(self, num_swaps: int) -> None:
        lifecycle = self.path.lifecycle
        while not self._has_seen_enough(num_swaps):
            await asyncio.sleep(self.rng.random() * 0.01)
            if self.mode.breaks and self.rng.random() < 0.2:
                self.faults.broken = frozenset({self._key_of(self.book.active_number)})
            if self.rng.random() < 0.35 and self._may_roll_back():
                await self._tried(lifecycle.rollback(who=WHO, why=WHY))
                continue
            # Mostly back and forth: what was active once cannot be shadowed again.
            is_new = self.rng.random() < 0.1
            stages = (RouteStage.READY, RouteStage.SHADOW) if is_new else (RouteStage.DRAINING, RouteStage.DRAINED)
            number = self._choose(*stages) or self._choose(RouteStage.READY)
            if number is not None:
                await self._tried(lifecycle.activate(number, None, when_gates_pass=False, who=WHO, why=WHY))

    def _has_seen_enough(self, num_swaps: int) -> bool:
        """Chance must not leave out what the mode is for."""
        is_swapped = self.done[RouteAction.ACTIVATE] + self.done[RouteAction.ROLLBACK] > num_swaps
        is_shadowed = any(not is_live for is_live, *_ in self.asked)
        has_failed = bool(self.journal.failed) or not self.mode.failing_share
        has_paused = bool(self.num_pauses) or not self.mode.breaks
        has_evaluated = bool(self.evaluations) or not self.mode.evaluates
        has_varied = len({record.route_revision for record in self.records}) >= 3 and self.done[RouteAction.DRAIN] >= 10
        return is_swapped and is_shadowed and has_failed and has_paused and has_evaluated and has_varied

    async def _change_others(self) -> None:
        lifecycle = self.path.lifecycle
        while True:
            await asyncio.sleep(self.rng.random() * 0.02)
            chance = self.rng.random()
            if chance < 0.4 and (number := self._choose(RouteStage.READY, RouteStage.SHADOW)) is not None:
                await self._tried(lifecycle.shadow(number, self.rng.choice([0.5, 1.0]), who=WHO, why=WHY))
            elif chance < 0.6 and (number := self._choose(RouteStage.SHADOW)) is not None:
                await self._tried(lifecycle.shadow(number, 0.0, who=WHO, why=WHY))
            elif chance < 0.8 and self._num_added < FIRST_REVISIONS + EXTRA_REVISIONS:
                await self._add()
            elif self._num_usable() > 5 and (number := self._choose(RouteStage.READY, RouteStage.SHADOW, RouteStage.DRAINED)) is not None:
                await self._tried(lifecycle.retire(number, who=WHO, why=WHY))

    async def _tried(self, command: Coroutine[Any, Any, object]) -> None:
        """Two people command at once, so one may come too late."""
        try:
            await command
        except StateError:
            self.num_refused += 1

    async def _add(self) -> None:
        self._num_added += 1
        components = self.mode.components(self._num_added)
        addresses = [self.addresses["c"]] if any(is_of_c(component) for component in components) else []
        await self.path.lifecycle.add(f"r{self._num_added}", components, addresses, who=WHO, why=WHY)

    async def _let_a_shadow_hang(self) -> None:
        hanging = replace(exact(HANGING[1]), timeout_s=600.0)
        revision = await self.path.lifecycle.add("hangs", [hanging], [self.addresses["c"]], who=WHO, why=WHY)
        await self._until(lambda: self.book.stage(revision.number) is RouteStage.READY)
        self.faults.hanging = frozenset({HANGING})
        await self.path.lifecycle.shadow(revision.number, 1.0, who=WHO, why=WHY)
        self._hanging = revision.number

    _hanging = 0

    def _choose(self, *stages: RouteStage) -> int | None:
        usable = [number for number in self._numbers(*stages) if number != self._hanging]
        return self.rng.choice(usable) if usable else None

    def _numbers(self, *stages: RouteStage) -> list[int]:
        return [record.revision.number for record in self.book.records() if record.stage in stages]

    def _may_roll_back(self) -> bool:
        previous = self.book.previous_number
        return bool(previous) and self.book.stage(previous) in (RouteStage.DRAINING, RouteStage.DRAINED)

    def _num_usable(self) -> int:
        over = (RouteStage.RETIRED, RouteStage.REJECTED)
        return sum(record.stage not in over for record in self.book.records())

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Say where everything was if it takes too long."""
        try:
            async with asyncio.timeout(UNTIL_S):
                yield
        except TimeoutError:
            stages = [(record.revision.number, str(record.stage)) for record in self.book.records()]
            raise AssertionError(f"not done in time: {stages}, {self.done}, {len(self.step_s)} steps, {self.num_refused} refused") from None

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            rejected = [record.problem for record in self.book.in_stage(RouteStage.REJECTED)]
            assert not rejected, rejected
            await self.book.wait_for_change(0.05)

    def _build(self) -> None:
        config, waits, self.clock = self.config, WaitBoard(), StageClock()
        self.registry = Registry(run_id=config.run.id, lease_s=LEASE_S)
        pool = ServerPool[RewardEndpoint]("reward server", waits)
        connector = GrpcConnector(config.security)
        self.fleet = Fleet(
            registry=self.registry,
            connector=connector,
            config=config,
            clock=self.clock,
            waits=waits,
            history=PushHistory(),
            rollout_pool=ServerPool[RolloutEndpoint]("rollout server", waits),
            reward_pool=pool,
        )
        with mock.patch.object(assembly, "ScorerCalls", partial(RecordingCalls, self.asked)):
            self.path = assembly.build_reward_path(
                config, registry=self.registry, connector=connector, servers=self.fleet, pool=pool, waits=waits
            )
        self.path.book.subscribe(self._see_entry)

    def _register(self, service_id: str) -> None:
        address = self.addresses[service_id]
        run_id = self.config.run.id
        info = ServiceInfo(run_id=run_id, service_id=service_id, kind=ServiceKind.REWARD, address=address, incarnation="1")
        self.registry.register(info)

    def _collector(self) -> ExperienceCollector:
        self.dispatcher = Dispatcher(
            rollout_pool(r=SlowRollout(self.rng)),
            self.config.rollout,
            run_id=self.config.run.id,
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
            wait_for_server_s=1.0,
        )
        self.scorer = GroupScorer(self.path.calls, FakeTokenizer(), self.clock)
        return ExperienceCollector(
            self.dispatcher,
            self.scorer,
            self.queue,
            routes=self,
            attention=self,
            clock=self.clock,
            run_id=self.config.run.id,
            tokenizer_hash="hash",
            max_unscored_share=0.0,
            shadow=self,
        )
