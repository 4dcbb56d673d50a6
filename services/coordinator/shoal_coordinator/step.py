"""One training step.

    rollouts, scores, queue -> forward (actor ∥ critic) -> advantages -> actor update -> weight push -+
                                                                     └-> critic update ---------------+-> next step
                                                                         ack once both updates have committed

The push starts as soon as the actor is done and runs beside the critic's update. `fleet.weights_lock` is held from the
actor's update to the end of the push. In the first `algorithm.critic_warmup_steps` steps the critic alone is updated: no actor update,
no push, the same policy version.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.config.gang import GangSection
from shoal.config.models import RunConfig
from shoal.errors import StateError
from shoal.queue.entries import QueuedGroup
from shoal.telemetry.logs import get_logger
from shoal.types import ServiceKind, UpdateResult
from shoal_coordinator.batching import plan_batch
from shoal_coordinator.collected import CollectedExperience
from shoal_coordinator.fleet import Fleet
from shoal_coordinator.gangs import Gang
from shoal_coordinator.kl_controller import KlCoefficients, KlController
from shoal_coordinator.loop_state import LoopJournal
from shoal_coordinator.push_history import PushEntry, PushHistory, PushReason
from shoal_coordinator.stage_clock import Stage, StageClock
from shoal_coordinator.states import RunState
from shoal_coordinator.step_metrics import step_metrics
from shoal_coordinator.waiting import WaitBoard
from shoal_coordinator.workload import Workload

log = get_logger(__name__)

TAKE_TIMEOUT_S = 60.0
"""Everything that is taken has been put before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangRole:
    """A gang's part in every step."""

    kind: ServiceKind
    world_size: int
    section: GangSection


@dataclass(slots=True)
class _StepData:
    """What the concurrent parts of a step leave behind."""

    step: int
    groups: list[QueuedGroup]
    updating: frozenset[ServiceKind]
    gangs: dict[str, dict[str, float]] = field(default_factory=dict)
    committed: dict[ServiceKind, int] = field(default_factory=dict)
    push: PushEntry | None = None

    def add(self, kind: ServiceKind, metrics: dict[str, float]) -> None:
        """Add the metrics of a gang's command."""
        self.gangs.setdefault(kind, {}).update(metrics)

    def add_update(self, kind: ServiceKind, result: UpdateResult) -> None:
        """Note a gang's update."""
        self.committed[kind] = result.policy_version
        self.add(kind, result.metrics | {"update_applied": float(result.applied)})


class StepRunner:
    """Runs steps one after the other; used from the event loop alone.

    Args:
        roles: the actor's and, with a critic, the critic's.
        kl, journal: the loop's state.
        enter: enters a state of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        fleet: Fleet,
        workload: Workload,
        roles: dict[ServiceKind, GangRole],
        kl: KlController,
        journal: LoopJournal,
        enter: Callable[[RunState], None],
        clock: StageClock,
        waits: WaitBoard,
        history: PushHistory,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._workload = workload
        self._roles = roles
        self._kl = kl
        self._journal = journal
        self._enter = enter
        self._clock = clock
        self._waits = waits
        self._history = history
        self._incarnation = uuid.uuid4().hex

    async def run(self) -> dict[str, float]:
        """Run the step behind the journal's; its metrics.

        Raises: ShoalError: names the service that failed. ExceptionGroup: of ShoalErrors, from concurrent parts.
        """
        step = self._journal.state.step + 1
        self._clock.start_step()
        self._enter(RunState.ROLLING_OUT)
        collected = await self._collect(step)
        groups = await self._take(step, collected.num_groups)
        self._enter(RunState.TRAINING)
        data = _StepData(step, groups, self._updating(step))
        await self._forward(data)
        used = self._kl.coefficients
        await self._train(data)
        return step_metrics(
            step=step,
            policy_version=self._fleet.policy_version,
            collected=collected,
            groups=groups,
            gangs=data.gangs,
            settings=self._settings(data, used),
            push=data.push,
            times=self._clock.read(),
        )

    def _updating(self, step: int) -> frozenset[ServiceKind]:
        """Who is updated in a step."""
        kinds = frozenset(self._roles)
        is_warm_up = ServiceKind.CRITIC in kinds and step <= self._config.algorithm.critic_warmup_steps
        return kinds - {ServiceKind.ACTOR} if is_warm_up else kinds

    def _settings(self, data: _StepData, used: KlCoefficients) -> dict[str, float]:
        """What the coordinator has steered in this step."""
        settings = {"kl_coef": used.kl_coef, "kl_loss_coef": used.kl_loss_coef}
        if ServiceKind.CRITIC in self._roles:
            settings["critic_warmup"] = float(ServiceKind.ACTOR not in data.updating)
        return settings

    async def _train(self, data: _StepData) -> None:
        """Update and push, with what will hold afterwards written down before and after."""
        num_samples = sum(len(group.refs) for group in data.groups)
        kl_after = self._kl.coefficients
        # In the critic's warm-up the policy cannot answer to a coefficient.
        if ServiceKind.ACTOR in data.updating:
            kl_after = self._kl.after(data.gangs[ServiceKind.ACTOR].get("kl_per_response"), num_samples)
        position = self._workload.position
        await self._journal.announce(position, kl_after, data.updating)
        await self._update(data)
        await self._journal.commit(data.committed, position, kl_after)
        self._kl.coefficients = kl_after

    async def _collect(self, step: int) -> CollectedExperience:
        with self._waits.waiting("coordinator", self._fleet.traffic_ids, f"rollouts and scores of step {step}"):
            return await self._workload.collect(self._fleet.policy_version)

    async def _take(self, step: int, num_groups: int) -> list[QueuedGroup]:
        with self._clock.measure(Stage.QUEUE), self._waits.waiting("coordinator", ["redis"], f"{num_groups} groups for step {step}"):
            groups = await self._workload.queue.take_groups(num_groups, TAKE_TIMEOUT_S)
        if len(groups) < num_groups:
            raise StateError(
                f"only {len(groups)} of the {num_groups} groups of step {step} came out of the queue within {TAKE_TIMEOUT_S:g} s; "
                "does another process use this run's Redis keys?"
            )
        return groups

    async def _forward(self, data: _StepData) -> None:
        async with asyncio.TaskGroup() as group:
            for role in self._roles.values():
                group.create_task(self._forward_gang(role, data))
        kl = self._kl.coefficients
        advantages = await self._gang(ServiceKind.ACTOR).compute_advantages(data.step, kl.kl_coef, kl.kl_loss_coef)
        data.add(ServiceKind.ACTOR, advantages)

    async def _forward_gang(self, role: GangRole, data: _StepData) -> None:
        # A batch that is short, after drops, may have fewer samples than a full one has mini-batches.
        num_samples = sum(len(group.refs) for group in data.groups)
        batch = plan_batch(
            data.groups,
            role.world_size,
            min(self._config.algorithm.mini_batches, num_samples),
            role.section.micro_batch_tokens,
            self._config.run.id,
            data.step,
            batch_id=f"{self._incarnation}-{data.step}",
        )
        data.add(role.kind, await self._gang(role.kind).forward_batch(batch))

    async def _update(self, data: _StepData) -> None:
        actor_committed = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            if ServiceKind.ACTOR in data.updating:
                group.create_task(self._update_actor_and_push(data, actor_committed))
            else:
                actor_committed.set()
            if ServiceKind.CRITIC in data.updating:
                data.add_update(ServiceKind.CRITIC, await self._gang(ServiceKind.CRITIC).update_batch(data.step))
            await actor_committed.wait()
            # Beside the push: what has been trained must not be trained again, whatever becomes of the push.
            with self._clock.measure(Stage.QUEUE):
                await self._workload.queue.ack(data.groups)

    async def _update_actor_and_push(self, data: _StepData, committed: asyncio.Event) -> None:
        with self._waits.waiting("coordinator", ["actor"], f"its weights to be free for the update of step {data.step}"):
            await self._fleet.weights_lock.acquire()
        try:
            result = await self._gang(ServiceKind.ACTOR).update_batch(data.step)
            data.add_update(ServiceKind.ACTOR, result)
            committed.set()
            self._enter(RunState.PUSHING)
            await self._push(result, data)
        finally:
            self._fleet.weights_lock.release()

    async def _push(self, result: UpdateResult, data: _StepData) -> None:
        if result.policy_version == self._fleet.policy_version:
            log.warning("push_skipped", step=data.step, policy_version=result.policy_version, reason="the update was not applied")
            return
        await self._fleet.push(result.policy_version)
        entry = self._history.last_committed()
        if entry is not None and entry.report.policy_version == result.policy_version and entry.reason is PushReason.STEP:
            data.push = entry

    def _gang(self, kind: ServiceKind) -> Gang:
        return self._fleet.gang(kind)
