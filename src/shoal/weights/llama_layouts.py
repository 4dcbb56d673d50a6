"""Layouts of llama-like models, from their shape: what FSDP2 and tensor parallelism leave on trainer ranks, what vLLM's workers need.

A push does not use these: it asks both sides. They let a push be planned before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.errors import ConfigError
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
from shoal.weights import boxes
from shoal.weights.dtypes import item_bytes

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this."""
_STAGING_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """A decoder of the Llama kind. qkv_bias as Qwen2 has it, qk_norm as Qwen3; tied: the head is the embedding."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerGrid:
    """Ranks as replicas x shards x tensor-parallel, the last varying fastest; `num_ranks` in all."""

    num_ranks: int
    tp: int = 1
    replicas: int = 1

    @property
    def shards(self) -> int:
        """FSDP shards of a replica. Raises: ConfigError: the ranks do not divide."""
        if self.num_ranks % (self.tp * self.replicas) or min(self.num_ranks, self.tp, self.replicas) < 1:
            raise ConfigError(f"{self.num_ranks} trainer ranks cannot be cut into {self.replicas} replicas of tensor-parallel {self.tp}")
        return self.num_ranks // (self.tp * self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """tp_dim: the dim that tensor parallelism cuts, on both sides; None if replicated."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    unit: int = 1
    """Rows that stay together: head_dim for heads."""
    repeats: bool = False
    """Workers share a unit where there are fewer units than workers: heads of K and V."""


def tensors_of(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes."""
    return {tensor.name: tensor.shape for _, parts in _parameters(shape) for tensor in parts}


def trainer_layout(shape: LlamaShape, grid: TrainerGrid, *, dtype: str, device: str = "cuda", host_id: str = "trainer") -> SourceLayout:
    """Shards as fully_shard leaves them: each tensor-parallel part is cut along dim 0 in ceil-sized chunks, the last ones smaller or empty.

    Raises: ConfigError: ranks or heads do not divide.
    """
    tensors = tuple(
        SourceTensor(name=tensor.name, shape=tensor.shape, dtype=dtype, shards=tuple(_shards(tensor, grid)))
        for _, parts in _parameters(shape)
        for tensor in parts
    )
    places = (Place(host_id=host_id, device=device),) * grid.num_ranks
    return SourceLayout(source_id="planned", tensors=tensors, places=places)


def engine_layout(
    shape: LlamaShape, *, server_id: str, tp: int, dtype: str, endpoints: Sequence[str], device: str = "cuda", host_id: str | None = None
) -> SinkLayout:
    """Workers as vLLM cuts them: q, k, v fused and gate, up fused; K and V heads repeated where there are fewer than workers.

    Args:
        endpoints: names of the transports offered; they lead nowhere.
        host_id: where the server runs, its own host if None.
    Raises: ConfigError: heads or sizes do not divide by tp.
    """
    place = Place(host_id=server_id if host_id is None else host_id, device=device)
    workers = tuple(_worker(shape, rank, tp, dtype, place, dict.fromkeys(endpoints, "planned")) for rank in range(tp))
    return SinkLayout(server_id=server_id, workers=workers)


def _parameters(shape: LlamaShape) -> Iterator[tuple[str, list[_Tensor]]]:
    """Engine parameters and the tensors that each is fused from."""
    hidden = shape.hidden_size
    yield _alone(_Tensor(name="model.embed_tokens.weight", shape=(shape.vocab_size, hidden), tp_dim=0))
    for layer in range(shape.num_layers):
        yield from _layer_parameters(shape, f"model.layers.{layer}")
    yield _alone(_Tensor(name="model.norm.weight", shape=(hidden,), tp_dim=None))
    if not shape.tied:
        yield _alone(_Tensor(name="lm_head.weight", shape=(shape.vocab_size, hidden), tp_dim=0))


def _layer_parameters(shape: LlamaShape, prefix: str) -> Iterator[tuple[str, list[_Tensor]]]:
    hidden, head, inner = shape.hidden_size, shape.head_dim, shape.intermediate_size
    heads = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield _alone(_Tensor(name=f"{prefix}.{norm}.weight", shape=(hidden,), tp_dim=None))
    for kind, rest in (("weight", (hidden,)), *((("bias", ()),) if shape.qkv_bias else ())):
        names = [
            _Tensor(name=f"{attention}.{part}_proj.{kind}", shape=(count * head, *rest), tp_dim=0, unit=head, repeats=part != "q")
            for part, count in heads.items()
        ]
        yield f"{attention}.qkv_proj.{kind}", names
    for part in ("q", "k") if shape.qk_norm else ():
        yield _alone(_Tensor(name=f"{attention}.{part}_norm.weight", shape=(head,), tp_dim=None))
    yield _alone(_Tensor(name=f"{attention}.o_proj.weight", shape=(hidden, shape.num_heads * head), tp_dim=1))
    for kind, rest in (("weight", (hidden,)), *((("bias", ()),) if shape.mlp_bias else ())):
        yield (
            f"{mlp}.gate_up_proj.{kind}",
            [_Tensor(name=f"{mlp}.{part}_proj.{kind}", shape=(inner, *rest), tp_dim=0) for part in ("gate", "up")],
        )
    yield _alone(_Tensor(name=f"{mlp}.down_proj.weight", shape=(hidden, inner), tp_dim=1))
    for name, present in ((f"{attention}.o_proj.bias", shape.o_bias), (f"{mlp}.down_proj.bias", shape.mlp_bias)):
        if present:
            yield _alone(_Tensor(name=name, shape=(hidden,), tp_dim=None))


def _alone(tensor: _Tensor) -> tuple[str, list[_Tensor]]:
    return tensor.name, [tensor]


def _shards(tensor: _Tensor, grid: TrainerGrid) -> Iterator[TensorShard]:
    shards = grid.shards
    for rank in range(grid.num_ranks):
        box = boxes.whole(tensor.shape)
        if tensor.tp_dim is not None:
            box = _chunk(box, tensor.tp_dim, rank % grid.tp, grid.tp)
        box = _chunk(box, 0, rank // grid.tp % shards, shards)
        if box.num_elements:
            yield TensorShard(rank=rank, box=box)


def _chunk(box: Box, dim: int, index: int, count: int) -> Box:
    """The index-th of `count` ceil-sized parts along a dim."""
    size = box.sizes[dim]
    step = -(-size // count)
    start, end = min(index * step, size), min((index + 1) * step, size)
    return _cut(box, dim, box.offsets[dim] + start, end - start)


def _cut(box: Box, dim: int, offset: int, size: int) -> Box:
    return Box(
        offsets=(*box.offsets[:dim], offset, *box.offsets[dim + 1 :]),
        sizes=(*box.sizes[:dim], size, *box.sizes[dim + 1 :]),
    )


def _worker(shape: LlamaShape, rank: int, tp: int, dtype: str, place: Place, endpoints: dict[str, str]) -> SinkWorkerLayout:
    parameters, regions, end = [], [], 0
    for name, tensors in _parameters(shape):
        rows, full = 0, boxes.whole(tensors[0].shape)
        for tensor in tensors:
            full, share = _engine_share(tensor, rank, tp)
            target = Box(offsets=(rows, *(0,) * (len(share.sizes) - 1)), sizes=share.sizes)
            regions.append(SinkRegion(parameter=name, source_name=tensor.name, source_box=share, parameter_box=target))
            rows += full.sizes[0]
        parameter_shape = (rows, *full.sizes[1:])
        parameters.append(SinkParameter(name=name, shape=parameter_shape, dtype=dtype, staging_offset_bytes=end))
        num_bytes = math.prod(parameter_shape) * item_bytes(dtype, name)
        end += -(-num_bytes // _STAGING_ALIGNMENT_BYTES) * _STAGING_ALIGNMENT_BYTES
    return SinkWorkerLayout(
        worker_rank=rank, parameters=tuple(parameters), regions=tuple(regions), staging_bytes=end, place=place, endpoints=endpoints
    )


def _engine_share(tensor: _Tensor, rank: int, tp: int) -> tuple[Box, Box]:
    """What a worker allocates of a tensor, and the part of the tensor that fills it (smaller where the vocabulary is padded)."""
    box = boxes.whole(tensor.shape)
    if tensor.tp_dim is None:
        return box, box
    size, is_vocabulary = tensor.shape[tensor.tp_dim], tensor.name.startswith(("model.embed_tokens", "lm_head"))
    if is_vocabulary:
        size = -(-size // VOCAB_PADDING) * VOCAB_PADDING
    units = size // tensor.unit
    if units % tp and not (tensor.repeats and tp % units == 0):
        raise ConfigError(f"{tensor.name}: {units} {'heads' if tensor.unit > 1 else 'rows'} cannot be cut into tensor-parallel {tp}")
    per_worker = max(units // tp, 1) * tensor.unit
    offset = rank * units // tp * tensor.unit
    allocated = _cut(box, tensor.tp_dim, offset, per_worker)
    filled = max(min(offset + per_worker, tensor.shape[tensor.tp_dim]) - offset, 0)
    return allocated, _cut(box, tensor.tp_dim, offset if filled else 0, filled)
