"""Layouts derived from a model's shape, planned as they would be pushed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from shoal.errors import ConfigError
from shoal.types.weights import SinkLayout, SourceLayout
from shoal.weights.llama_layouts import LlamaShape, TrainerGrid, engine_layout, tensors_of, trainer_layout
from shoal.weights.planner import plan_push, plan_server
from tests.helpers.layouts import box
from tests.helpers.random_push import carry_out, wanted_elements

TINY = LlamaShape(num_layers=2, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=2, intermediate_size=12, vocab_size=70)
LLAMA_70B = LlamaShape(
    num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128, intermediate_size=28672, vocab_size=128256
)


def layouts(shape: LlamaShape, grid: TrainerGrid, tp: int) -> tuple[SourceLayout, SinkLayout]:
    source = trainer_layout(shape, grid, dtype="float32")
    return source, engine_layout(shape, server_id="rollout-0", tp=tp, dtype="bfloat16", endpoints=("grpc",))


@pytest.mark.parametrize(
    "shape",
    [TINY, replace(TINY, tied=True), replace(TINY, qkv_bias=True, qk_norm=True), replace(TINY, qkv_bias=True, o_bias=True, mlp_bias=True)],
)
@pytest.mark.parametrize("grid", [TrainerGrid(num_ranks=3), TrainerGrid(num_ranks=4, tp=2), TrainerGrid(num_ranks=8, tp=2, replicas=2)])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_derived_layouts_plan_and_cover_everything(shape: LlamaShape, grid: TrainerGrid, tp: int) -> None:
    source, sink = layouts(shape, grid, tp)
    plan = plan_server(source, sink, bucket_bytes=64, transport="auto")
    written, wanted = carry_out(plan, source, sink), wanted_elements(source, sink)
    assert all((written[key] == wanted[key]).all() for key in wanted)


def test_engine_layout_fuses_pads_and_repeats_as_vllm_does() -> None:
    sink = engine_layout(TINY, server_id="a", tp=4, dtype="bfloat16", endpoints=())
    shapes = {parameter.name: parameter.shape for parameter in sink.workers[1].parameters}
    layer = "model.layers.0"
    assert shapes["model.embed_tokens.weight"] == (32, 8)
    assert shapes[f"{layer}.self_attn.qkv_proj.weight"] == ((1 + 1 + 1) * 2, 8)
    assert shapes[f"{layer}.self_attn.o_proj.weight"] == (8, 2)
    assert shapes[f"{layer}.mlp.gate_up_proj.weight"] == (6, 8)
    assert shapes[f"{layer}.mlp.down_proj.weight"] == (8, 3)
    heads = [
        next(region.source_box for region in worker.regions if region.source_name == f"{layer}.self_attn.k_proj.weight")
        for worker in sink.workers
    ]
    assert heads == [box((0, 2), (0, 8)), box((0, 2), (0, 8)), box((2, 4), (0, 8)), box((2, 4), (0, 8))]
    embeddings = [worker.regions[0].source_box for worker in sink.workers]
    assert [part.sizes[0] for part in embeddings] == [32, 32, 6, 0]


def test_a_tied_head_is_not_a_tensor() -> None:
    assert "lm_head.weight" in tensors_of(TINY)
    assert "lm_head.weight" not in tensors_of(replace(TINY, tied=True))


def test_ranks_and_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 trainer ranks cannot be cut into 1 replicas of tensor-parallel 4"):
        trainer_layout(TINY, TrainerGrid(num_ranks=6, tp=4), dtype="float32")
    with pytest.raises(ConfigError, match=r"q_proj.weight: 4 heads cannot be cut into tensor-parallel 3"):
        engine_layout(replace(TINY, vocab_size=192), server_id="a", tp=3, dtype="float32", endpoints=())
    # Workers share heads of K and V, none of Q.
    with pytest.raises(ConfigError, match=r"q_proj.weight: 4 heads cannot be cut into tensor-parallel 8"):
        engine_layout(TINY, server_id="a", tp=8, dtype="float32", endpoints=())


def test_a_70b_model_is_planned_from_256_ranks_to_16_engines_in_ten_seconds() -> None:
    """In the processor's time, with what one rank needs of its buckets."""
    source = trainer_layout(LLAMA_70B, TrainerGrid(num_ranks=256), dtype="bfloat16")
    sinks = [
        engine_layout(LLAMA_70B, server_id=f"rollout-{index}", tp=8, dtype="bfloat16", endpoints=("collective",)) for index in range(16)
    ]
    start = time.process_time()
    plan = plan_push(source, sinks, bucket_bytes=16 << 20, transport="auto")
    buckets = [bucket for server in plan.servers.values() for worker in range(8) for bucket in server.buckets(3, worker)]
    assert time.process_time() - start <= 10
    assert len(plan.servers) == 16
    assert max(bucket.num_bytes for bucket in buckets) <= 16 << 20
