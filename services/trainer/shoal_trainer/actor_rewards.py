"""From what the records and the reference say to the inputs of an advantage estimator.

Legend: B records of this rank, T response tokens, G groups of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.algo.advantages import AdvantageInputs
from shoal.algo.group_advantages import frac_zero_std, group_statistics
from shoal.algo.kl import token_kl
from shoal.algo.masking import masked_moments, select, whiten
from shoal.algo.rewards import outcome_rewards, shaped_scores
from shoal.config.models import RunConfig
from shoal.types import Batch
from shoal_trainer.actor_batch import ActorMicroBatch, ActorStep
from shoal_trainer.batching import MicroBatch
from shoal_trainer.distributed import RankContext
from shoal_trainer.rows import join_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRewards:
    """Rewards of this rank's part of a step.

    outcomes: [B] shaped reward of each response, without the KL; NaN where it cannot be trained on.
    penalty: [B, T] kl_coef * KL in the reward; 0 if it does not enter there.
    group_index: [B] int64, the same numbering on all ranks. num_groups: G.
    inputs: of the estimator.
    """

    outcomes: Tensor
    penalty: Tensor
    group_index: Tensor
    num_groups: int
    inputs: AdvantageInputs


class RewardBuilder:
    """Builds the rewards of a step as `reward` and `algorithm` say."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._context = context

    def build(
        self, step: ActorStep, kl_coef: float, values: Sequence[Tensor] | None, bootstrap_values: Sequence[Tensor] | None
    ) -> StepRewards:
        """Shape the rewards, subtract the KL and put everything together. Enters collectives.

        Args:
            kl_coef: coefficient of the KL in the reward, if it enters there.
            values: [B, T] of the critic per micro-batch; None without a critic.
            bootstrap_values: [B] after the last token of each truncated response per micro-batch; None is 0.
        """
        batches = step.batches
        mask = join_rows([batch.response_mask for batch in batches])
        token_rewards = self._token_rewards(batches, mask)
        penalty = join_rows([self._penalty(micro, kl_coef) for micro in step.micro_batches])
        group_index, num_groups = number_groups(step.batch, batches, self._context.device)
        outcomes = torch.where(mask.any(dim=1), token_rewards.sum(dim=1), torch.nan)
        needs_groups = "groups" in self._algorithm.needs
        inputs = AdvantageInputs(
            rewards=token_rewards - penalty,
            response_mask=mask,
            values=None if values is None else join_rows(values),
            group_index=group_index if needs_groups else None,
            num_groups=num_groups if needs_groups else 0,
            bootstrap_values=None if bootstrap_values is None else torch.cat(list(bootstrap_values)),
            baselines=self._baselines(batches),
            components=torch.cat([batch.components for batch in batches]) if self._config.reward.weights else None,
            component_weights=tuple(self._config.reward.weights.values()),
        )
        return StepRewards(outcomes=outcomes, penalty=penalty, group_index=group_index, num_groups=num_groups, inputs=inputs)

    def metrics(self, rewards: StepRewards, advantages: Tensor, returns: Tensor) -> dict[str, float]:
        """Metrics of advantages and rewards; the same on every rank. Enters collectives."""
        mask, total = rewards.inputs.response_mask, self._context.sum_over_ranks
        of_advantages, of_returns = masked_moments(advantages, mask, total), masked_moments(returns, mask, total)
        metrics = {
            "advantage_mean": of_advantages.mean.item(),
            "advantage_std": of_advantages.variance().sqrt().item(),
            "return_mean": of_returns.mean.item(),
        }
        if self._algorithm.kl_in_reward:
            metrics["kl_reward_penalty"] = masked_moments(rewards.penalty, mask, total).mean.item()
        if self._config.rollout.group_size > 1:
            metrics["frac_zero_std"] = self._flat_fraction(rewards)
        return metrics

    def _token_rewards(self, batches: Sequence[MicroBatch], mask: Tensor) -> Tensor:
        """[B, T]: the shaped outcome on the last trained token, or the rewards given per token, as they are."""
        scores = self._shaped(batches, self._config.reward.normalise)
        given = select(join_rows([batch.token_rewards for batch in batches]), mask)
        is_given = torch.cat([batch.has_token_rewards for batch in batches])
        return torch.where(is_given[:, None], given, outcome_rewards(scores, mask))

    def _shaped(self, batches: Sequence[MicroBatch], normalise: str) -> Tensor:
        settings = self._config.reward
        return shaped_scores(
            torch.cat([batch.scores for batch in batches]),
            torch.cat([batch.response_lengths for batch in batches]),
            self._context.sum_over_ranks,
            clip=settings.clip,
            normalise=normalise,
            overlong_buffer_tokens=settings.overlong_buffer_tokens,
            overlong_penalty=settings.overlong_penalty,
            max_new_tokens=self._config.rollout.max_new_tokens,
        )

    def _penalty(self, micro: ActorMicroBatch, kl_coef: float) -> Tensor:
        if not self._algorithm.kl_in_reward or micro.ref_logprobs is None:
            return torch.zeros_like(micro.old_logprobs)
        mask = micro.batch.response_mask
        return kl_coef * token_kl(micro.logprobs.detach(), micro.ref_logprobs, mask, kl_estimator=self._algorithm.kl_estimator)

    def _baselines(self, batches: Sequence[MicroBatch]) -> Tensor | None:
        """[B] rewards of the greedy answers, bounded and scaled as those of the samples are."""
        if "greedy" not in self._algorithm.needs:
            return None
        baselines = torch.cat([batch.baselines for batch in batches])
        if self._config.reward.clip is not None:
            baselines = baselines.clamp(*self._config.reward.clip)
        if self._config.reward.normalise == "batch":
            scores, known = self._shaped(batches, "none"), ~baselines.isnan()
            moments = masked_moments(scores, ~scores.isnan(), self._context.sum_over_ranks)
            baselines = torch.where(known, whiten(baselines, known, moments), torch.nan)
        return baselines

    def _flat_fraction(self, rewards: StepRewards) -> float:
        """Share of the groups whose rewards are all equal: without a KL in the reward they teach nothing."""
        groups, total = (rewards.group_index, rewards.num_groups), self._context.sum_over_ranks
        return frac_zero_std(group_statistics(rewards.outcomes, *groups, total), *groups, total).item()


def number_groups(batch: Batch, batches: Sequence[MicroBatch], device: torch.device) -> tuple[Tensor, int]:
    """Number the groups of the whole batch, alike on every rank: [B] int64 of this rank's records, and how many there are."""
    everywhere = (ref.group_id for rank in batch.ranks for mini in rank for micro in mini.micro_batches for ref in micro)
    numbers = {group_id: number for number, group_id in enumerate(sorted(set(everywhere)))}
    own = [numbers[group_id] for micro in batches for group_id in micro.group_ids]
    return torch.tensor(own, dtype=torch.int64, device=device), len(numbers)
