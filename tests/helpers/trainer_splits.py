"""The same records trained under every split over micro-batches and ranks, for several algorithms, on one pair of models.

What each rank computes goes through the real train step; a learning rate of 1e-30 leaves the parameters as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from shoal_trainer.actor import Actor
from shoal_trainer.critic import Critic
from shoal_trainer.distributed import RankContext
from shoal_trainer.loading import BatchLoader
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shoal.config.models import RunConfig
from shoal.types import ExperienceRecord, FinishReason, RewardComponent, ScoreStatus
from tests.helpers.trainer_bench import (
    RUN_ID,
    Split,
    build_pair,
    even_split,
    make_batch,
    make_record,
    ppo_step,
)

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")

Sections = Mapping[str, Mapping[str, Any]]

# old_logprobs: rollout makes ratios differ from 1, so that clipping takes part.
SCENARIOS: dict[str, Sections] = {
    "gae_ppo": {
        "algorithm": {
            "estimator": "gae", "lam": 0.9, "bootstrap_truncated": True, "old_logprobs": "rollout", "dual_clip": 3.0,
            "entropy_coef": 0.01,
        },
        "reward": {"clip": (-0.4, 1.2), "normalise": "batch"},
    },
    "grpo_gspo": {
        "algorithm": {
            "estimator": "grpo", "policy_loss": "gspo", "clip_low": 3e-2, "clip_high": 4e-2, "kl_in": "none", "mask_truncated": True,
            "old_logprobs": "rollout",
        },
        "reward": {"overlong_buffer_tokens": 4, "overlong_penalty": 0.5},
    },
    "rloo_cispo": {
        "algorithm": {"estimator": "rloo", "policy_loss": "cispo", "kl_in": "loss", "old_logprobs": "rollout", "rejection": "geometric"},
    },
    "reinforce_pp": {
        "algorithm": {
            "estimator": "reinforce_pp", "gamma": 0.98, "importance_weights": "token_mask", "kl_in": "both", "kl_loss_estimator": "k2",
        },
    },
}  # fmt: skip


def hard_records() -> list[ExperienceRecord]:
    """Ragged responses: one with a hole, one without a trained token, one cut, one not scored, one with a reward per token."""
    records = []
    for index, group in enumerate((0, 0, 0, 1, 1, 1, 2, 2, 3, 3)):
        num_response = 2 + (index * 3) % 7
        mask = np.ones(num_response, np.bool_)
        if index == 1:
            mask[1] = False
        if index == 4:
            mask[:] = False
        record = make_record(
            index, group=group, num_prompt=1 + index % 4, num_response=num_response, reward=(index % 3) * 0.7 - 0.5, response_mask=mask
        )
        # About what the random model gives, so that ratios lie on both sides of 1.
        records.append(replace(record, rollout_logprobs=(record.rollout_logprobs / 4 - 3.7).astype(np.float32)))
    records[5] = replace(records[5], finish_reason=FinishReason.LENGTH)
    records[7] = replace(records[7], reward_status=ScoreStatus.NOT_SCORED)
    records[8] = replace(records[8], token_rewards=np.linspace(-1, 1, len(records[8].response_ids)).astype(np.float32))
    return records


def component(name: str, value: float) -> RewardComponent:
    """A scored part of a reward."""
    return RewardComponent(name=name, service="s", service_version="1", value=value, status=ScoreStatus.SCORED, latency_ms=0.0)


def splits_of(num_records: int, world_size: int) -> dict[str, Split]:
    """One, two and as many micro-batches as records on a rank; with several ranks also one without any record."""
    counts = {"1": 1, "2": 2, "all": -(-num_records // world_size)}
    splits = {name: even_split(num_records, world_size, num_micro) for name, num_micro in counts.items()}
    if world_size > 1:
        splits["empty shard"] = [*even_split(num_records, world_size - 1, 1), []]
    return splits


class Workbench:
    """Actor and critic for any algorithm on the same modules."""

    def __init__(self, context: RankContext, config: RunConfig, records: Sequence[ExperienceRecord]) -> None:
        """config: with a reference."""
        self.context, self._config = context, config
        self.actor, self.critic, self._source = build_pair(config, context, records)
        spread_values(self.critic)

    def build(self, sections: Sections) -> tuple[Actor, Critic | None]:
        """Fresh trainers with these settings on top of the bench's."""
        config = with_sections(self._config, sections)
        passes = replace(self.actor._loader._passes, component_names=tuple(config.reward.weights))
        loader = BatchLoader(self._source, self.context, RUN_ID, passes)
        reference = self.actor._reference if config.algorithm.has_reference else None
        actor = Actor(config, self.context, self.actor.module, reference, loader)
        if not config.algorithm.has_critic:
            return actor, None
        loader = BatchLoader(self._source, self.context, RUN_ID, replace(passes, feed_cut_ends=config.algorithm.bootstrap_truncated))
        return actor, Critic(config, self.context, self.critic.module, loader)


def with_sections(config: RunConfig, sections: Sections) -> RunConfig:
    """A configuration with single fields changed."""
    tree = config.model_dump(mode="python")
    for name, fields in sections.items():
        tree[name] = {**tree[name], **fields}
    return RunConfig.model_validate(tree)


Place = tuple[str, str]
"""Scenario and aggregation."""

EVERYWHERE: tuple[Place, ...] = tuple(itertools.product(SCENARIOS, AGGREGATIONS))
ONCE: tuple[Place, ...] = tuple(zip(SCENARIOS, AGGREGATIONS, strict=True))
"""Every scenario and every aggregation once: a step of four ranks on two cores takes long."""


def every_split(context: RankContext, config: RunConfig, places: Sequence[Place]) -> dict[str, Any]:
    """Metrics and gradients of every split of this number of ranks, for these scenarios and aggregations."""
    records = hard_records()
    bench = Workbench(context, with_sections(config, {"actor": {"lr": 1e-30}, "critic": {"lr": 1e-30}}), records)
    return {
        f"{scenario}/{aggregation}/{name}": _trained(bench, records, split, SCENARIOS[scenario], aggregation)
        for scenario, aggregation in places
        for name, split in splits_of(len(records), context.world_size).items()
    }


def _trained(
    bench: Workbench, records: Sequence[ExperienceRecord], split: Split, sections: Sections, aggregation: str
) -> dict[str, Any]:  # fmt: skip
    algorithm = {**sections["algorithm"], "loss_aggregation": aggregation}
    actor, critic = bench.build({**sections, "algorithm": algorithm})
    seen: dict[str, torch.Tensor] = {}
    spy_on(actor, lambda: seen.update(actor=_whole_gradient(actor.module, bench.context)))
    if critic is not None:
        spy_on(critic, lambda: seen.update(critic=_whole_gradient(critic.module, bench.context)))
    metrics = ppo_step(actor, critic, make_batch(records, split), kl_coef=0.1, kl_loss_coef=0.2)
    return {"gradients": seen, "actor": without_times(metrics[0]), "critic": without_times(metrics[1])}


def spy_on(trainer: Actor | Critic, look: Callable[[], object]) -> None:
    """Look at the gradients of every optimizer step before it is made."""
    original = trainer.optimizer.step

    def step() -> Any:  # noqa: ANN401
        look()
        return original()

    trainer.optimizer.step = step  # type: ignore[method-assign]


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Everything that must not depend on the split."""
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


def _whole_gradient(module: torch.nn.Module, context: RankContext) -> torch.Tensor:
    """All gradients of all ranks in one vector, by one reduction."""
    parts: list[torch.Tensor] = []
    for parameter in module.parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        whole, own = torch.zeros(gradient.shape), gradient.to_local()
        _, (first, *_) = compute_local_shape_and_global_offset(gradient.shape, gradient.device_mesh, gradient.placements)
        whole[first : first + own.shape[0]] = own
        parts.append(whole.flatten())
    return context.sum_over_ranks(torch.cat(parts))


def spread_values(critic: Critic) -> torch.Tensor:
    """Give the value head, zero in a new critic, weights that are the same for every number of ranks; returns them."""
    weight = cast("DTensor", critic.module.value_head.weight.data)
    whole = torch.linspace(-0.5, 0.5, weight.numel()).reshape(weight.shape)
    weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements))
    return whole
