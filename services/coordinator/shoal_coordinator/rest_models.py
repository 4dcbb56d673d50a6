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
    """An evaluation on the held-out rows."""

    step: int
    """Training steps done before it."""
    policy_version: int
    """Version that was evaluated."""
    policy_versions: list[int]
    """Versions that the servers reported for the answers' tokens."""
    timestamp_unix_s: float
    """When it ended."""
    accuracy: float
    """Mean over rows of the share of right answers; unscored answers count as wrong."""
    mean_reward: float | None
    """Mean reward of the scored answers; null if it is not finite."""
    best_of_samples: float | None
    """Share of rows with at least one right answer; null for one answer per row."""
    mean_length: float
    """Mean tokens of an answer."""
    truncated_share: float
    """Share of answers that the length limit ended."""
    source_accuracy: dict[str, float]
    """Accuracy of each source of reward.sources."""
    reward_revision: int = 0
    """Revision of the reward route that scored it; 0 where it is not known."""
    num: int
    """Answers asked for."""
    num_rows: int
    """Rows."""
    samples: int
    """Answers per row."""
    num_samples: int
    """Scored answers."""
    num_unscored: int
    """Answers that no scorer could score."""


class PushSummaryModel(_Answer):
    """The weight pushes so far; the times, bytes and servers are those of the last one that was committed."""

    num_pushes: int
    """All pushes, failed ones and those that caught servers up included."""
    num_committed: int
    """Pushes that reached at least one server."""
    num_failed_servers: int
    """How often a server was missed by a push."""
    policy_version: int
    """Version of the last committed push."""
    total_s: float
    """Its seconds, all stages together."""
    max_pause_ms: float
    """The longest time that one of its servers did not serve."""
    sent_bytes: int
    """Bytes that crossed its links."""
    dense_bytes: int
    """Bytes that these stand for."""
    delta_share: float
    """sent_bytes / dense_bytes; 1 if everything was sent."""
    num_servers: int
    """Servers that it reached."""
    last_audit: str | None
    """equal or differs, of the last audit; unknown if a server could not be compared; null if there was none."""


class AlertModel(_Answer):
    """Why the run waits for a human."""

    what: str
    """What is wrong."""
    service: str
    """The scorer and its servers."""
    error: str
    """What it answered."""
    since_unix_s: float
    """Since when."""


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
    pushes: PushSummaryModel | None
    """Weight pushes; null before the first that was committed."""
    alert: AlertModel | None
    """Why the run waits for a human; null if it does not."""
    route_revision: int
    """Revision of the reward route that scores new groups; 0 before there is one."""
    grpc_address: str | None
    """host:port where services register; null before it is served."""


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
    """ready; fenced: takes no traffic until a weight push has reached it; silent: a call found it unavailable, or a reward server has
    not said yet what it offers."""
    fenced_because: str
    """What the last push or audit found wrong with it, or why a reward server is not used; empty if nothing."""
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


class PushServerModel(_Answer):
    """One server's part of a weight push."""

    server_id: str
    """Name of the server."""
    stage: str
    """committed, or the stage in which it failed or that it had reached when the push ended."""
    error: str | None
    """Why it was left out; it is fenced then."""
    dense: bool
    """Everything was asked for, whatever its staging held."""
    transports: list[str]
    """How the bytes went, by pair of trainer rank and engine worker."""
    num_buckets: int
    """Buckets of its plan."""
    sent_bytes: int
    """Bytes that crossed the links."""
    dense_bytes: int
    """Bytes that these stand for."""
    delta_share: float
    """sent_bytes / dense_bytes; 1 if everything was sent."""
    pause_ms: float | None
    """How long it did not serve; null unless it committed."""
    num_aborted: int
    """Running requests that were ended."""


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
    sent_bytes: int
    """Bytes that crossed the links to all servers."""
    dense_bytes: int
    """Bytes that these stand for."""
    delta_share: float
    """sent_bytes / dense_bytes; 1 if everything was sent."""
    server_reports: list[PushServerModel]
    """Each server's part, by server id."""
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


class ProbeModel(_Answer):
    """A server's greedy answers to the probe set, scored by the trainer."""

    num_tokens: int
    """Tokens compared."""
    max_logprob_difference: float | None
    """Largest difference of a log-probability, in nats; null if one of them is not finite."""
    greedy_share: float
    """Share of tokens that the trainer would have chosen as well."""


class ServerAuditModel(_Answer):
    """One server compared with the trainer."""

    server_id: str
    """Name of the server."""
    result: str
    """equal, differs (it is fenced and gets everything again), or unknown."""
    num_parameters: int
    """Engine parameters compared, over all workers."""
    num_pieces: int
    """Pieces of them, each with a digest."""
    num_differing: int
    """Pieces whose digests differ."""
    first_difference: str | None
    """The first parameter that differs, in the plan's order."""
    error: str | None
    """Why the weights could not be compared."""
    probe: ProbeModel | None
    """Agreement on the probe set."""
    probe_error: str | None
    """Why there is none."""


class AuditModel(_Answer):
    """A comparison of the servers' live weights with the trainer's."""

    policy_version: int
    """Version that was compared."""
    is_equal: bool
    """Every server was compared and none differs."""
    servers: list[ServerAuditModel]
    """By server id."""
    started_unix_s: float
    """When it began."""
    duration_s: float
    """How long it took, in seconds."""


class AuditsModel(_Answer):
    """Audits, newest last."""

    audits: list[AuditModel]
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
