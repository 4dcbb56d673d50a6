"""Shows a run to the REST API, and passes on what users ask of it."""

from __future__ import annotations

import time
from dataclasses import asdict

from shoal_coordinator.fleet import Fleet
from shoal_coordinator.push_history import PushEntry
from shoal_coordinator.registry import Lease, Registry
from shoal_coordinator.rest_models import Command, EvaluationModel, PushModel, ServiceModel, StatusModel, WaitModel
from shoal_coordinator.run import Run, RunParts
from shoal_coordinator.waiting import Wait


class RunBackend:
    """The `RestBackend` of a real run."""

    def __init__(self, run: Run, parts: RunParts, registry: Registry) -> None:
        self._run = run
        self._parts = parts
        self._registry = registry

    def status(self) -> StatusModel:
        """Where the run is."""
        parts, progress = self._parts, self._run.progress
        return StatusModel(
            run_id=parts.config.run.id,
            state=parts.machine.state,
            state_since_unix_s=parts.machine.since_unix_s,
            step=progress.step,
            total_steps=parts.config.run.steps,
            policy_version=parts.fleet.policy_version,
            waiting_for=[_wait_model(wait) for wait in parts.waits.current()],
            evaluations=[EvaluationModel(**asdict(evaluation)) for evaluation in progress.evaluations],
            pause_requested=parts.control.pause_requested,
            stop_requested=parts.control.stop_requested,
            error=progress.error,
            queue_depth=progress.queue_depth,
            started_unix_s=progress.started_unix_s,
            wall_s=progress.wall_s,
            run_folder=parts.config.run.folder,
        )

    def services(self) -> list[ServiceModel]:
        """Registered services."""
        return [_service_model(lease, self._parts.fleet) for lease in self._registry.leases()]

    def steps(self, after: int, limit: int) -> list[dict[str, float | None]]:
        """Metrics of steps after a number."""
        return self._parts.sink.after(after, limit)

    def pushes(self, limit: int) -> list[PushModel]:
        """The last pushes."""
        return [_push_model(entry) for entry in self._parts.history.last(limit)]

    def command(self, command: Command) -> None:
        """Pause, resume or stop. Raises: StateError: not possible now."""
        self._parts.control.command(command)


def _wait_model(wait: Wait) -> WaitModel:
    return WaitModel(
        waiter=wait.waiter,
        waits_for=list(wait.waits_for),
        what=wait.what,
        since_unix_s=wait.since_unix_s,
        waited_s=max(0.0, time.time() - wait.since_unix_s),
    )


def _service_model(lease: Lease, fleet: Fleet) -> ServiceModel:
    info = lease.info
    return ServiceModel(
        service_id=info.service_id,
        kind=info.kind,
        address=info.address,
        incarnation=info.incarnation,
        process_id=info.process_id,
        policy_version=fleet.served_version(info),
        state=fleet.state_of(info),
        registered_unix_s=lease.registered_unix_s,
        renewed_unix_s=lease.renewed_unix_s,
    )


def _push_model(entry: PushEntry) -> PushModel:
    report = entry.report
    return PushModel(
        push_id=report.push_id,
        policy_version=report.policy_version,
        reason=entry.reason,
        state=report.state,
        servers=list(report.committed_servers),
        failed_servers=report.failed_servers,
        stages_s=report.stages_s,
        num_bytes=report.num_bytes,
        pause_ms=report.pause_ms,
        error=report.error,
        started_unix_s=report.started_unix_s,
    )
