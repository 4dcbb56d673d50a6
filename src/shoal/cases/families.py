"""All families by name."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.cases import estimators, groups, losses, penalties, splits, steps
from shoal.cases.family import Family

FAMILIES: Mapping[str, Family] = {
    "gae": estimators.GAE,
    "token_rewards": penalties.TOKEN_REWARDS,
    "overlong_shaping": penalties.OVERLONG_SHAPING,
    "masked_whitening": estimators.WHITENING,
    "kl_estimators": penalties.KL,
    "adaptive_kl": penalties.ADAPTIVE_KL,
    "loss_aggregation": splits.LOSS_AGGREGATION,
    "ppo_clip": losses.PPO_CLIP,
    "value_loss": losses.VALUE_LOSS,
    "grpo": groups.GRPO,
    "rloo": groups.RLOO,
    "reinforce_pp": estimators.REINFORCE_PP,
    "truncated_is": losses.TRUNCATED_IS,
    "entropy": steps.ENTROPY,
    "temperature": steps.TEMPERATURE,
    "grad_norm": steps.GRAD_NORM,
    "staleness_gate": steps.STALENESS_GATE,
    "lr_schedule": steps.LR_SCHEDULE,
}
