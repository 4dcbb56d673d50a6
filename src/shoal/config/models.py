"""The whole run's configuration: one YAML file, read by every service.

Field docs carry units. Cross-field rules live in `shoal.config.checks`; reading files, `--set` overrides and messages
in `shoal.config.load`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from shoal.config.masking import mask_url

Dtype = Literal["float32", "bfloat16"]
MAX_BUCKET_BYTES = 4 << 30
MAX_SCORED_SEQUENCES = 64
"""Sequences that a trainer scores in one call."""
MAX_PUSH_S = 86_400.0
"""A rollout server keeps a push that is not committed for a day at most."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class ModelSection(_Section):
    """The policy that is trained."""

    path: str
    """Hugging Face folder or id of the policy (and of the critic's backbone)."""
    reference_path: str | None = None
    """Folder of the reference policy; None uses `path`."""
    trust_remote_code: bool = False
    """Run code that ships with the model; off unless you have read it."""


class DataSection(_Section):
    """Prompts. JSONL, one object a line."""

    train: str
    """Path of the training rows."""
    held_out: str | None = None
    """Path of the evaluation rows; None switches evaluation off."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    """Longest prompt, counted after the chat template."""
    overlong: Literal["error", "filter"] = "error"
    """What to do with a longer prompt."""
    shuffle: bool = True
    """Shuffle the rows each epoch, seeded by run.seed."""


class RolloutSection(_Section):
    """Generation."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Groups trained per step."""
    group_size: int = Field(default=8, ge=1)
    """Samples per prompt."""
    temperature: float = Field(default=1.0, gt=0.0, le=2.0)
    """Sampling temperature of training rollouts; greedy (0) is refused for training."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling; below 1 is refused for training since it renormalises log-probabilities."""
    top_k: int = Field(default=0, ge=0)
    """Top-k; above 0 is refused for training, as top_p."""
    max_new_tokens: int = Field(default=8, ge=1)
    """Longest response in tokens."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Shortest response in tokens."""
    ignore_eos: bool = False
    """Go on past EOS; for benchmarks."""
    servers: int = Field(default=1, ge=1)
    """Rollout servers that the local supervisor starts."""
    min_servers: int = Field(default=1, ge=1)
    """Rollout servers that must be registered before a step starts."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Engine workers per server."""
    dtype: Dtype = "float32"
    """Serving dtype of weights and activations."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences that the engine runs at once."""
    kv_cache_bytes: int = Field(default=64 << 20, ge=1 << 20)
    """Memory of the engine's KV cache, in bytes."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per engine worker; ignored on a GPU."""
    request_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one group's generation, in seconds."""
    retries: int = Field(default=2, ge=0)
    """How often a failed group is tried again on another server."""


class RewardSection(_Section):
    """Scoring."""

    scorer: str = "arithmetic"
    """Name of the scorer."""
    version: str = ""
    """Version of the scorer; empty for the newest."""
    modules: tuple[str, ...] = ("shoal_reward.builtin",)
    """Modules or .py files with @reward functions that the reward server loads."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of scoring one group, in seconds."""
    max_unscored_share: float = Field(default=0.5, ge=0, le=1)
    """Above this share of unscored samples in a step the run stops with an error that names the scorer."""


class AlgorithmSection(_Section):
    """From rewards to gradients. Formulas and sources: docs/algorithms.md."""

    estimator: Literal["gae", "grpo"] = "gae"
    """Advantage estimator; gae needs the critic."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE lambda."""
    whiten_advantages: bool = True
    """Shift and scale advantages to mean 0 and standard deviation 1 over the whole batch (gae)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratio clip below: 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratio clip above: 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the loss for negative advantages (dual clip); None is off."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Clip of the value change; None is off."""
    kl_in: Literal["none", "reward", "loss"] = "reward"
    """Where the KL to the reference enters; none loads no reference."""
    kl_coef: float = Field(default=0.01, ge=0)
    """Coefficient of the KL penalty."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Per-token KL estimator."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    """How per-token losses become one number."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Denominator of the ratio: recomputed by the trainer, or as reported by the engine."""


class GangSection(_Section):
    """One trainer gang (actor or critic)."""

    ranks: int = Field(default=1, ge=1)
    """Processes of the gang."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """After the warm-up: stay at the peak, or fall linearly to 0 at the end of the run."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW moment decay."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm is clipped to this."""
    precision: Literal["float32", "bf16_mixed"] = "float32"
    """Compute dtype; master weights and moments stay float32."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Most padded tokens (prompt + response) in a forward pass of one rank."""
    retain_graph_tokens: int = Field(default=32768, ge=0)
    """Up to this many tokens per rank, the graph of the first forward is kept for the update: no second forward, ratio exactly 1."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per rank; ignored on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ranks compute."""
    collective_timeout_s: float = Field(default=120.0, gt=0)
    """A collective that waits longer fails the gang."""
    command_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one forward or update command."""


class PushSection(_Section):
    """Weight push after every step; docs/weight-push.md."""

    transport: Literal["auto", "shm", "grpc", "collective", "cuda_ipc"] = "auto"
    """How bytes reach the engine workers; auto chooses for each pair by where the two sides are."""
    shm_dir: str = "/dev/shm"  # noqa: S108 - the standard tmpfs, files inside are created exclusively
    """Folder of the mapped staging files; a shared tmpfs between containers."""
    bucket_bytes: int = Field(default=16 << 20, ge=4096, le=MAX_BUCKET_BYTES)
    """Largest unit of sending and checking; what a rank and a worker may hold beyond their shards."""
    grpc_streams: int = Field(default=2, ge=1, le=16)
    """Streams of the grpc transport from one rank to one worker."""
    delta: Literal["auto", "on", "off"] = "auto"
    """Send positions and values of changed elements where that is smaller; costs a copy of the shard in the serving dtype.
    auto: on where bytes cross a wire (grpc, collective) and the engine's dtype is narrower than the trainer's."""
    dense_every: int = Field(default=50, ge=1)
    """Every so many pushes everything is sent; also after any failure."""
    plaintext_collective: bool | None = None
    """Let the collective transport, which nothing encrypts or authenticates, carry weights; None: only if security.insecure is true."""
    commit: Literal["barrier", "rolling"] = "barrier"
    """barrier: all servers swap at once; rolling: one after another, so that the others go on serving."""
    inflight: Literal["keep", "abort", "wait"] = "keep"
    """Requests that run at COMMIT: go on with new weights, end with what they have, or are waited for."""
    audit_every: int = Field(default=0, ge=0)
    """Compare the engines' live weights with the trainer's after every so many pushes; 0 is never."""
    audit_prompts: int = Field(default=4, ge=0, le=MAX_SCORED_SEQUENCES)
    """Prompts of an audit's probe set: greedy choices and log-probabilities of engine and trainer are compared."""
    prepare_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of PREPARE."""
    transfer_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of TRANSFER."""
    verify_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of VERIFY."""
    commit_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of COMMIT, for each server."""

    @field_validator("delta", mode="before")
    @classmethod
    def _unquoted(cls, value: object) -> object:
        """YAML reads a bare on or off as a bool."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class EvalSection(_Section):
    """Greedy held-out evaluation."""

    every: int = Field(default=0, ge=0)
    """Evaluate every so many steps; 0 only before and after."""
    max_prompts: int = Field(default=512, ge=1)
    """Held-out rows used."""


class CoordinatorSection(_Section):
    """The coordinator's own addresses and limits."""

    host: str = "127.0.0.1"
    """Address that gRPC and REST listen on."""
    grpc_port: int = Field(default=0, ge=0, le=65535)
    """Port of the registry; 0 picks a free one."""
    rest_port: int = Field(default=0, ge=0, le=65535)
    """Port of the REST API; 0 picks a free one."""
    lease_s: float = Field(default=10.0, gt=1)
    """A service that has not renewed for this long is gone."""
    ready_timeout_s: float = Field(default=180.0, gt=0)
    """How long to wait for all services before the run fails, naming the missing ones."""
    max_pending_groups: int = Field(default=1024, ge=1)
    """Bound of the experience queue, in groups; dispatch waits above it."""


class RedisSection(_Section):
    """The experience queue."""

    url: str = ""
    """redis:// address; empty lets the local supervisor start an embedded server."""

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Keep the password out of reprs and tracebacks."""
        return [(name, mask_url(value) if name == "url" else value) for name, value in super().__repr_args__()]


class SecuritySection(_Section):
    """mTLS between services; plaintext only when insecure is true."""

    insecure: bool = True
    """Plaintext gRPC (loopback and private networks only)."""
    ca_file: str | None = None
    """PEM of the CA that signs every service."""
    cert_file: str | None = None
    """PEM certificate of this service."""
    key_file: str | None = None
    """PEM key of this service."""


class TelemetrySection(_Section):
    """Logs and metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level written."""
    log_format: Literal["json", "text"] = "json"
    """One JSON object, or one plain line, per event."""
    metrics_port: int = Field(default=0, ge=-1, le=65535)
    """Prometheus port of a service; 0 picks a free one, -1 switches it off."""


class RunSection(_Section):
    """Identity and length of the run."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Name of the run; its folder and Redis keys carry it."""
    folder: str
    """Where metrics, logs, report and export go."""
    seed: int = Field(default=0, ge=0)
    """Seed of shuffling, sampling and initialisation."""
    steps: int = Field(default=100, ge=0)
    """Training steps."""
    max_wall_s: float | None = Field(default=None, gt=0)
    """Stop after the step that crosses this many seconds; None is no limit."""


class RunConfig(_Section):
    """Everything about one run."""

    run: RunSection
    model: ModelSection
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    actor: GangSection = GangSection()
    critic: GangSection = GangSection()
    push: PushSection = PushSection()
    evaluation: EvalSection = EvalSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    redis: RedisSection = RedisSection()
    security: SecuritySection = SecuritySection()
    telemetry: TelemetrySection = TelemetrySection()

    @property
    def may_push_in_plaintext(self) -> bool:
        """Whether the collective transport may carry weights."""
        allowed = self.push.plaintext_collective
        return self.security.insecure if allowed is None else allowed

    @property
    def planned_updates(self) -> int:
        """Optimizer steps of each gang over the whole run."""
        return self.run.steps * self.algorithm.epochs * self.algorithm.mini_batches
