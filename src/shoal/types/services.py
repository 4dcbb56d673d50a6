"""What the registry knows about a service."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ServiceKind(StrEnum):
    """What a registered service does."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    ACTOR = "actor"
    CRITIC = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """A registered service. address is host:port; policy_version matters for rollout servers only."""

    run_id: str
    service_id: str
    kind: ServiceKind
    address: str
    incarnation: str
    policy_version: int = 0
    process_id: int = 0


class TrainerRole(StrEnum):
    """What a trainer gang trains."""

    ACTOR = "actor"
    CRITIC = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDescription:
    """Static facts and the current state of one rollout server. policy_version is the complete version being served."""

    service_id: str
    model: str
    vocab_size: int
    max_model_len: int
    tensor_parallel_size: int
    weight_dtype: str
    policy_version: int
    num_running: int
    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerDescription:
    """Facts about one gang. step counts committed optimizer steps; for the actor it is the policy version."""

    service_id: str
    role: TrainerRole
    world_size: int
    num_parameters: int
    step: int
    has_reference: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Answer of UpdateBatch; applied is False if all ranks skipped the optimizer steps."""

    policy_version: int
    applied: bool
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """A written Hugging Face folder."""

    folder: str
    policy_version: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerDescription:
    """One named, versioned scorer of a reward server.

    fingerprint: digest of the code and settings behind it; empty if the server knows none. needs_token_ids: see `ScoreSample`.
    """

    name: str
    version: str
    description: str
    fingerprint: str = ""
    needs_token_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """A prompt and a response whose tokens are to be scored."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """By response token: its log-probability at temperature 1, and the most probable token there."""

    logprobs: tuple[float, ...]
    greedy_ids: tuple[int, ...]
