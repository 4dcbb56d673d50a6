"""What the REST API takes and answers of reward routes. Times are wall-clock seconds since 1970 unless named otherwise."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from shoal_coordinator.rewards.book import MAX_ADDRESSES, MAX_LABEL_CHARS, MAX_WHO_CHARS, MAX_WHY_CHARS
from shoal_coordinator.rewards.component_checks import MAX_COMPONENTS


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class GatesModel(_Body):
    """Bounds on a comparison; null does not ask."""

    min_samples: int | None = Field(default=None, ge=0)
    """Samples that both revisions have scored."""
    min_rank_correlation: float | None = Field(default=None, ge=-1, le=1)
    """Spearman's correlation of the rewards."""
    max_p99_ms: float | None = Field(default=None, gt=0)
    """99th percentile of the shadow's latency, in milliseconds."""
    max_error_share: float | None = Field(default=None, ge=0, le=1)
    """Share of the shadow's samples that are errors."""


class ReasonBody(_Body):
    """Who asks, and why; both are written to the audit log."""

    who: Annotated[str, Field(min_length=1, max_length=MAX_WHO_CHARS)]
    """A person or a program."""
    why: Annotated[str, Field(min_length=1, max_length=MAX_WHY_CHARS)]
    """One sentence."""


class ComponentBody(_Body):
    """One scorer's part of a reward."""

    scorer: Annotated[str, Field(min_length=1, max_length=64)]
    """Name of the scorer."""
    version: Annotated[str, Field(max_length=64)] = ""
    """Its version; empty is the newest, which is pinned when the route is checked."""
    weight: float = 1.0
    """Factor of what the scorer gives."""
    parts: Annotated[dict[str, float], Field(max_length=64)] = Field(default_factory=dict)
    """Part of a scorer that gives several -> factor; empty takes the scorer's own total."""
    timeout_s: float | None = Field(default=None, ge=0.001, le=86_400)
    """Deadline of scoring one group, in seconds; null is reward.timeout_s of the run."""
    is_required: bool = True
    """Without its score a sample is not scored; an optional one is left out for the whole group if a sibling lacks it."""
    sources: Annotated[list[str], Field(max_length=256)] = Field(default_factory=list)
    """Sources whose rows it scores; empty is all."""


class AddBody(ReasonBody):
    """A new revision."""

    label: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]
    """A human's name for it."""
    components: Annotated[list[ComponentBody], Field(min_length=1, max_length=MAX_COMPONENTS)]
    """What its reward is the sum of."""
    addresses: Annotated[list[str], Field(max_length=MAX_ADDRESSES)] = Field(default_factory=list)
    """host:port of servers that cannot register; the coordinator asks them from now on."""


class ShadowBody(ReasonBody):
    """How much a revision shadows."""

    share: float = Field(ge=0, le=1)
    """Share of the live groups; 0 stops it."""


class ActivateBody(ReasonBody):
    """When a revision becomes active."""

    gates: GatesModel | None = None
    """Bounds that its comparison must keep; null asks for nothing."""
    when_gates_pass: bool = False
    """Activate it as soon as the gates pass, not only if they do now."""


class ComponentModel(_Answer):
    """One scorer's part of a reward."""

    scorer: str
    """Name of the scorer."""
    version: str
    """Its version; empty until it is pinned."""
    fingerprint: str
    """Digest of its code and settings, pinned with the version; empty if its server knows none."""
    weight: float
    """Factor of what the scorer gives."""
    parts: dict[str, float]
    """Part of a scorer that gives several -> factor."""
    timeout_s: float
    """Deadline of scoring one group, in seconds."""
    is_required: bool
    """Without its score a sample is not scored."""
    sources: list[str]
    """Sources whose rows it scores; empty is all."""


class RouteModel(_Answer):
    """A revision of the reward route."""

    number: int
    """Counts from 1 in a run."""
    label: str
    """A human's name for it."""
    stage: str
    """registered, checked, ready, shadow, active, draining, drained, rejected or retired."""
    components: list[ComponentModel]
    """What its reward is the sum of."""
    created_unix_s: float
    """When it was added."""
    stage_since_unix_s: float
    """When it entered its stage."""
    num_open_groups: int
    """Groups that are being scored by it, or will be."""
    problem: str | None
    """Why it was rejected."""
    shadow_share: float | None
    """Share of the live groups that it scores beside the active one."""
    gates: GatesModel | None
    """It becomes active once its comparison passes them."""
    gate_problems: list[str]
    """What they still miss."""


class RewardScorerModel(_Answer):
    """A scorer of a server."""

    name: str
    """Its name."""
    version: str
    """Its version."""
    fingerprint: str
    """Digest of its code and settings; empty if the server knows none."""
    description: str
    """One line of its author's."""


class RewardServerModel(_Answer):
    """A reward server."""

    service_id: str
    """Name, unique in the run; the address of one that cannot register."""
    address: str
    """host:port."""
    is_static: bool
    """The coordinator asks it, since it cannot register."""
    state: str
    """ready; silent: it does not answer; or "other code under the same version": it gets no work of that scorer."""
    problem: str | None
    """What is wrong with it."""
    scorers: list[RewardScorerModel]
    """What it said it offers."""


class RowCheckModel(_Answer):
    """Rows whose own answer was scored at the start of the run."""

    num_checked: int
    """Rows for which the scorers have answered so far."""
    num_unscored: int
    """Of these, rows without a score: they cannot earn a reward; unscored_rows.jsonl in the run's folder has them."""
    num_not_correct: int
    """Of these, rows whose own answer is scored, but not as correct; in the same file."""


class RewardsModel(_Answer):
    """Routes and servers."""

    active: int
    """The revision that scores new groups; 0 before there is one."""
    revisions: list[RouteModel]
    """Oldest first."""
    servers: list[RewardServerModel]
    """By service id."""
    rows: RowCheckModel | None = None
    """The check of rows; null before it begins, and where reward.check_rows is 0."""


class SidesModel(_Answer):
    """The same number of both revisions; null is what cannot be said."""

    active: float | None
    """Of the active revision."""
    shadow: float | None
    """Of the revision in shadow."""


class PercentilesModel(_Answer):
    """Of latencies, in milliseconds; null without any."""

    p50: float | None
    """Median."""
    p95: float | None
    """95th percentile."""
    p99: float | None
    """99th percentile."""


class LatencySidesModel(_Answer):
    """Latencies of both revisions."""

    active: PercentilesModel
    """Of the active revision."""
    shadow: PercentilesModel
    """Of the revision in shadow."""


class WorstCaseModel(_Answer):
    """A response of which the two rewards differ most, each in standard deviations from its mean; texts are cut."""

    sample_id: str
    """uid/sample_index/attempt."""
    prompt: str
    """Beginning of the prompt."""
    response: str
    """Beginning of the response."""
    active: float
    """The active revision's reward."""
    shadow: float
    """The shadow's reward."""


class ComparisonModel(_Answer):
    """How a revision in shadow compares with the active one."""

    number: int
    """The revision in shadow."""
    active: int
    """The active revision."""
    num_groups: int
    """Groups that the shadow was asked for."""
    num_samples: int
    """Samples that both have scored."""
    num_dropped: int
    """Groups that the shadow was too slow for."""
    mean: SidesModel
    """Mean reward."""
    std: SidesModel
    """Standard deviation of the rewards (of the population)."""
    pearson: float | None
    """Linear correlation of the rewards."""
    spearman: float | None
    """Correlation of their ranks."""
    num_pairs: int
    """Pairs of siblings that at least one of the two orders."""
    ranking_disagreement: float | None
    """Share of these that they order differently; a tie is half a difference."""
    latency_ms: LatencySidesModel
    """Latency of a sample, as its servers measured it."""
    error_share: SidesModel
    """Share of samples that are errors."""
    not_scored_share: SidesModel
    """Share of samples that their scorer declined."""
    points: list[tuple[float, float]]
    """(active, shadow) of the latest samples, at most 2000."""
    worst: list[WorstCaseModel]
    """Largest difference first."""
    first_error: str | None
    """Of the shadow."""


class LogEntryModel(_Answer):
    """A line of the audit log."""

    seq: int
    """Counts from 0 in a run."""
    unix_s: float
    """When."""
    who: str
    """Who asked for it; coordinator is the coordinator itself."""
    why: str
    """Their reason."""
    action: str
    """open, add, check, ready, reject, shadow, stop_shadow, arm, activate, rollback, drain or retire."""
    revision: int
    """Of which revision; 0 of none."""
    stage: str
    """The stage of the revision from then on."""
    active: int
    """The revision that is active from then on; 0 if none."""
    detail: dict[str, Any]
    """What belongs to the action: components, addresses, share, gates, problem."""


class LogModel(_Answer):
    """The last lines of the audit log."""

    entries: list[LogEntryModel]
    """Oldest first."""


class SlowSampleModel(_Answer):
    """A sample that took longer to score than nearly all others of its scorer."""

    sample_id: str
    """uid/sample_index/attempt."""
    scorer: str
    """Name of the scorer."""
    version: str
    """Its version."""
    service: str
    """The server that scored it."""
    latency_ms: float
    """How long it took, in milliseconds."""
    p99_ms: float
    """99th percentile of the scorer until then."""


class SlowSamplesModel(_Answer):
    """Slow samples."""

    samples: list[SlowSampleModel]
    """Newest first."""
