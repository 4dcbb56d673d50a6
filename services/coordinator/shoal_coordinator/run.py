"""The life of a run: services, evaluation, steps, final evaluation, export, report.

The loop changes the state only through the transition table and ends in FINISHED, STOPPED or FAILED; it never raises but
for cancellation (SIGTERM), which ends in STOPPED without the final evaluation and export.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from shoal.config.models import RunConfig
from shoal.errors import InternalError, ShoalError, UnavailableError
from shoal.telemetry.logs import get_logger
from shoal.types import ServiceKind
from shoal_coordinator.alerts import StoppedWhilePausedError
from shoal_coordinator.control import RunControl
from shoal_coordinator.error_groups import first_error
from shoal_coordinator.fleet import Fleet
from shoal_coordinator.kl_controller import KlController
from shoal_coordinator.loop_state import STATE_NAME, GangMark, LoopJournal, find_state, loop_state
from shoal_coordinator.metrics_sink import MetricsSink
from shoal_coordinator.push_history import PushHistory
from shoal_coordinator.report import LoggedEvaluation, RunOutcome, build_report, write_json_atomically
from shoal_coordinator.rewards.probes import ProbeSet
from shoal_coordinator.stage_clock import StageClock
from shoal_coordinator.states import RunState, StateMachine
from shoal_coordinator.step import GangRole, StepRunner
from shoal_coordinator.waiting import WaitBoard
from shoal_coordinator.workload import Workload

log = get_logger(__name__)

REPORT_NAME = "report.json"
EXPORT_NAME = "export"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What a run is made of.

    open_workload: loads data and connects to the queue. open_route: makes sure that a revision of the reward route is active.
    """

    config: RunConfig
    machine: StateMachine
    control: RunControl
    fleet: Fleet
    sink: MetricsSink
    history: PushHistory
    clock: StageClock
    waits: WaitBoard
    open_workload: Callable[[], AbstractAsyncContextManager[Workload]]
    open_route: Callable[[ProbeSet], Awaitable[None]]


@dataclass(slots=True)
class RunProgress:
    """What has been reached so far."""

    started_unix_s: float = field(default_factory=time.time)
    ended_unix_s: float | None = None
    step: int = 0
    evaluations: list[LoggedEvaluation] = field(default_factory=list)
    export_folder: str | None = None
    error: str | None = None
    queue_depth: int = 0

    @property
    def wall_s(self) -> float:
        """Seconds since the start, up to the end."""
        return (time.time() if self.ended_unix_s is None else self.ended_unix_s) - self.started_unix_s


class Run:
    """One run; `execute` it once."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._fleet = parts.fleet
        self._machine = parts.machine
        self.progress = RunProgress()
        # Absolute: the trainer's working directory may be another.
        self._export_folder = str(Path(self._config.run.folder).resolve() / EXPORT_NAME)

    async def execute(self) -> None:
        """Run to the end and write the report.

        Raises: CancelledError: cancelled; the state is STOPPED then, unless the run had ended before.
        """
        try:
            await self._execute()
        except asyncio.CancelledError:
            self._end(RunState.STOPPED)
            raise
        except ShoalError as error:
            self._fail(error)
        except BaseExceptionGroup as errors:
            self._fail(first_error(errors))
        except Exception as error:  # noqa: BLE001 - the loop's edge: whatever went wrong must become the state FAILED
            self._fail(error)

    async def _execute(self) -> None:
        async with asyncio.TaskGroup() as group:
            guard = group.create_task(self._fleet.wait_for_lost_gang())
            await self._train()
            guard.cancel()

    async def _train(self) -> None:
        async with self._parts.open_workload() as workload:
            # STARTING until the model's limits, the data and Redis have been found good: whoever starts services may wait for that.
            self._machine.go(RunState.WAITING_FOR_SERVICES)
            self._fleet.set_probe_prompts(workload.probe_prompts(self._config.push.audit_prompts))
            if not await self._unless_stopped(self._begin(workload)):
                self._end(RunState.STOPPED)
                return
            runner = await self._prepare(workload)
            try:
                await self._step_and_evaluate(runner, workload)
            except StoppedWhilePausedError as stopped:
                log.warning("stopped_while_paused", reason=str(stopped))
            await self._finish()

    async def _begin(self, workload: Workload) -> None:
        await self._wait_for_services()
        await self._parts.open_route(workload.probes)

    async def _step_and_evaluate(self, runner: StepRunner, workload: Workload) -> None:
        """All that trains and measures.

        Raises: StoppedWhilePausedError: stopped in the midst of a step or an evaluation.
        """
        if workload.has_held_out:
            await self._evaluate(workload)
        while await self._may_step():
            await self._step(runner, workload)
        if workload.has_held_out and self.progress.evaluations[-1].step != self.progress.step:
            await self._evaluate(workload)

    async def _prepare(self, workload: Workload) -> StepRunner:
        """Learn where the gangs are; from here on their state is needed."""
        config, fleet, parts = self._config, self._fleet, self._parts
        kinds = [ServiceKind.ACTOR, ServiceKind.CRITIC] if config.algorithm.has_critic else [ServiceKind.ACTOR]
        descriptions = {kind: await fleet.gang(kind).describe() for kind in kinds}
        marks = {
            kind: GangMark(incarnation=fleet.gang(kind).info.incarnation, step=description.step)
            for kind, description in descriptions.items()
        }
        path = Path(config.run.folder) / STATE_NAME
        found = find_state(path, config.run.id, marks)
        kl = KlController(config.algorithm, None if found is None else found.coefficients)
        state = loop_state(0, marks, workload.position, kl.coefficients) if found is None else found
        workload.seek(state.position)
        fleet.guards_gangs = True
        self.progress.step = state.step
        fleet.set_policy_version(state.policy_version)
        sections = {ServiceKind.ACTOR: config.actor, ServiceKind.CRITIC: config.critic}
        return StepRunner(
            config,
            fleet=fleet,
            workload=workload,
            roles={
                kind: GangRole(kind=kind, world_size=description.world_size, section=sections[kind])
                for kind, description in descriptions.items()
            },
            kl=kl,
            journal=LoopJournal(path, config.run.id, state),
            enter=self._machine.go,
            clock=parts.clock,
            waits=parts.waits,
            history=parts.history,
        )

    async def _may_step(self) -> bool:
        """At a step border: pause if asked to, and say whether there is another step."""
        control = self._parts.control
        if control.pause_requested:
            with self._parts.waits.waiting("coordinator", ["user"], "the run to be resumed"):
                await control.wait_while_paused()
        limit_s = self._config.run.max_wall_s
        if control.stop_requested or self.progress.step >= self._config.run.steps:
            return False
        if limit_s is not None and self.progress.wall_s >= limit_s:
            log.info("wall_limit_reached", wall_s=self.progress.wall_s, max_wall_s=limit_s)
            return False
        return True

    async def _step(self, runner: StepRunner, workload: Workload) -> None:
        await self._ensure_services()
        step = self.progress.step + 1
        metrics = await runner.run()
        self.progress.step = step
        self.progress.queue_depth = await workload.queue.depth()
        self._parts.sink.add(metrics)
        every = self._config.evaluation.every
        if every and step % every == 0 and step < self._config.run.steps and workload.has_held_out:
            await self._evaluate(workload)

    async def _evaluate(self, workload: Workload) -> None:
        await self._ensure_services()
        self._machine.go(RunState.EVALUATING)
        version = self._fleet.policy_version
        with self._parts.waits.waiting("coordinator", self._fleet.traffic_ids, f"evaluation of policy version {version}"):
            result = await workload.evaluate(version)
        evaluation = LoggedEvaluation(step=self.progress.step, policy_version=version, timestamp_unix_s=time.time(), result=result)
        self.progress.evaluations.append(evaluation)
        self._parts.sink.add_evaluation(evaluation)

    async def _finish(self) -> None:
        stopped = self._parts.control.stop_requested
        self._machine.go(RunState.FINISHING)
        result = await self._fleet.gang(ServiceKind.ACTOR).export_model(self._export_folder)
        self.progress.export_folder = result.folder
        self._end(RunState.STOPPED if stopped else RunState.FINISHED)

    async def _ensure_services(self) -> None:
        """Before a step or an evaluation: everything is there, or wait for it.

        Raises: UnavailableError, TransportError: it did not come. If that is a reward server the run goes on: it will pause with an alert
            that names the scorer, and keep what it has generated.
        """
        if not self._fleet.missing(self._wanted()):
            return
        if self._machine.state is not RunState.WAITING_FOR_SERVICES:
            self._machine.go(RunState.WAITING_FOR_SERVICES)
        try:
            await self._wait_for_services()
        except UnavailableError as error:
            if set(self._fleet.missing(self._wanted())) - {ServiceKind.REWARD}:
                raise
            log.warning("no_reward_server", error=str(error))

    async def _wait_for_services(self) -> None:
        await self._fleet.wait_for(self._wanted())

    def _wanted(self) -> dict[ServiceKind, int]:
        wanted = {ServiceKind.ACTOR: 1, ServiceKind.REWARD: 1, ServiceKind.ROLLOUT: self._config.rollout.min_servers}
        return wanted | ({ServiceKind.CRITIC: 1} if self._config.algorithm.has_critic else {})

    async def _unless_stopped(self, work: Coroutine[object, object, None]) -> bool:
        """Run work, but give up when a stop is requested; whether it was done."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work), group.create_task(self._parts.control.wait_for_stop())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done = tasks[0].done()
            for task in tasks:
                task.cancel()
        return done

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, ShoalError):
            log.error("run_failed", error=str(error))
            self.progress.error = str(error)
        else:
            log.exception("run_failed")  # noqa: LOG004 - called from except clauses alone
            self.progress.error = str(InternalError(f"the coordinator failed: {error!r}; its log has the traceback"))
        self._end(RunState.FAILED)

    def _end(self, state: RunState) -> None:
        """Write the report, then enter the final state: who sees the state finds the report."""
        if self._machine.is_terminal:
            return
        progress = self.progress
        progress.ended_unix_s = time.time()
        sink = self._parts.sink
        outcome = RunOutcome(
            state=state,
            error=progress.error,
            started_unix_s=progress.started_unix_s,
            ended_unix_s=progress.ended_unix_s,
            evaluations=progress.evaluations,
            num_steps=sink.num_steps,
            num_samples=sink.num_samples,
            num_tokens=sink.num_tokens,
            recent_steps=sink.kept(),
            policy_version=self._fleet.policy_version,
            export_folder=progress.export_folder,
            pushes=self._parts.history.summary(),
        )
        try:
            write_json_atomically(Path(self._config.run.folder) / REPORT_NAME, build_report(self._config, outcome))
        except OSError as error:
            log.error("report_failed", error=str(error))
        self._machine.go(state)
