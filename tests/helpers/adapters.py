"""Policies with adapters for tests: adapters that say something, and whole steps on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from shoal_trainer.distributed import RankContext
from shoal_trainer.inputs import pad_rows
from shoal_trainer.merging import ServedWeights
from shoal_trainer.models import PolicyModel, load_policy, named_shards
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from shoal.config.models import RunConfig
from tests.helpers.trainer_bench import run_config

LORA = {"rank": 5, "alpha": 12.0}
"""An inner dimension that two, three and four ranks share unevenly."""


def lora_config(folder: Path, lora: Mapping[str, Any] = LORA, **sections: Mapping[str, Any]) -> RunConfig:
    """A run that trains adapters."""
    actor = {"lora": lora, **sections.pop("actor", {})}
    return run_config(folder, actor=actor, **sections)


def adapted_policy(config: RunConfig, context: RankContext, *, seed: int = 0) -> PolicyModel:
    """A policy whose adapters are not zero any more, the same for every number of ranks."""
    policy = load_policy(config.model.path, config.model, config.actor, context, trainable=True)
    move_adapters(policy, seed=seed)
    return policy


def move_adapters(policy: nn.Module, *, seed: int, scale: float = 0.1) -> None:
    """Add noise to every adapter, the same for every number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad:
                assert "lora_" in name
                noise = scale * torch.randn(parameter.shape, generator=generator)
                assert isinstance(parameter, DTensor)
                parameter.add_(distribute_tensor(noise, parameter.device_mesh, parameter.placements, src_data_rank=None))


def served_by(policy: PolicyModel, config: RunConfig, context: RankContext) -> ServedWeights:
    """What engines get of a policy as it is."""
    return ServedWeights(named_shards(policy), config.actor.lora, context.device, lambda: 0)


def peft_model(base: Path, adapter: Path) -> PeftModel:
    """An exported adapter on its base, as peft loads it."""
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter)).eval()


def token_logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probability of every token but the first, by a Hugging Face model; [B, L - 1]."""
    with torch.no_grad():
        logits: Tensor = model(ids).logits
    return torch.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:, None])[..., 0]


def policy_logprobs(policy: PolicyModel, ids: Tensor) -> Tensor:
    """The same by a policy."""
    rows, length = ids.shape
    positions = torch.cat([row * length + torch.arange(length - 1) for row in range(rows)])
    inputs = pad_rows([row.numpy().astype(np.int32) for row in ids])
    with torch.no_grad():
        found: Tensor = policy(inputs, positions, ids[:, 1:].flatten(), 1.0, False)[0]
    return found.view(rows, length - 1)
