"""The actor's loss: the policy loss, corrected for the engine's probabilities, the KL to the reference and the entropy bonus.

Legend: B records of a micro-batch, T response tokens.

    per token:  kept * (importance * policy loss + kl_loss_coef * KL - entropy_coef * entropy)

Importance weights correct the policy gradient of samples that the engine drew from slightly other probabilities; a rejected response
adds nothing at all. Neither changes the denominators of the aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.algo.aggregation import TrainedCounts, aggregate
from shoal.algo.kl import token_kl
from shoal.algo.losses import TokenLoss
from shoal.algo.masking import select
from shoal.algo.offpolicy import correction_sums, importance_weights, kept_sequences
from shoal.algo.registry import bind, policy_loss
from shoal.config.models import RunConfig
from shoal_trainer.actor_batch import ActorMicroBatch
from shoal_trainer.passes import loss_norm_length


class PolicyObjective:
    """The configured loss of the policy."""

    def __init__(self, config: RunConfig) -> None:
        """Raises: ConfigError: an unknown loss, or a setting that it needs and `algorithm` has not."""
        algorithm = config.algorithm
        self._algorithm = algorithm
        self._norm_length = loss_norm_length(config)
        self._policy_loss = policy_loss(algorithm)
        self._importance_weights = bind(importance_weights, algorithm)
        self._kept_sequences = bind(kept_sequences, algorithm)
        self._correction_sums = bind(correction_sums, algorithm)

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss has an entropy bonus."""
        return self._algorithm.entropy_coef > 0

    def correct(self, micro: ActorMicroBatch) -> None:
        """Set importance weights and kept responses from the policy's log-probabilities at the forward and the engine's."""
        arguments = (micro.logprobs.detach(), micro.batch.rollout_logprobs, micro.batch.response_mask)
        if self._algorithm.importance_weights != "none":
            micro.importance = self._importance_weights(*arguments)
        if self._algorithm.rejection != "none":
            micro.kept = self._kept_sequences(*arguments)

    def correction_sums(self, micro: ActorMicroBatch) -> dict[str, Tensor]:
        """Trained tokens that the correction capped, dropped or rejected; only of what is switched on."""
        mask = micro.batch.response_mask
        importance = torch.ones_like(micro.old_logprobs) if micro.importance is None else micro.importance
        kept = torch.ones_like(micro.batch.truncated) if micro.kept is None else micro.kept
        sums = self._correction_sums(micro.logprobs.detach(), micro.batch.rollout_logprobs, mask, importance, kept)
        return {name: value for name, value in sums.items() if name in self._correction_names()}

    def loss(
        self, micro: ActorMicroBatch, logprobs: Tensor, entropies: Tensor, counts: TrainedCounts, kl_loss_coef: float
    ) -> tuple[Tensor, TokenLoss]:
        """This micro-batch's part of the optimizer step's loss.

        Args:
            logprobs, entropies: [B, T] of the policy being trained, with their graph.
            counts: of the whole optimizer step.
            kl_loss_coef: coefficient of the KL in the loss.
        Returns: a scalar with a gradient, and the terms with sums and maxima for metrics.
        """
        assert micro.advantages is not None, "the ledger lets no update through without advantages"  # noqa: S101
        mask = micro.loss_mask
        terms = self._policy_loss(logprobs, micro.old_logprobs, micro.advantages, mask)
        per_token = select(terms.per_token, mask)
        if micro.importance is not None:
            per_token = per_token * micro.importance
        sums: Mapping[str, Tensor] = terms.sums
        if self._algorithm.kl_in_loss and micro.ref_logprobs is not None:
            kl = token_kl(logprobs, micro.ref_logprobs, mask, kl_estimator=self._algorithm.kl_loss_estimator)
            per_token = per_token + kl_loss_coef * kl
            sums = {**sums, "kl_loss": kl_loss_coef * kl.detach().double().sum()}
        if self.needs_entropy:
            per_token = per_token - self._algorithm.entropy_coef * select(entropies, mask)
        if micro.kept is not None:
            per_token = torch.where(micro.kept[:, None], per_token, 0.0)
        loss = aggregate(per_token, mask, counts, loss_aggregation=self._algorithm.loss_aggregation, norm_length=self._norm_length)
        return loss, TokenLoss(per_token=per_token, sums=dict(sums), maxima=terms.maxima)

    def _correction_names(self) -> set[str]:
        names = {"rejected_fraction"} if self._algorithm.rejection != "none" else set()
        if self._algorithm.importance_weights.endswith("truncate"):
            names.add("importance_capped_fraction")
        if self._algorithm.importance_weights.endswith("mask"):
            names.add("importance_dropped_fraction")
        return names
