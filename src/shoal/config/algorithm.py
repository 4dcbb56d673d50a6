"""From rewards to gradients. Formulas and sources: docs/algorithms.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.config.base import FALSE_IS_NONE, Section
from shoal.config.functions import Choice, Need, needs_of

KlEstimator = Literal["k1", "k2", "k3", "k3_straight_through"]
ImportanceWeights = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
LossAggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


class AlgorithmSection(Section):
    """From rewards to gradients. Formulas and sources: docs/algorithms.md."""

    estimator: Choice = "gae"
    """Advantage estimator; gae needs the critic."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE lambda."""
    whiten_advantages: bool = True
    """Shift and scale advantages to mean 0 and standard deviation 1 over the whole batch (gae)."""
    group_std: Annotated[Literal["sample", "population", "none"], FALSE_IS_NONE] = "sample"
    """Standard deviation that divides a group's advantages (grpo, gdpo): n - 1, n, or no division."""
    group_baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted from a reward (grpo, dr_grpo): the group's mean, or that of its other members."""
    group_eps: float = Field(default=1e-6, ge=0)
    """Added to the group's standard deviation."""
    bootstrap_truncated: bool = False
    """Continue a response that was cut by the length limit with the critic's value (gae); off, it counts as finished."""
    mask_truncated: bool = False
    """Leave responses that were cut by the length limit out of the loss; they still count in baselines and statistics."""
    policy_loss: Choice = "ppo"
    """Loss of the policy."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Ratio clip below: 1 - clip_low; 1 does not clip there."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratio clip above: 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the loss for negative advantages (dual clip); None is off."""
    value_loss: Choice = "clipped"
    """Loss of the critic."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Clip of the value change; None is off."""
    kl_in: Annotated[Literal["none", "reward", "loss", "both"], FALSE_IS_NONE] = "reward"
    """Where the KL to the reference enters; none loads no reference."""
    kl_coef: float = Field(default=0.01, ge=0)
    """Coefficient of the KL in the reward."""
    kl_estimator: KlEstimator = "k1"
    """Per-token estimator of the KL in the reward."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Coefficient of the KL in the loss."""
    kl_loss_estimator: KlEstimator = "k3"
    """Per-token estimator of the KL in the loss."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive moves the coefficients in proportion to the distance of the KL from kl_target."""
    kl_target: float | None = Field(default=None, gt=0)
    """KL per response, in nats, that the adaptive controller aims at."""
    kl_horizon: int = Field(default=10_000, ge=1)
    """Samples over which a constant relative error of 1 would double an adaptive coefficient."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    loss_aggregation: LossAggregation = "token_mean"
    """How per-token losses become one number."""
    loss_norm_length: int | None = Field(default=None, ge=1)
    """Constant divisor of seq_mean_token_sum_norm, in tokens; None is rollout.max_new_tokens."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which only the critic is trained."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Denominator of the ratio: recomputed by the trainer, or as reported by the engine."""
    importance_weights: Annotated[ImportanceWeights, FALSE_IS_NONE] = "none"
    """Weights trainer / engine on the loss: capped at importance_high, or 0 outside [importance_low, importance_high];
    of each token or of the whole response."""
    importance_low: float = Field(default=0.5, ge=0)
    """Lower bound of the masking weights."""
    importance_high: float = Field(default=2.0, gt=0)
    """Cap of the truncating weights, upper bound of the masking ones."""
    rejection: Annotated[Literal["none", "sequence", "geometric"], FALSE_IS_NONE] = "none"
    """Drop responses whose ratio trainer / engine, the product over its tokens or their geometric mean, is outside the bounds."""
    rejection_low: float = Field(default=0.5, ge=0)
    """Lower bound of the ratio of a response that is kept."""
    rejection_high: float = Field(default=2.0, gt=0)
    """Upper bound of the ratio of a response that is kept."""

    @property
    def needs(self) -> frozenset[Need]:
        """What the estimator needs."""
        return needs_of(self.estimator)

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic gang."""
        return "critic" in self.needs

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL enters the reward."""
        return self.kl_in in ("reward", "both")

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL enters the loss."""
        return self.kl_in in ("loss", "both")

    @property
    def has_reference(self) -> bool:
        """Whether a reference policy is loaded."""
        return self.kl_in != "none"
