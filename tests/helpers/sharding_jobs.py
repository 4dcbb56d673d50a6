"""What test ranks run to compare settings of sharding, memory and packing: every setting in one gang.

Rank 0 leaves `<folder>/result.pt` (tensors and numbers only).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from shoal_trainer.batching import MicroBatch, build_micro_batch
from shoal_trainer.distributed import RankContext
from shoal_trainer.models import PolicyModel, ValueModel, forget_passes, layout_for, load_policy, load_value_model, named_shards
from shoal_trainer.optimizer import Optimizer
from shoal_trainer.passes import backward_over_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shoal.config.gang import GangSection
from shoal.config.models import RunConfig
from shoal.types import ExperienceRecord
from tests.helpers.math_cases import math_case
from tests.helpers.trainer_bench import VOCAB_SIZE, ragged_records, ref_of, whole_gradients, whole_parameters

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gathered": {"reshard_after_forward": False},
    "checkpointed": {"activation_checkpointing": True},
    "offloaded": {"offload": True},
    "packed": {"packing": "on"},
    "eager": {"attention": "eager"},
    "all": {"reshard_after_forward": False, "activation_checkpointing": True, "offload": True, "packing": "on"},
    "bf16": {"precision": "bf16_mixed"},
    "bf16, all": {"precision": "bf16_mixed", "activation_checkpointing": True, "offload": True, "packing": "on"},
}


def sharding_job(context: RankContext, config: RunConfig, folder: Path) -> None:
    """Run every setting, and the case of the gradient norm."""
    result: dict[str, Any] = {name: _policy_step(context, config, setting) for name, setting in SETTINGS.items()}
    result |= {f"value, {name}": _value_step(context, config, SETTINGS[name]) for name in ("plain", "all")}
    result["norm"] = _clipped(context)
    if context.rank == 0:
        torch.save(result, folder / "result.pt")


def _policy_step(context: RankContext, config: RunConfig, setting: dict[str, Any]) -> dict[str, Any]:
    """A forward without gradients, two with, their backwards, an update, and what the updated policy answers."""
    gang = GangSection(lr=1e-2, device="cpu", **setting)
    policy = load_policy(config.model.path, config.model, gang, context, trainable=True)
    micro_batches = _own_micro_batches(context, policy)
    with torch.no_grad():
        before = _total(context, [_logprobs(policy, micro) for micro in micro_batches])
    graphs = [_logprobs(policy, micro) for micro in micro_batches]
    loss = _total(context, graphs)
    for logprobs in graphs:
        backward_over_ranks(logprobs.square().sum(), context)
    gradients = whole_gradients(policy)
    outcome = Optimizer(policy.parameters(), gang, context, planned_updates=1).step()
    with torch.no_grad():
        after = _total(context, [_logprobs(policy, micro) for micro in micro_batches])
    devices = {shard.to_local().device.type for shard in named_shards(policy).values()}
    forget_passes(policy)
    return {
        "before": before,
        "loss": loss,
        "gradients": gradients,
        "grad_norm": outcome.grad_norm,
        "after": after,
        "parameters": whole_parameters(policy),
        "on_cpu": devices == {"cpu"},
    }


def _value_step(context: RankContext, config: RunConfig, setting: dict[str, Any]) -> dict[str, Any]:
    """Gradients of a value model, whose head is moved away from zero first."""
    model = load_value_model(config.model, GangSection(device="cpu", **setting), context)
    with torch.no_grad():
        model.value_head.weight.add_(0.1)
    values = [model(micro.inputs, micro.positions_before(micro.response_mask)) for micro in _own_micro_batches(context, model)]
    for of_micro in values:
        backward_over_ranks(of_micro.square().sum(), context)
    return {"loss": _total(context, values), "gradients": whole_gradients(model)}


def _own_micro_batches(context: RankContext, model: PolicyModel | ValueModel) -> list[MicroBatch]:
    """Two of ragged rows, the second one empty on the last of two ranks."""
    own = ragged_records()[context.rank :: context.world_size]
    halves = [own[:2], own[2:]] if context.rank == 0 else [own, []]
    return [_micro_batch(records, model) for records in halves]


def _micro_batch(records: list[ExperienceRecord], model: PolicyModel | ValueModel) -> MicroBatch:
    return build_micro_batch([ref_of(record) for record in records], records, VOCAB_SIZE, layout=layout_for(model))


def _logprobs(policy: PolicyModel, micro: MicroBatch) -> Tensor:
    mask = micro.response_mask
    logprobs, _ = policy(micro.inputs, micro.positions_before(mask), micro.response_ids[mask], 1.0, False)
    return torch.as_tensor(logprobs)


def _total(context: RankContext, parts: list[Tensor]) -> float:
    own = torch.stack([part.detach().double().square().sum() for part in parts]).sum()
    return context.sum_over_ranks(own.reshape(1)).item()


def _clipped(context: RankContext) -> dict[str, Any]:
    """M-GRD-01 with one shard of the gradient on each rank: the norm that an optimizer reports and the gradient that it uses."""
    inputs = math_case("M-GRD-01")["inputs"]
    whole = torch.tensor(inputs["shards"]).flatten()
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones_like(whole), context.mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(whole, context.mesh, [Shard(0)])
    gang = GangSection(lr=1.0, weight_decay=0.0, max_grad_norm=inputs["max_norm"])
    optimizer = Optimizer([parameter], gang, context, planned_updates=1)
    outcome = optimizer.step()
    moment = optimizer._adamw.state[parameter]["exp_avg"]
    assert isinstance(moment, DTensor)
    # The first moment is (1 - beta1) times the gradient that was used.
    return {"norm": outcome.grad_norm, "used": moment.full_tensor() / (1 - gang.betas[0])}
