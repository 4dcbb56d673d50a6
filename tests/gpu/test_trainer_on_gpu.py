"""The trainer's own parts on a GPU: packing through torch's kernel, mixed precision, offload to pinned memory, activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_trainer.attention import attend_by_kernel
from shoal_trainer.batching import MicroBatch, build_micro_batch
from shoal_trainer.distributed import RankContext
from shoal_trainer.inputs import Layout, pack_rows, pad_rows
from shoal_trainer.models import PolicyModel, layout_for, load_policy, named_shards
from shoal_trainer.optimizer import Optimizer
from shoal_trainer.packing import kernel_fault
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from shoal.types import ExperienceRecord
from tests.helpers.trainer_bench import (
    VOCAB_SIZE,
    build_pair,
    even_split,
    make_batch,
    make_record,
    one_rank,
    ppo_step,
    ragged_records,
    ref_of,
    run_config,
    save_policy,
    whole_gradients,
    whole_parameters,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BF16 = {"precision": "bf16_mixed"}


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rotary model with heads of 8."""
    return save_policy(tmp_path_factory.mktemp("policy") / "model", "llama")


@pytest.fixture(scope="module")
def context(policy_folder: Path) -> Iterator[RankContext]:
    """A gang of one, with a backend for host memory as well."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    with one_rank(run_config(policy_folder, actor={"device": "cuda", "offload": True})) as rank_context:
        yield rank_context


def load(folder: Path, context: RankContext, **actor: Any) -> PolicyModel:  # noqa: ANN401
    config = run_config(folder, actor={"device": "cuda", **actor})
    return load_policy(str(folder), config.model, config.actor, context, trainable=True)


def micro_batch(records: list[ExperienceRecord], layout: Layout, context: RankContext) -> MicroBatch:
    return build_micro_batch([ref_of(record) for record in records], records, VOCAB_SIZE, layout=layout).to(context.device)


def logprobs_of(policy: PolicyModel, micro: MicroBatch) -> Tensor:
    mask = micro.response_mask
    logprobs, _ = policy(micro.inputs, micro.positions_before(mask), micro.response_ids[mask], 0.7, False)
    return torch.as_tensor(logprobs)


def computed(policy: PolicyModel, context: RankContext, layout: Layout | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and gradients over ragged rows."""
    logprobs = logprobs_of(policy, micro_batch(ragged_records(), layout_for(policy) if layout is None else layout, context))
    logprobs.square().sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return logprobs.detach().cpu(), {name: gradient.cpu() for name, gradient in whole_gradients(policy).items()}


def assert_close(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], tolerance: float) -> None:
    """Log-probabilities within a tolerance, gradients within it relative to their norm."""
    assert (found[0] - expected[0]).abs().max() <= tolerance
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= tolerance * gradient.norm() + 1e-6, name


@pytest.mark.parametrize(("num_heads", "num_key_heads", "size"), [(4, 4, 64), (8, 2, 128), (4, 1, 256), (4, 2, 32)])
def test_kernel_works_for_heads_of_usual_sizes(num_heads: int, num_key_heads: int, size: int) -> None:
    config = LlamaConfig(num_attention_heads=num_heads, num_key_value_heads=num_key_heads, head_dim=size, hidden_size=num_heads * size)
    assert kernel_fault(config, torch.device("cuda", 0)) is None


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_kernel_equals_plain_attention_within_each_sequence_and_window(window: int | None) -> None:
    lengths = [7, 1, 16]
    generator = torch.Generator("cuda").manual_seed(0)
    parts = [torch.randn(1, heads, sum(lengths), 32, device="cuda", dtype=torch.bfloat16, generator=generator) for heads in (4, 2, 2)]
    query, key, value = (part.requires_grad_() for part in parts)
    borders = torch.tensor([0, 7, 8, 24], dtype=torch.int32, device="cuda")
    output = attend_by_kernel(query, key, value, borders, max(lengths), scaling=0.3, window=window)
    gradients = torch.autograd.grad(output.float().square().sum(), (query, key, value))
    places = torch.arange(sum(lengths), device="cuda")
    owners = torch.repeat_interleave(torch.arange(3, device="cuda"), torch.tensor(lengths, device="cuda"))
    distance = places[:, None] - places[None, :]
    mask = (distance >= 0) & (distance < (1000 if window is None else window)) & (owners[:, None] == owners[None, :])
    q, k, v = (part.detach().float().requires_grad_() for part in (query, key, value))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    expected_gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for found, right in ((output, expected), *zip(gradients, expected_gradients, strict=True)):
        assert (found.float() - right).norm() <= 0.02 * right.norm()


def test_mixed_precision_packs_by_itself_and_equals_padding(policy_folder: Path, context: RankContext) -> None:
    packs, pads = load(policy_folder, context, **BF16), load(policy_folder, context, packing="off", **BF16)
    assert packs.packs
    assert not pads.packs
    packed = computed(packs, context)
    assert_close(packed, computed(pads, context), 0.05)
    assert_close(packed, computed(load(policy_folder, context, packing="off"), context), 0.1)


def test_packed_row_does_not_see_its_neighbours(policy_folder: Path, context: RankContext) -> None:
    policy = load(policy_folder, context, **BF16)
    row = make_record(0, num_prompt=3, num_response=6)
    found = []
    for first in (make_record(1, num_prompt=2, num_response=9), make_record(2, num_prompt=2, num_response=9)):
        with torch.no_grad():
            found.append(logprobs_of(policy, micro_batch([first, row], pack_rows, context))[-6:])
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("packing", ["auto", "on"])
def test_float32_is_exact_padded_and_packed(policy_folder: Path, context: RankContext, packing: str) -> None:
    policy = load(policy_folder, context, packing=packing)
    assert policy.packs == (packing == "on")
    on_gpu = computed(policy, context)
    assert_close(on_gpu, computed(load(policy_folder, context, attention="eager"), context, pad_rows), 1e-4)


def test_offload_keeps_shards_gradients_and_moments_in_pinned_memory(policy_folder: Path, context: RankContext) -> None:
    stepped = {}
    for offload in (False, True):
        config = run_config(policy_folder, actor={"device": "cuda", "offload": offload, "lr": 1e-2})
        policy = load_policy(str(policy_folder), config.model, config.actor, context, trainable=True)
        optimizer = Optimizer(policy.parameters(), config.actor, context, planned_updates=2)
        for _ in range(2):
            logprobs_of(policy, micro_batch(ragged_records(), layout_for(policy), context)).square().sum().backward()  # type: ignore[no-untyped-call]
            gradients = [parameter.grad for parameter in named_shards(policy).values()]
            assert optimizer.step().applied
        shards = [shard.to_local() for shard in named_shards(policy).values()]
        moments = [state["exp_avg"].to_local() for state in optimizer._adamw.state.values()]
        kind = "cpu" if offload else "cuda"
        assert {tensor.device.type for tensor in (*shards, *moments, *gradients) if tensor is not None} == {kind}
        assert all(shard.is_pinned() for shard in shards) == offload
        stepped[offload] = {name: value.cpu() for name, value in whole_parameters(policy).items()}
    for name, value in stepped[False].items():
        assert torch.allclose(stepped[True][name], value, atol=1e-4), name


@pytest.mark.parametrize("precision", ["float32", "bf16_mixed"])
def test_activation_checkpointing_changes_nothing_and_takes_less_memory(policy_folder: Path, context: RankContext, precision: str) -> None:
    results, kept = {}, {}
    for checkpointing in (False, True):
        policy = load(policy_folder, context, activation_checkpointing=checkpointing, precision=precision)
        results[checkpointing] = computed(policy, context)
        policy.zero_grad()
        micro = micro_batch([make_record(index, num_prompt=8, num_response=48) for index in range(64)], layout_for(policy), context)
        before = torch.cuda.memory_allocated()
        logprobs = logprobs_of(policy, micro)
        kept[checkpointing] = torch.cuda.memory_allocated() - before
        logprobs.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert_close(results[True], results[False], 1e-5 if precision == "float32" else 0.02)
    assert kept[True] < 0.6 * kept[False]


@pytest.mark.parametrize("reshard", [True, False])
def test_whole_step_with_everything_on_has_ratio_one(policy_folder: Path, context: RankContext, reshard: bool) -> None:
    gang = {
        "device": "cuda", "precision": "bf16_mixed", "packing": "on", "offload": True, "activation_checkpointing": True,
        "reshard_after_forward": reshard,
    }  # fmt: skip
    config = run_config(policy_folder, actor=gang, critic=gang)
    actor, critic, _ = build_pair(config, context, ragged_records())
    for step in (1, 2):
        metrics, critic_metrics = ppo_step(actor, critic, make_batch(ragged_records(), even_split(6, 1, 2), step))
        assert metrics["num_updates"] == critic_metrics["num_updates"] == 1.0
        assert metrics["ratio_max_deviation"] <= 1e-5
