"""One example of every dataclass in shoal.types, with no field left at a value that a lost field would also give."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from shoal.types import (
    Batch,
    Box,
    BucketEncoding,
    Completion,
    ExperienceRecord,
    ExportResult,
    FinishReason,
    MiniBatch,
    PairDigests,
    PieceDigests,
    Place,
    PlannedServer,
    PolicyVersionSpan,
    RecordRef,
    RewardComponent,
    RolloutDescription,
    SamplingParams,
    ScorerDescription,
    ScoreResult,
    ScoreSample,
    ScoreStatus,
    ServerTransfer,
    ServiceInfo,
    ServiceKind,
    SinkCommitted,
    SinkLayout,
    SinkParameter,
    SinkPlanned,
    SinkPrepared,
    SinkRegion,
    SinkTarget,
    SinkVerified,
    SinkWorkerLayout,
    SourceLayout,
    SourceTensor,
    SourceTransferred,
    StagedVersion,
    TensorShard,
    TokenScores,
    TokenSequence,
    TrainerDescription,
    TrainerRole,
    UpdateResult,
)

SPANS = (PolicyVersionSpan(policy_version=3, start=0, end=1), PolicyVersionSpan(policy_version=4, start=1, end=3))
SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=16, min_new_tokens=2, stop_token_ids=(7, 8), ignore_eos=True)
COMPLETION = Completion(
    sample_index=2,
    response_ids=np.array([5, 6, 2], dtype=np.int32),
    rollout_logprobs=np.array([-0.5, -1.25, -0.1], dtype=np.float32),
    finish_reason=FinishReason.LENGTH,
    policy_version_spans=SPANS,
    latency_ms=12.5,
    engine_id="rollout-1",
)
COMPONENT = RewardComponent(
    name="format", scorer="exact", service="reward-0", service_version="2", value=0.75, status=ScoreStatus.NOT_SCORED, latency_ms=3.5
)
RECORD = ExperienceRecord(
    run_id="run",
    uid="u1",
    group_id="g1",
    sample_index=1,
    attempt=2,
    prompt_ids=np.array([9, 10], dtype=np.int32),
    response_ids=np.array([5, 6, 2], dtype=np.int32),
    response_mask=np.array([True, False, True]),
    rollout_logprobs=np.array([-0.5, -1.25, -0.1], dtype=np.float32),
    policy_version_spans=SPANS,
    route_revision=3,
    sampling=SAMPLING,
    finish_reason=FinishReason.STOP,
    reward_status=ScoreStatus.SCORED,
    reward=0.25,
    reward_components=(COMPONENT,),
    token_rewards=np.array([0.0, 0.5, -0.25], dtype=np.float32),
    turns=3,
    tokenizer_hash="abc",
    engine_id="rollout-1",
    trace_id="t",
    created_unix_ms=1_800_000_000_000,
    scored_unix_ms=1_800_000_000_500,
)
REF = RecordRef(key="shoal:run:record:u1", group_id="g1", num_prompt_tokens=2, num_response_tokens=3, reward=-0.5)
MINI_BATCH = MiniBatch(micro_batches=((REF, REF), ()))
BOX = Box(offsets=(2, 0), sizes=(2, 4))
REGION = SinkRegion(parameter="qkv", source_name="q", source_box=Box(offsets=(0, 0), sizes=(2, 4)), parameter_box=BOX)
PARAMETER = SinkParameter(name="qkv", shape=(4, 4), dtype="bfloat16", staging_offset_bytes=1 << 33)
PLACE = Place(host_id="boot-1:2", device="cuda")
WORKER = SinkWorkerLayout(
    worker_rank=1,
    parameters=(PARAMETER,),
    regions=(REGION,),
    staging_bytes=1 << 34,
    place=PLACE,
    endpoints={"shm": "/dev/shm/shoal-x", "grpc": "h:1"},
)
LAYOUT = SinkLayout(server_id="rollout-0", workers=(WORKER,))
SHARD = TensorShard(rank=1, box=BOX)
TENSOR = SourceTensor(name="q", shape=(4, 4), dtype="float32", shards=(SHARD, SHARD), frozen=True)
SOURCE = SourceLayout(source_id="s1", tensors=(TENSOR,), places=(Place(host_id="boot-2:2", device="cpu"), PLACE))
STAGED = StagedVersion(source_id="s1", policy_version=4)
PAIR = PairDigests(
    rank=1,
    worker_rank=2,
    xxh3=(2**64 - 1, 0, 7),
    encodings=(BucketEncoding.DENSE, BucketEncoding.UNCHANGED, BucketEncoding.DELTA),
)
PIECES = PieceDigests(rank=1, worker_rank=2, xxh3=(3, 2**64 - 1))
TRANSFER = ServerTransfer(pairs=(PAIR,), sent_bytes=1 << 33, dense_bytes=1 << 40, error="gone")

# Name of the codec -> (module of the codec, example); by server_id where the wire names the server beside the value.
EXAMPLES: dict[str, tuple[str, Any]] = {
    "sampling_params": ("rollout", SAMPLING),
    "policy_version_span": ("rollout", SPANS[1]),
    "completion": ("rollout", COMPLETION),
    "rollout_description": (
        "rollout",
        RolloutDescription(
            service_id="rollout-0",
            model="m",
            vocab_size=30,
            max_model_len=64,
            tensor_parallel_size=2,
            weight_dtype="bfloat16",
            policy_version=5,
            num_running=3,
            draining=True,
        ),
    ),
    "score_sample": (
        "reward",
        ScoreSample(
            sample_id="u/0/1",
            prompt="1+1=",
            response="2 ☃",
            row={"answer": "2", "nested": {"a": [1, 2.5, None]}},
            finish_reason=FinishReason.ABORT,
            num_response_tokens=3,
            prompt_ids=(9, 10),
            response_ids=(5, 6, 2),
        ),
    ),
    "score_result": (
        "reward",
        ScoreResult(
            sample_id="u/0/1",
            status=ScoreStatus.SCORED,
            value=0.5,
            components={"format": 0.25, "exact": 0.25},
            token_values=(0.5, 0.25),
            message="why",
            latency_ms=2.5,
        ),
    ),
    "reward_component": ("reward", COMPONENT),
    "scorer_description": (
        "reward",
        ScorerDescription(name="exact", version="2", description="Equality.", fingerprint="9f", needs_token_ids=True),
    ),
    "record": ("experience", RECORD),
    "record_ref": ("experience", REF),
    "mini_batch": ("experience", MINI_BATCH),
    "batch": ("experience", Batch(run_id="run", step=7, ranks=((MINI_BATCH,), (MINI_BATCH,)), batch_id="b7")),
    "service_info": (
        "services",
        ServiceInfo(
            run_id="run",
            service_id="critic",
            kind=ServiceKind.CRITIC,
            address="h:1",
            incarnation="i1",
            policy_version=4,
            process_id=99,
        ),
    ),
    "trainer_description": (
        "services",
        TrainerDescription(service_id="critic", role=TrainerRole.CRITIC, world_size=2, num_parameters=1 << 40, step=6, has_reference=True),
    ),
    "update_result": ("services", UpdateResult(policy_version=8, applied=True, metrics={"loss": 0.5, "norm": float("inf")})),
    "export_result": ("services", ExportResult(folder="/out", policy_version=9, num_bytes=1 << 40)),
    "token_sequence": ("services", TokenSequence(prompt_ids=(3, 0), response_ids=(5, 6, 2))),
    "token_scores": ("services", TokenScores(logprobs=(-0.5, -1.25), greedy_ids=(7, 0))),
    "box": ("layouts", BOX),
    "place": ("layouts", PLACE),
    "tensor_shard": ("layouts", SHARD),
    "source_tensor": ("layouts", TENSOR),
    "source_layout": ("layouts", SOURCE),
    "sink_region": ("layouts", REGION),
    "sink_parameter": ("layouts", PARAMETER),
    "sink_worker_layout": ("layouts", WORKER),
    "sink_layout": ("layouts", LAYOUT),
    "staged_version": ("layouts", STAGED),
    "sink_target": ("layouts", SinkTarget(layout=LAYOUT, staged=STAGED, dense=True)),
    "sink_prepared": ("weights", SinkPrepared(layout=LAYOUT, served_version=3, staged=STAGED)),
    "sink_planned": ("weights", SinkPlanned(num_buckets=1 << 33, collective_group="g")),
    "sink_verified": ("weights", SinkVerified(num_bytes=1 << 40, verify_ms=1.5)),
    "sink_committed": ("weights", SinkCommitted(policy_version=3, pause_ms=2.5, num_aborted=4)),
    "planned_servers": (
        "weights",
        {"rollout-0": PlannedServer(plan_hash="h", num_bytes=1 << 40), "rollout-1": PlannedServer(plan_hash="i", num_bytes=2)},
    ),
    "pair_digests": ("weights", PAIR),
    "piece_digests": ("weights", PIECES),
    "source_digests": ("weights", {"rollout-0": (PIECES,), "rollout-1": ()}),
    "source_transferred": (
        "weights",
        SourceTransferred(
            servers={"rollout-0": TRANSFER, "rollout-1": ServerTransfer(pairs=(), sent_bytes=1, dense_bytes=2)}, transfer_ms=4.5
        ),
    ),
}


def same(left: Any, right: Any) -> bool:  # noqa: ANN401 - any dataclass of shoal.types
    """Compare two values field by field, arrays by dtype and every bit."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray) and left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        )
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, field.name), getattr(right, field.name)) for field in dataclasses.fields(left)
        )
    if isinstance(left, dict):
        return type(left) is type(right) and left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def types_within(value: Any) -> set[type]:  # noqa: ANN401 - any example
    """Every dataclass that occurs in a value, at any depth."""
    if dataclasses.is_dataclass(value):
        return {type(value)}.union(*(types_within(getattr(value, field.name)) for field in dataclasses.fields(value)))
    if isinstance(value, dict):
        return set().union(*map(types_within, value.values()))
    if isinstance(value, tuple | list):
        return set().union(*map(types_within, value))
    return set()
