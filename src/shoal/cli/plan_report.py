"""What a planned push costs: bytes per link, rank, worker and engine, buckets, memory."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from shoal.errors import TransportError
from shoal.types.weights import SinkLayout, SourceLayout
from shoal.weights.dtypes import ITEM_BYTES
from shoal.weights.llama_layouts import LlamaShape, TrainerGrid, engine_layout, tensors_of, trainer_layout
from shoal.weights.plan import ServerPlan
from shoal.weights.planner import plan_push

_SAME_HOST = frozenset({"shm", "cuda_ipc"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Layout of a push that nobody runs yet. dtype is the serving dtype; same_host: engines run on the trainer's machine."""

    shape: LlamaShape
    num_ranks: int
    trainer_tp: int
    replicas: int
    num_engines: int
    tp: int
    dtype: str
    bucket_bytes: int
    transport: str
    device: str
    same_host: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Smallest, middle and largest of `count` byte counts."""

    count: int
    min: int
    median: int
    max: int

    @classmethod
    def of(cls, values: Iterable[int]) -> Spread:
        """Spread of any number of values, zeros if there are none."""
        numbers = sorted(values)
        if not numbers:
            return cls(count=0, min=0, median=0, max=0)
        return cls(count=len(numbers), min=numbers[0], median=int(statistics.median(numbers)), max=numbers[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A planned push in numbers; bytes in the serving dtype.

    links: pairs of rank and worker with something to send. rank_bytes: what each rank sends to all engines; worker_bytes: what each worker
    receives. shadow_bytes: a rank's shard in the serving dtype, kept only for deltas. matrix: (rank, engine, worker) to bytes.
    """

    num_parameters: int
    num_bytes: int
    engine_bytes: Spread
    rank_bytes: Spread
    worker_bytes: Spread
    link_bytes: Spread
    shadow_bytes: Spread
    bucket_bytes: int
    largest_bucket_bytes: int
    num_buckets: int
    num_pieces: int
    transports: Mapping[str, int]
    planning_cpu_s: float
    matrix: Mapping[tuple[int, int, int], int]

    def as_json(self) -> dict[str, object]:
        """Everything but the matrix."""
        fields = asdict(self)
        del fields["matrix"]
        return fields


def report_plan(options: PlanOptions) -> PlanReport:
    """Derive both layouts, plan, and add up.

    Raises: ConfigError: sizes that do not divide. TransportError: no plan.
    """
    source, sinks = _layouts(options)
    start = time.process_time()
    plan = plan_push(source, sinks, bucket_bytes=options.bucket_bytes, transport=options.transport)
    planning_cpu_s = time.process_time() - start
    for server_id, error in plan.errors.items():
        raise TransportError(f"{server_id}: {error}")
    return _add_up(options, source, list(plan.servers.values()), planning_cpu_s)


def _layouts(options: PlanOptions) -> tuple[SourceLayout, list[SinkLayout]]:
    grid = TrainerGrid(num_ranks=options.num_ranks, tp=options.trainer_tp, replicas=options.replicas)
    source = trainer_layout(options.shape, grid, dtype=options.dtype, device=options.device, host_id="trainer")
    is_near = options.same_host or options.transport in _SAME_HOST
    endpoints = ["shm", "grpc", "collective", *(["cuda_ipc"] if options.device == "cuda" else [])]
    # As many digits as needed, so that the order of names is that of numbers.
    digits = len(str(options.num_engines - 1))
    sinks = [
        engine_layout(
            options.shape,
            server_id=f"rollout-{index:0{digits}}",
            tp=options.tp,
            dtype=options.dtype,
            endpoints=endpoints,
            device=options.device,
            host_id="trainer" if is_near else None,
        )
        for index in range(options.num_engines)
    ]
    return source, sinks


def _add_up(options: PlanOptions, source: SourceLayout, plans: list[ServerPlan], planning_cpu_s: float) -> PlanReport:
    matrix = {(rank, engine, worker): plan.bytes_of(rank, worker) for engine, plan in enumerate(plans) for rank, worker in plan.pairs()}
    by_rank, by_worker = Counter(dict.fromkeys(range(options.num_ranks), 0)), Counter[tuple[int, int]]()
    for (rank, engine, worker), num_bytes in matrix.items():
        by_rank[rank] += num_bytes
        by_worker[engine, worker] += num_bytes
    return PlanReport(
        num_parameters=sum(math.prod(shape) for shape in tensors_of(options.shape).values()),
        num_bytes=sum(plan.num_bytes for plan in plans),
        engine_bytes=Spread.of(plan.num_bytes for plan in plans),
        rank_bytes=Spread.of(by_rank.values()),
        worker_bytes=Spread.of(by_worker.values()),
        link_bytes=Spread.of(matrix.values()),
        shadow_bytes=Spread.of(_shadow_bytes(source, options.dtype)),
        bucket_bytes=options.bucket_bytes,
        largest_bucket_bytes=max(plan.largest_bucket_bytes for plan in plans),
        num_buckets=sum(plan.num_buckets for plan in plans),
        num_pieces=sum(plan.num_pieces for plan in plans),
        transports=dict(Counter(plan.transport_of(*pair) for plan in plans for pair in plan.pairs())),
        planning_cpu_s=planning_cpu_s,
        matrix=matrix,
    )


def _shadow_bytes(source: SourceLayout, dtype: str) -> Iterable[int]:
    held = [0] * len(source.places)
    for tensor in source.tensors:
        for shard in tensor.shards:
            held[shard.rank] += shard.box.num_elements * ITEM_BYTES[dtype]
    return held
