"""The whole run's configuration: one YAML file, read by every service.

Field docs carry units. Cross-field rules live in `shoal.config.checks`; reading files, `--set` overrides and messages
in `shoal.config.load`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from shoal.config.algorithm import AlgorithmSection
from shoal.config.base import FALSE_IS_NONE, Section
from shoal.config.gang import GangSection
from shoal.config.masking import mask_url

Dtype = Literal["float32", "bfloat16"]
MAX_BUCKET_BYTES = 4 << 30
MIN_TEMPERATURE = 0.01
"""Below it the engine's softmax overflows; 0 is greedy."""
MAX_SCORED_SEQUENCES = 64
"""Sequences that a trainer scores in one call."""
MAX_PUSH_S = 86_400.0
"""A rollout server keeps a push that is not committed for a day at most."""


class ModelSection(Section):
    """The policy that is trained."""

    path: str
    """Hugging Face folder or id of the policy (and of the critic's backbone)."""
    reference_path: str | None = None
    """Folder of the reference policy; None uses `path`."""
    trust_remote_code: bool = False
    """Run code that ships with the model; off unless you have read it."""


class DataSection(Section):
    """Prompts: JSONL or Parquet files, or folders of Hugging Face datasets."""

    train: str
    """Path of the training rows."""
    train_split: str | None = None
    """Split of a dataset folder that has several."""
    held_out: str | None = None
    """Path of the evaluation rows; None switches evaluation off."""
    held_out_split: str | None = None
    """Split of a dataset folder that has several."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    answer_key: str | None = None
    """Column with the answer, which every row must have; scorers find it as `answer`. None passes the rows on as they are."""
    source_key: str = "data_source"
    """Column that names a row's source, for reward.sources."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    """Longest prompt, counted after the chat template."""
    overlong: Literal["error", "filter", "truncate_left", "truncate_right"] = "error"
    """What to do with a longer prompt: refuse to start, leave it out, or cut its left (first) or right (last) tokens off."""
    shuffle: bool = True
    """Shuffle the rows each epoch, seeded by run.seed."""


class RolloutSection(Section):
    """Generation."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Groups trained per step."""
    group_size: int = Field(default=8, ge=1)
    """Samples per prompt."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=2.0)
    """Sampling temperature of training rollouts; greedy (0) is refused for training."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling; below 1 is refused for training since it renormalises log-probabilities."""
    top_k: int = Field(default=0, ge=0)
    """Top-k; above 0 is refused for training, as top_p."""
    max_new_tokens: int = Field(default=8, ge=1)
    """Longest response in tokens."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Shortest response in tokens; above 0 is refused for training, as top_p."""
    ignore_eos: bool = False
    """Go on past EOS; for benchmarks."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, beside the model's own."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end a response, by text; each must be one token of the vocabulary."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and generate others in their place."""
    max_refills: int = Field(default=10, ge=1)
    """Rounds of dynamic sampling after the first; then the step trains what it has."""
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


class RewardSection(Section):
    """Scoring."""

    scorer: str = "arithmetic"
    """Name of the scorer."""
    version: str = ""
    """Version of the scorer; empty for the newest."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Source of a row (data.source_key) -> scorer; empty: `scorer` for all rows. A row of another source is refused at start."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Component -> weight: the reward is the weighted sum of the named components. Empty takes the scorer's total."""
    clip: tuple[float, float] | None = None
    """Bounds of the reward of a response; None is off."""
    normalise: Annotated[Literal["none", "batch"], FALSE_IS_NONE] = "none"
    """batch: shift and scale the responses' rewards to mean 0 and standard deviation 1 over the batch."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Tokens before rollout.max_new_tokens over which a penalty grows from 0 to overlong_penalty; 0 is off."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """What a response of full length loses."""
    modules: tuple[str, ...] = ("shoal_reward.builtin",)
    """Modules or .py files with @reward functions that the reward server loads."""
    service_file: str | None = None
    """YAML file of the reward server: scorers with settings, number and limits of graders; docs/rewards.md."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline of scoring one group, in seconds; retries and waiting for a server are within it."""
    max_open_requests: int = Field(default=64, ge=1, le=4096)
    """Most calls to reward servers that are open at once."""
    max_unscored_share: float = Field(default=0.5, ge=0, le=1)
    """Above this share of unscored samples in a step the run pauses with an alert that names the scorer and the error."""
    check_rows: int = Field(default=512, ge=0, le=100_000)
    """Rows whose own answer is scored at the start, spread over the data, to report those that cannot earn a reward; 0 is off. The
    scorers of the run are asked, so where a model or a judge costs money this does too."""

    @property
    def scorers(self) -> dict[str, str]:
        """Name of each scorer of the run -> the version that is asked for; empty for the newest, as for all but `scorer`."""
        names = sorted({*self.sources.values()}) or [self.scorer]
        return {name: self.version if name == self.scorer else "" for name in names}


class PushSection(Section):
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


class EvalSection(Section):
    """Held-out evaluation; greedy unless a temperature is set."""

    every: int = Field(default=0, ge=0)
    """Evaluate every so many steps; 0 only before and after."""
    max_prompts: int = Field(default=512, ge=1)
    """Held-out rows used."""
    samples: int = Field(default=1, ge=1)
    """Answers per row; above 1 needs a temperature."""
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling."""
    top_k: int = Field(default=0, ge=0)
    """Top-k sampling; 0 is off."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest answer in tokens; None is rollout.max_new_tokens."""
    correct_from: float = 1.0
    """An answer is correct from this value of the component `correct` on; of the reward where a scorer has no such component."""


class CoordinatorSection(Section):
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


class RedisSection(Section):
    """The experience queue."""

    url: str = ""
    """redis:// address; empty lets the local supervisor start an embedded server."""

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Keep the password out of reprs and tracebacks."""
        return [(name, mask_url(value) if name == "url" else value) for name, value in super().__repr_args__()]


class SecuritySection(Section):
    """mTLS between services; plaintext only when insecure is true."""

    insecure: bool = True
    """Plaintext gRPC (loopback and private networks only)."""
    ca_file: str | None = None
    """PEM of the CA that signs every service."""
    cert_file: str | None = None
    """PEM certificate of this service."""
    key_file: str | None = None
    """PEM key of this service."""


class TelemetrySection(Section):
    """Logs and metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level written."""
    log_format: Literal["json", "text"] = "json"
    """One JSON object, or one plain line, per event."""
    metrics_port: int = Field(default=0, ge=-1, le=65535)
    """Prometheus port of a service; 0 picks a free one, -1 switches it off."""
    tensorboard: bool = False
    """Also write every step's metrics as TensorBoard events to <run.folder>/tensorboard."""


class RunSection(Section):
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


class RunConfig(Section):
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
    def longest_answer(self) -> int:
        """Most new tokens of a request, in training or evaluation."""
        return max(self.rollout.max_new_tokens, self.evaluation.max_new_tokens or 0)

    @property
    def planned_updates(self) -> int:
        """Optimizer steps of the critic gang over the whole run, and of the actor gang without a critic warm-up."""
        return self.run.steps * self.algorithm.epochs * self.algorithm.mini_batches

    @property
    def planned_actor_updates(self) -> int:
        """Optimizer steps of the actor gang over the whole run: none while the critic warms up."""
        num_warmup = self.algorithm.critic_warmup_steps if self.algorithm.has_critic else 0
        return max(0, self.run.steps - num_warmup) * self.algorithm.epochs * self.algorithm.mini_batches
