"""Layouts of tiny models for tests of the weight push: shards of trainer ranks, fused and sharded engine parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.types.weights import (
    Box,
    Place,
    SinkLayout,
    SinkParameter,
    SinkRegion,
    SinkWorkerLayout,
    SourceLayout,
    SourceTensor,
    TensorShard,
)

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGNMENT_BYTES = 64
HERE = Place(host_id="here", device="cpu")
NOWHERE = {"shm": "/nowhere"}


def box(*ranges: tuple[int, int]) -> Box:
    """A box from (start, end) per dim."""
    return Box(offsets=tuple(start for start, _ in ranges), sizes=tuple(end - start for start, end in ranges))


def rows_of(shape: Sequence[int], start: int, end: int) -> Box:
    """Rows [start, end) of a tensor, all of the other dims."""
    return box((start, end), *((0, size) for size in shape[1:]))


def columns_of(shape: Sequence[int], start: int, end: int) -> Box:
    """Columns [start, end) of a matrix."""
    return box((0, shape[0]), (start, end))


def source_tensor(name: str, shape: tuple[int, ...], held: Iterable[tuple[int, Box]], dtype: str = "float32") -> SourceTensor:
    """A tensor from (rank, box) of each shard."""
    return SourceTensor(name=name, shape=shape, dtype=dtype, shards=tuple(TensorShard(rank=rank, box=box) for rank, box in held))


def source_layout(tensors: Iterable[SourceTensor], num_ranks: int, place: Place = HERE) -> SourceLayout:
    """A gang whose ranks all run at one place."""
    return SourceLayout(source_id="gang", tensors=tuple(tensors), places=(place,) * num_ranks)


def fsdp_boxes(shape: tuple[int, ...], num_ranks: int) -> list[tuple[int, Box]]:
    """(rank, box) along dim 0 as FSDP2 cuts: ceil-sized chunks, the last ones smaller or empty."""
    chunk = -(-shape[0] // num_ranks)
    starts = [min(rank * chunk, shape[0]) for rank in range(num_ranks + 1)]
    return [(rank, rows_of(shape, starts[rank], starts[rank + 1])) for rank in range(num_ranks) if starts[rank] < starts[rank + 1]]


def fsdp_source(shapes: Mapping[str, tuple[int, ...]], num_ranks: int, *, dtype: str = "float32") -> SourceLayout:
    """Every tensor cut along dim 0 over all ranks."""
    return source_layout((source_tensor(name, shape, fsdp_boxes(shape, num_ranks), dtype) for name, shape in shapes.items()), num_ranks)


def staged(shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> tuple[tuple[SinkParameter, ...], int]:
    """Parameters one after the other in staging, aligned; and the size of the buffer."""
    parameters, end = [], 0
    for name, shape in shapes.items():
        parameters.append(SinkParameter(name=name, shape=shape, dtype=dtype, staging_offset_bytes=end))
        num_bytes = ITEM_BYTES[dtype]
        for size in shape:
            num_bytes *= size
        end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(parameters), end


def stack_rows(parameter: str, parts: Sequence[tuple[str, tuple[int, ...], int, int]]) -> list[SinkRegion]:
    """Regions of a parameter that stacks rows [start, end) of several tensors (name, shape, start, end), as vLLM fuses qkv."""
    regions, at = [], 0
    for name, shape, start, end in parts:
        regions.append(
            SinkRegion(
                parameter=parameter,
                source_name=name,
                source_box=rows_of(shape, start, end),
                parameter_box=rows_of(shape, at, at + end - start),
            )
        )
        at += end - start
    return regions


def sink_worker(
    worker_rank: int,
    parameters: tuple[SinkParameter, ...],
    regions: Iterable[SinkRegion],
    staging_bytes: int,
    endpoints: Mapping[str, str] = NOWHERE,
) -> SinkWorkerLayout:
    """A worker that runs where the gang does."""
    return SinkWorkerLayout(
        worker_rank=worker_rank,
        parameters=parameters,
        regions=tuple(regions),
        staging_bytes=staging_bytes,
        place=HERE,
        endpoints=endpoints,
    )


HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, PADDED_VOCAB = 8, 4, 2, 2, 6, 7, 8
LAYER = "model.layers.0"


def decoder_shapes(*, tied: bool) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a one-layer decoder."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        f"{LAYER}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{LAYER}.self_attn.q_proj.bias": (HEADS * HEAD_DIM,),
        f"{LAYER}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{LAYER}.self_attn.k_proj.bias": (KV_HEADS * HEAD_DIM,),
        f"{LAYER}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{LAYER}.self_attn.v_proj.bias": (KV_HEADS * HEAD_DIM,),
        f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{LAYER}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{LAYER}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{LAYER}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "model.norm.weight": (HIDDEN,),
    }
    return shapes if tied else shapes | {"lm_head.weight": (VOCAB, HIDDEN)}


def decoder_worker(
    worker_rank: int, tp: int, *, separate_head: bool, dtype: str = "float32", endpoints: Mapping[str, str] = NOWHERE
) -> SinkWorkerLayout:
    """One engine worker of the decoder under tensor parallelism, fused and cut as vLLM does: padded vocabulary, qkv, gate_up."""
    hf = decoder_shapes(tied=False)
    regions: list[SinkRegion] = []
    shapes: dict[str, tuple[int, ...]] = {}

    def rows(parameter: str, names: Sequence[str]) -> None:
        parts = []
        for name in names:
            share = hf[name][0] // tp
            parts.append((name, hf[name], worker_rank * share, (worker_rank + 1) * share))
        shapes[parameter] = (sum(end - start for *_, start, end in parts), *hf[names[0]][1:])
        regions.extend(stack_rows(parameter, parts))

    def columns(parameter: str, name: str) -> None:
        height, width = hf[name][0], hf[name][1] // tp
        shapes[parameter] = (height, width)
        source_box = columns_of(hf[name], worker_rank * width, (worker_rank + 1) * width)
        regions.append(SinkRegion(parameter=parameter, source_name=name, source_box=source_box, parameter_box=box((0, height), (0, width))))

    def vocabulary(parameter: str, name: str) -> None:
        share = PADDED_VOCAB // tp
        shapes[parameter] = (share, HIDDEN)
        regions.extend(stack_rows(parameter, [(name, hf[name], worker_rank * share, min((worker_rank + 1) * share, VOCAB))]))

    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    vocabulary("model.embed_tokens.weight", "model.embed_tokens.weight")
    for kind in ("weight", "bias"):
        rows(f"{attention}.qkv_proj.{kind}", [f"{attention}.{part}_proj.{kind}" for part in "qkv"])
    columns(f"{attention}.o_proj.weight", f"{attention}.o_proj.weight")
    rows(f"{mlp}.gate_up_proj.weight", [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"])
    columns(f"{mlp}.down_proj.weight", f"{mlp}.down_proj.weight")
    shapes["model.norm.weight"] = (HIDDEN,)
    regions.extend(stack_rows("model.norm.weight", [("model.norm.weight", (HIDDEN,), 0, HIDDEN)]))
    if separate_head:
        vocabulary("lm_head.weight", "lm_head.weight")
    parameters, staging_bytes = staged(shapes, dtype)
    return sink_worker(worker_rank, parameters, regions, staging_bytes, endpoints)


def decoder_sink(
    server_id: str, tp: int, *, separate_head: bool = True, dtype: str = "float32", endpoints: Mapping[str, str] = NOWHERE
) -> SinkLayout:
    """All workers of one server; nothing is allocated."""
    workers = (decoder_worker(rank, tp, separate_head=separate_head, dtype=dtype, endpoints=endpoints) for rank in range(tp))
    return SinkLayout(server_id=server_id, workers=tuple(workers))
