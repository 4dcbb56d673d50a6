"""The actor on one rank: log-probabilities, advantages, policy updates.

Legend: B records of a micro-batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.algo.aggregation import TrainedCounts
from shoal.algo.masking import select
from shoal.algo.registry import advantage_estimator
from shoal.config.models import RunConfig
from shoal.telemetry.logs import get_logger
from shoal.types import Batch, TokenScores, TokenSequence, TrainerRole, UpdateResult
from shoal_trainer.actor_batch import ActorMicroBatch, ActorStep
from shoal_trainer.actor_losses import PolicyObjective
from shoal_trainer.actor_metrics import forward_metrics
from shoal_trainer.actor_rewards import RewardBuilder
from shoal_trainer.batching import MicroBatch, build_micro_batch
from shoal_trainer.distributed import RankContext
from shoal_trainer.loading import BatchLoader, flatten
from shoal_trainer.lora import AdaptersOff
from shoal_trainer.metrics import Stopwatch, Tally
from shoal_trainer.models import PolicyModel, forget_passes
from shoal_trainer.optimizer import Optimizer
from shoal_trainer.passes import backward_over_ranks, graph, keeps_graph, read_mini_batches, run_updates, split_like, update_result
from shoal_trainer.quantiles import ratio_quantiles
from shoal_trainer.rows import split_rows
from shoal_trainer.scoring import ScoringLimits, score_sequences
from shoal_trainer.step_ledger import StepLedger, StepStage

log = get_logger(__name__)


class Actor:
    """One rank of the actor gang. Not for use from several threads."""

    role = TrainerRole.ACTOR

    def __init__(
        self,
        config: RunConfig,
        context: RankContext,
        policy: PolicyModel,
        reference: PolicyModel | AdaptersOff | None,
        loader: BatchLoader,
    ) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._context = context
        self._policy = policy
        self._reference = reference
        self._loader = loader
        self._objective = PolicyObjective(config)
        self._rewards = RewardBuilder(config, context)
        self._estimate = advantage_estimator(config.algorithm)
        self._ledger: StepLedger[dict[str, float] | UpdateResult] = StepLedger(self.role)
        self._step: ActorStep | None = None
        self.optimizer = Optimizer(policy.parameters(), config.actor, context, planned_updates=config.planned_actor_updates)
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
        metrics = forward_metrics(micro_batches, self._objective, self._algorithm, self._context) | watch.seconds
        self._step = ActorStep(batch=batch, mini_batches=mini_batches, micro_batches=micro_batches, has_graph=has_graph, metrics=metrics)
        self._ledger.begin(batch, metrics)
        return metrics

    def compute_advantages(self, step: int, kl_coef: float, kl_loss_coef: float) -> dict[str, float]:
        """Turn rewards, KL and values into advantages and write the column `returns`. Idempotent under step.

        Args:
            kl_coef: weight of the KL penalty in the reward, if it enters there.
            kl_loss_coef: weight of the KL in the loss of this step's update, if it enters there.
        Raises: StateError: forward_batch of this step has not run. NotFoundError: a record has no column of the critic yet.
        """
        answer = self._ledger.recall(StepStage.ADVANTAGES, step)
        if isinstance(answer, dict):
            return answer
        current = self._current()
        current.kl_loss_coef = kl_loss_coef
        watch = Stopwatch(self._context.device)
        with watch.time("fetch_s"), self._context.agreed():
            values, bootstrap_values = self._read_values(current.batches)
        rewards = self._rewards.build(current, kl_coef, values, bootstrap_values)
        advantages, returns = self._estimate(rewards.inputs, self._context.sum_over_ranks)
        for micro, rows in zip(current.micro_batches, split_rows(advantages, current.batches), strict=True):
            micro.advantages = rows
        if self._algorithm.has_critic:
            with watch.time("write_s"), self._context.agreed():
                self._loader.write_column("returns", current.batches, split_rows(returns, current.batches))
        metrics = self._rewards.metrics(rewards, advantages, returns) | watch.seconds
        self._warn_without_spread(step, metrics)
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
        log_ratios: list[Tensor] = []

        def backward(micro: ActorMicroBatch, counts: TrainedCounts) -> None:
            log_ratios.append(self._backward(micro, counts, current, tally))

        updates = run_updates(
            split_like(current.micro_batches, current.mini_batches),
            backward,
            lambda micro: micro.loss_mask,
            epochs=self._algorithm.epochs,
            optimizer=self.optimizer,
            context=self._context,
            watch=watch,
        )
        loss, means, maxima = tally.per_token(updates.num_steps)
        metrics = current.metrics | {"actor_loss": loss} | means | maxima | self._ratio_metrics(log_ratios, current)
        result = update_result(step, self.policy_version, updates, metrics | watch.seconds, self._context)
        if updates.num_without_tokens and current.has_graph:
            forget_passes(self._policy)
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

    def _current(self) -> ActorStep:
        assert self._step is not None, "the ledger lets no command through without a forward"  # noqa: S101
        return self._step

    def _drop_step(self) -> None:
        self._ledger.drop()
        if self._step is not None:
            self._step = None
            forget_passes(self._policy)

    def _logprobs(self, model: PolicyModel | AdaptersOff, batch: MicroBatch, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
        mask = batch.response_mask
        positions, token_ids = batch.positions_before(mask), batch.response_ids[mask]
        logprobs, entropies = model(batch.inputs, positions, token_ids, self._config.rollout.temperature, with_entropy)
        return batch.pad(logprobs, mask), batch.pad(entropies, mask)

    def _score(self, batch: MicroBatch) -> ActorMicroBatch:
        logprobs, entropies = self._logprobs(self._policy, batch, with_entropy=True)
        micro = ActorMicroBatch(
            batch=batch,
            loss_mask=batch.loss_mask(mask_truncated=self._algorithm.mask_truncated),
            logprobs=logprobs,
            entropies=entropies,
            old_logprobs=batch.rollout_logprobs if self._algorithm.old_logprobs == "rollout" else logprobs.detach(),
        )
        self._objective.correct(micro)
        return micro

    def _score_by_reference(self, micro_batches: Sequence[ActorMicroBatch]) -> None:
        if self._reference is None:
            return
        with torch.no_grad():
            for micro in micro_batches:
                micro.ref_logprobs, _ = self._logprobs(self._reference, micro.batch, with_entropy=False)
        forget_passes(self._reference)

    def _read_values(self, batches: Sequence[MicroBatch]) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """What the critic has written: values, and those after truncated responses."""
        if not self._algorithm.has_critic:
            return None, None
        values = self._loader.read_column("values", batches)
        return values, self._loader.read_scalars("bootstrap_values", batches) if self._algorithm.bootstrap_truncated else None

    def _backward(self, micro: ActorMicroBatch, counts: TrainedCounts, current: ActorStep, tally: Tally) -> Tensor:
        """Compute the gradients of a micro-batch; returns the log-ratios to the old policy, [N]."""
        if current.has_graph:
            logprobs, entropies = micro.logprobs, micro.entropies
        else:
            logprobs, entropies = self._logprobs(self._policy, micro.batch, with_entropy=self._objective.needs_entropy)
        loss, terms = self._objective.loss(micro, logprobs, entropies, counts, current.kl_loss_coef)
        backward_over_ranks(loss, self._context)
        tally.add({**terms.sums, "loss": loss, "trained": micro.loss_mask.sum()}, terms.maxima)
        return select(logprobs.detach() - micro.old_logprobs, micro.loss_mask)[micro.loss_mask]

    def _ratio_metrics(self, log_ratios: Sequence[Tensor], current: ActorStep) -> dict[str, float]:
        """Quantiles of the ratio, and how far from 1 it was in the first optimizer step, when the data were fresh."""
        first = torch.cat([torch.zeros(1, device=self._context.device), *log_ratios[: len(current.mini_batches[0])]])
        deviation = self._context.max_over_ranks(torch.expm1(first.double()).abs().max())
        return {"ratio_first_deviation": deviation.item()} | ratio_quantiles("ratio", log_ratios, self._context)

    def _warn_without_spread(self, step: int, metrics: dict[str, float]) -> None:
        if "groups" in self._algorithm.needs and metrics.get("frac_zero_std") == 1.0 and self._context.rank == 0:
            log.warning("no_reward_spread", step=step, estimator=str(self._algorithm.estimator), kl_in=self._algorithm.kl_in)
