"""What the REST API answers. Times are wall-clock seconds since 1970 unless named otherwise."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class Command(StrEnum):
    """What a user can ask of the run."""

    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class WaitModel(_Answer):
    """Somebody waits for somebody."""

    waiter: str
    """Who waits."""
    waits_for: list[str]
    """Service ids that are waited for; empty if it is nobody in particular."""
    what: str
    """What is waited for."""
    since_unix_s: float
    """When the wait began."""
    waited_s: float
    """How long it has lasted, in seconds."""


class EvaluationModel(_Answer):
    """A greedy evaluation on the held-out rows."""

    step: int
    """Training steps done before it."""
    policy_version: int
    """Version that was evaluated."""
    accuracy: float
    """Mean score over the scored samples."""
    num_samples: int
    """Scored samples."""


class StatusModel(_Answer):
    """Where the run is."""

    run_id: str
    """Name of the run."""
    state: str
    """State of the run's state machine."""
    state_since_unix_s: float
    """When that state was entered."""
    step: int
    """The last step that was completed."""
    total_steps: int
    """Steps of the whole run."""
    policy_version: int
    """Version that the rollout servers serve."""
    waiting_for: list[WaitModel]
    """Open waits, oldest first."""
    evaluations: list[EvaluationModel]
    """Evaluations so far."""
    pause_requested: bool
    """A pause takes effect at the next step border."""
    stop_requested: bool
    """The run ends after the current step."""
    error: str | None
    """Why the run failed."""
    queue_depth: int
    """Groups that were left in the experience queue after the last step."""
    started_unix_s: float
    """When the coordinator started."""
    wall_s: float
    """Seconds since then, up to the end of the run."""
    run_folder: str
    """Folder with metrics, report and export."""


class ServiceModel(_Answer):
    """A registered service."""

    service_id: str
    """Name, unique in the run."""
    kind: str
    """rollout, reward, actor or critic."""
    address: str
    """host:port of its gRPC server."""
    incarnation: str
    """Differs for every start of the process."""
    process_id: int
    """Its pid on its host; 0 if unknown."""
    policy_version: int
    """Version that it serves (rollout servers)."""
    state: str
    """ready; fenced: takes no traffic until a weight push brings it to the current version; silent: a call found it unavailable."""
    registered_unix_s: float
    """When it registered."""
    renewed_unix_s: float
    """When it last renewed its lease."""


class ServicesModel(_Answer):
    """All registered services."""

    services: list[ServiceModel]
    """By service id."""


class StepsModel(_Answer):
    """Metrics of steps, oldest first."""

    steps: list[dict[str, int | float | None]]
    """One object a step, as in metrics.jsonl; null for a number that is not finite."""


class PushModel(_Answer):
    """A weight push."""

    push_id: str
    """Unique name."""
    policy_version: int
    """Version that was pushed."""
    reason: str
    """step, or catch_up of a server that joined late."""
    state: str
    """committed (at least one server serves the version), aborted (all serve what they served) or failed."""
    servers: list[str]
    """Servers that now serve the version."""
    failed_servers: dict[str, str]
    """Server to what went wrong; such servers are fenced."""
    stages_s: dict[str, float]
    """Seconds of each stage."""
    num_bytes: int
    """Bytes that were moved."""
    pause_ms: dict[str, float]
    """Server to how long it did not serve, in milliseconds."""
    error: str | None
    """Why the push failed as a whole."""
    started_unix_s: float
    """When it began."""


class PushesModel(_Answer):
    """Weight pushes, newest last."""

    pushes: list[PushModel]
    """Most recent ones."""


class HealthModel(_Answer):
    """The process serves."""

    status: str = Field(default="ok")
    """Always ok; the run's own state is in /v1/status."""


class ErrorDetail(_Answer):
    """What is wrong, which value, and what to do."""

    what: str
    """What is wrong."""
    value: str
    """The offending value."""
    fix: str
    """What to do."""


class ErrorModel(_Answer):
    """Body of every 4xx and 5xx answer."""

    error: ErrorDetail
    """The error."""
