"""The actor on one rank: log-probabilities, advantages, policy updates.

Legend: B records of a micro-batch, T response tokens, N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.algo.advantages import AdvantageInputs
from shoal.algo.aggregation import TrainedCounts, aggregate
from shoal.algo.kl import k1, k3, token_kl
from shoal.algo.masking import masked_moments, select
from shoal.algo.registry import advantage_estimator, policy_loss
from shoal.config.models import RunConfig
from shoal.types import Batch, TokenScores, TokenSequence, TrainerRole, UpdateResult
from shoal_trainer.batching import MicroBatch, build_micro_batch
from shoal_trainer.distributed import RankContext
from shoal_trainer.loading import BatchLoader, MiniBatches, flatten
from shoal_trainer.metrics import Stopwatch, Tally
from shoal_trainer.models import PolicyModel, forget_passes
from shoal_trainer.optimizer import Optimizer
from shoal_trainer.passes import (
    backward_over_ranks,
    graph,
    keeps_graph,
    outcome_metrics,
    read_mini_batches,
    run_updates,
    split_like,
    update_result,
)
from shoal_trainer.rows import join_rows, split_rows
from shoal_trainer.scoring import ScoringLimits, score_sequences
from shoal_trainer.step_ledger import StepLedger, StepStage


@dataclass(slots=True, kw_only=True)
class _ActorMicroBatch:
    """A micro-batch and what was computed for it; all [B, T]. logprobs and entropies have a graph only if it is kept."""

    batch: MicroBatch
    logprobs: Tensor
    entropies: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class _ActorStep:
    batch: Batch
    mini_batches: MiniBatches
    micro_batches: list[_ActorMicroBatch]
    has_graph: bool
    kl_loss_coef: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


class Actor:
    """One rank of the actor gang. Not for use from several threads."""

    role = TrainerRole.ACTOR

    def __init__(
        self,
        config: RunConfig,
        context: RankContext,
        policy: PolicyModel,
        reference: PolicyModel | None,
        loader: BatchLoader,
    ) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._context = context
        self._policy = policy
        self._reference = reference
        self._loader = loader
        self._loss = policy_loss(config.algorithm)
        self._estimate = advantage_estimator(config.algorithm)
        self._ledger: StepLedger[dict[str, float] | UpdateResult] = StepLedger(self.role)
        self._step: _ActorStep | None = None
        self.optimizer = Optimizer(policy.parameters(), config.actor, context, planned_updates=config.planned_updates)
        self.policy_version = 0

    @property
    def module(self) -> PolicyModel:
        """The trained policy."""
        return self._policy

    @property
    def has_reference(self) -> bool:
        """True if a reference is loaded."""
        return self._reference is not None

    def warm_up(self) -> None:
        """Run a dummy pass on every rank, so that the first step does not pay for what torch sets up on first use."""
        dummy = build_micro_batch((), (), vocab_size=1).to(self._context.device)
        scored = self._score(dummy)
        self._score_by_reference([scored])
        scored.logprobs.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.optimizer.warm_up()

    def forward_batch(self, batch: Batch) -> dict[str, float]:
        """Compute log-probabilities of the policy as it is, and of the reference. Idempotent under the batch's step.

        Raises: StateError: the step is over. Errors of reading the records.
        """
        answer = self._ledger.recall_forward(batch)
        if isinstance(answer, dict):
            return answer
        self._drop_step()
        watch = Stopwatch(self._context.device)
        mini_batches = read_mini_batches(self._loader, batch, self._context, watch)
        has_graph = keeps_graph(mini_batches, self._algorithm, self._config.actor, self._context)
        with watch.time("forward_s"), graph(has_graph):
            micro_batches = [self._score(micro) for micro in flatten(mini_batches)]
        with watch.time("reference_s"):
            self._score_by_reference(micro_batches)
        metrics = self._forward_metrics(micro_batches) | watch.seconds
        self._step = _ActorStep(batch=batch, mini_batches=mini_batches, micro_batches=micro_batches, has_graph=has_graph, metrics=metrics)
        self._ledger.begin(batch, metrics)
        return metrics

    def compute_advantages(self, step: int, kl_coef: float, kl_loss_coef: float) -> dict[str, float]:
        """Turn rewards, KL and values into advantages and write the column `returns`. Idempotent under step.

        Args:
            kl_coef: weight of the KL penalty in the reward, if it enters there.
            kl_loss_coef: weight of the KL in the loss of this step's update, if it enters there.
        Raises: StateError: forward_batch of this step has not run. NotFoundError: a record has no column `values` yet.
        """
        answer = self._ledger.recall(StepStage.ADVANTAGES, step)
        if isinstance(answer, dict):
            return answer
        current = self._current()
        micro_batches = current.micro_batches
        batches = [micro.batch for micro in micro_batches]
        watch = Stopwatch(self._context.device)
        with watch.time("fetch_s"), self._context.agreed():
            values = self._loader.read_column("values", batches) if self._has_critic else None
        current.kl_loss_coef = kl_loss_coef
        inputs = self._advantage_inputs(current, kl_coef, values)
        advantages, returns = self._estimate(inputs, self._context.sum_over_ranks)
        for micro, rows in zip(micro_batches, split_rows(advantages, batches), strict=True):
            micro.advantages = rows
        if self._has_critic:
            with watch.time("write_s"), self._context.agreed():
                self._loader.write_column("returns", batches, split_rows(returns, batches))
        metrics = self._advantage_metrics(inputs, advantages, returns) | watch.seconds
        self._ledger.advance(StepStage.ADVANTAGES, metrics)
        return metrics

    def update_batch(self, step: int) -> UpdateResult:
        """Run the optimizer steps of this batch. Idempotent under step; the policy version grows by one if anything was applied.

        Raises: StateError: compute_advantages of this step has not run.
        """
        answer = self._ledger.recall(StepStage.UPDATED, step)
        if isinstance(answer, UpdateResult):
            return answer
        current = self._current()
        watch, tally = Stopwatch(self._context.device), Tally(self._context)

        def backward(micro: _ActorMicroBatch, counts: TrainedCounts) -> None:
            self._backward(micro, counts, current.has_graph, tally)

        outcomes = run_updates(
            split_like(current.micro_batches, current.mini_batches),
            backward,
            lambda micro: micro.batch.response_mask,
            epochs=self._algorithm.epochs,
            optimizer=self.optimizer,
            context=self._context,
            watch=watch,
        )
        metrics = current.metrics | self._update_metrics(tally, len(outcomes)) | outcome_metrics(outcomes, self.optimizer) | watch.seconds
        result = update_result(step, self.policy_version, outcomes, metrics)
        self.policy_version = result.policy_version
        self._ledger.advance(StepStage.UPDATED, result)
        self._step = None
        return result

    def score_tokens(self, sequences: Sequence[TokenSequence]) -> list[TokenScores]:
        """Score responses under the policy as it is; may come between any two commands of a step and changes none of them.

        Returns: one entry per sequence on rank 0, nothing on the others.
        Raises: InvalidRequestError: too many, too long, or an id outside the vocabulary.
        """
        limits = ScoringLimits(
            vocab_size=self._policy.vocab_size,
            max_tokens=self._config.data.max_prompt_tokens + self._config.rollout.max_new_tokens,
            pass_tokens=self._config.actor.micro_batch_tokens,
        )
        scores = score_sequences(self._policy, sequences, limits, self._context.device)
        # The passes of a kept graph must not be forgotten: their backward is still to come.
        if self._step is None or not self._step.has_graph:
            forget_passes(self._policy)
        return scores if self._context.rank == 0 else []

    @property
    def _has_critic(self) -> bool:
        return self._algorithm.has_critic

    def _current(self) -> _ActorStep:
        assert self._step is not None, "the ledger lets no command through without a forward"  # noqa: S101
        return self._step

    def _drop_step(self) -> None:
        self._ledger.drop()
        if self._step is not None:
            self._step = None
            forget_passes(self._policy)

    def _logprobs(self, model: PolicyModel, batch: MicroBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
        mask = batch.response_mask
        positions, token_ids = batch.positions_before(mask), batch.response_ids[mask]
        logprobs, entropies = model(batch.inputs, positions, token_ids, self._config.rollout.temperature, with_entropy)
        return batch.pad(logprobs, mask), batch.pad(entropies, mask)

    def _score(self, batch: MicroBatch) -> _ActorMicroBatch:
        logprobs, entropies = self._logprobs(self._policy, batch, with_entropy=True)
        old_logprobs = batch.rollout_logprobs if self._algorithm.old_logprobs == "rollout" else logprobs.detach()
        return _ActorMicroBatch(batch=batch, logprobs=logprobs, entropies=entropies, old_logprobs=old_logprobs)

    def _score_by_reference(self, micro_batches: Sequence[_ActorMicroBatch]) -> None:
        if self._reference is None:
            return
        with torch.no_grad():
            for micro in micro_batches:
                micro.ref_logprobs, _ = self._logprobs(self._reference, micro.batch, with_entropy=False)
        forget_passes(self._reference)

    def _advantage_inputs(self, current: _ActorStep, kl_coef: float, values: list[Tensor] | None) -> AdvantageInputs:
        batches = [micro.batch for micro in current.micro_batches]
        rewards = [self._rewards(micro, kl_coef) for micro in current.micro_batches]
        group_index, num_groups = self._groups(current.batch, batches)
        return AdvantageInputs(
            rewards=join_rows(rewards),
            response_mask=join_rows([batch.response_mask for batch in batches]),
            values=None if values is None else join_rows(values),
            group_index=group_index,
            num_groups=num_groups,
        )

    def _rewards(self, micro: _ActorMicroBatch, kl_coef: float) -> Tensor:
        rewards = select(micro.batch.rewards, micro.batch.response_mask)
        if not self._algorithm.kl_in_reward or micro.ref_logprobs is None:
            return rewards
        return rewards - kl_coef * token_kl(
            micro.old_logprobs, micro.ref_logprobs, micro.batch.response_mask, kl_estimator=self._algorithm.kl_estimator
        )

    def _groups(self, batch: Batch, batches: Sequence[MicroBatch]) -> tuple[Tensor | None, int]:
        """Number the groups of the whole batch, alike on every rank."""
        if "groups" not in self._algorithm.needs:
            return None, 0
        everywhere = (ref.group_id for rank in batch.ranks for mini in rank for micro in mini.micro_batches for ref in micro)
        numbers = {group_id: number for number, group_id in enumerate(sorted(set(everywhere)))}
        own = [numbers[group_id] for micro in batches for group_id in micro.group_ids]
        return torch.tensor(own, dtype=torch.int64, device=self._context.device), len(numbers)

    def _backward(self, micro: _ActorMicroBatch, counts: TrainedCounts, has_graph: bool, tally: Tally) -> None:
        batch, algorithm = micro.batch, self._algorithm
        assert micro.advantages is not None, "the ledger lets no update through without advantages"  # noqa: S101
        if has_graph:
            logprobs, entropies = micro.logprobs, micro.entropies
        else:
            logprobs, entropies = self._logprobs(self._policy, batch, with_entropy=algorithm.entropy_coef > 0)
        terms = self._loss(logprobs, micro.old_logprobs, micro.advantages, batch.response_mask)
        per_token = terms.per_token
        if algorithm.kl_in_loss and micro.ref_logprobs is not None:
            kl = token_kl(logprobs, micro.ref_logprobs, batch.response_mask, kl_estimator=algorithm.kl_loss_estimator)
            per_token = per_token + self._current().kl_loss_coef * kl
        if algorithm.entropy_coef > 0:
            per_token = per_token - algorithm.entropy_coef * entropies
        loss = aggregate(per_token, batch.response_mask, counts, loss_aggregation=algorithm.loss_aggregation)
        backward_over_ranks(loss, self._context)
        tally.add({**terms.sums, "loss": loss, "trained": batch.response_mask.sum()}, terms.maxima)

    def _forward_metrics(self, micro_batches: Sequence[_ActorMicroBatch]) -> dict[str, float]:
        tally = Tally(self._context)
        for micro in micro_batches:
            tally.add(*_score_sums(micro))
        sums, maxima = tally.reduce()
        num_tokens = sums.pop("num_tokens", 0.0)
        num_dropped = sums.pop("num_dropped", 0.0)
        means = {name: total / max(num_tokens, 1.0) for name, total in sums.items()}
        return {"num_tokens": num_tokens, "num_dropped": num_dropped, **means, **maxima}

    def _advantage_metrics(self, inputs: AdvantageInputs, advantages: Tensor, returns: Tensor) -> dict[str, float]:
        mask, total = inputs.response_mask, self._context.sum_over_ranks
        of_advantages, of_returns = masked_moments(advantages, mask, total), masked_moments(returns, mask, total)
        return {
            "advantage_mean": of_advantages.mean.item(),
            "advantage_std": of_advantages.variance().sqrt().item(),
            "return_mean": of_returns.mean.item(),
        }

    @staticmethod
    def _update_metrics(tally: Tally, num_steps: int) -> dict[str, float]:
        loss, means, maxima = tally.per_token(num_steps)
        return {"actor_loss": loss, "clip_fraction": 0.0, "ratio_max_deviation": 0.0, **means, **maxima}


def _score_sums(micro: _ActorMicroBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and maxima over the trained tokens of what a forward found."""
    batch, mask = micro.batch, micro.batch.response_mask
    logprobs = micro.logprobs.detach()
    gap = select(batch.rollout_logprobs - logprobs, mask).abs()
    sums = {
        "num_tokens": mask.sum(),
        "num_dropped": torch.tensor(float(batch.num_dropped), device=mask.device),
        "entropy": micro.entropies.detach().sum(),
        "logprob_mean_difference": gap.sum(),
    }
    if micro.ref_logprobs is not None:
        sums |= {"kl": k1(logprobs, micro.ref_logprobs).sum(), "kl_k3": k3(logprobs, micro.ref_logprobs).sum()}
    return sums, {"logprob_max_difference": gap.max() if gap.numel() else gap.new_zeros(())}
