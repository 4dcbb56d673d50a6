"""The critic on one rank: values and value updates.

Legend: B records of a micro-batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.algo.aggregation import TrainedCounts, aggregate
from shoal.algo.masking import masked_moments
from shoal.algo.registry import value_loss
from shoal.config.models import RunConfig
from shoal.errors import InvalidRequestError, NotFoundError, StateError
from shoal.types import Batch, TrainerRole, UpdateResult
from shoal_trainer.batching import MicroBatch, build_micro_batch
from shoal_trainer.distributed import RankContext
from shoal_trainer.loading import BatchLoader, MiniBatches, flatten
from shoal_trainer.metrics import Stopwatch, Tally
from shoal_trainer.models import ValueModel, forget_passes
from shoal_trainer.optimizer import Optimizer
from shoal_trainer.passes import (
    backward_over_ranks,
    graph,
    keeps_graph,
    loss_norm_length,
    read_mini_batches,
    run_updates,
    split_like,
    update_result,
)
from shoal_trainer.rows import join_rows
from shoal_trainer.step_ledger import StepLedger, StepStage


@dataclass(slots=True, kw_only=True)
class _CriticMicroBatch:
    """A micro-batch and what was computed for it.

    loss_mask: [B, T] bool, tokens whose loss counts.
    values: [B, T]; with a graph only if it is kept.
    bootstrap_values: [B] after the last token of truncated responses, 0 of others; without a graph.
    returns: [B, T]; None until the actor has written them.
    """

    batch: MicroBatch
    loss_mask: Tensor
    values: Tensor
    bootstrap_values: Tensor
    returns: Tensor | None = None

    @property
    def old_values(self) -> Tensor:
        """The values of the forward, without their graph."""
        return self.values.detach()


@dataclass(slots=True, kw_only=True)
class _CriticStep:
    mini_batches: MiniBatches
    micro_batches: list[_CriticMicroBatch]
    has_graph: bool
    metrics: dict[str, float] = field(default_factory=dict)


class Critic:
    """One rank of the critic gang. Not for use from several threads."""

    role = TrainerRole.CRITIC
    has_reference = False

    def __init__(self, config: RunConfig, context: RankContext, model: ValueModel, loader: BatchLoader) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._context = context
        self._model = model
        self._loader = loader
        self._loss = value_loss(config.algorithm)
        self._norm_length = loss_norm_length(config)
        self._ledger: StepLedger[dict[str, float] | UpdateResult] = StepLedger(self.role)
        self._step: _CriticStep | None = None
        self.optimizer = Optimizer(model.parameters(), config.critic, context, planned_updates=config.planned_updates)
        self.policy_version = 0

    @property
    def module(self) -> ValueModel:
        """The trained value model."""
        return self._model

    def warm_up(self) -> None:
        """Run a dummy pass on every rank, so that the first step does not pay for what torch sets up on first use."""
        dummy = build_micro_batch((), (), vocab_size=1).to(self._context.device)
        self._values(dummy).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.optimizer.warm_up()

    def forward_batch(self, batch: Batch) -> dict[str, float]:
        """Compute values and write the column `values`, and `bootstrap_values` if asked for. Idempotent under the batch's step.

        Raises: StateError: the step is over. Errors of reading or writing the records.
        """
        answer = self._ledger.recall_forward(batch)
        if isinstance(answer, dict):
            return answer
        self._drop_step()
        watch = Stopwatch(self._context.device)
        mini_batches = read_mini_batches(self._loader, batch, self._context, watch)
        has_graph = keeps_graph(mini_batches, self._algorithm, self._config.critic, self._context)
        with watch.time("forward_s"), graph(has_graph):
            micro_batches = [self._estimate(micro) for micro in flatten(mini_batches)]
        with watch.time("write_s"), self._context.agreed():
            self._write_values(micro_batches)
        metrics = self._forward_metrics(micro_batches) | watch.seconds
        self._step = _CriticStep(mini_batches=mini_batches, micro_batches=micro_batches, has_graph=has_graph, metrics=metrics)
        self._ledger.begin(batch, metrics)
        return metrics

    def compute_advantages(self, step: int, kl_coef: float, kl_loss_coef: float) -> dict[str, float]:
        """Refused: the actor computes advantages."""
        raise InvalidRequestError(f"compute_advantages of step {step} was sent to the critic; send it to the actor")

    def update_batch(self, step: int) -> UpdateResult:
        """Fit the values to the column `returns`. Idempotent under step.

        Raises: StateError: forward_batch of this step has not run, or the actor has not written `returns`.
        """
        answer = self._ledger.recall(StepStage.UPDATED, step)
        if isinstance(answer, UpdateResult):
            return answer
        current = self._step
        assert current is not None, "the ledger lets no update through without a forward"  # noqa: S101
        watch, tally = Stopwatch(self._context.device), Tally(self._context)
        with watch.time("fetch_s"), self._context.agreed():
            self._read_returns(current.micro_batches, step)

        def backward(micro: _CriticMicroBatch, counts: TrainedCounts) -> None:
            self._backward(micro, counts, current.has_graph, tally)

        updates = run_updates(
            split_like(current.micro_batches, current.mini_batches),
            backward,
            lambda micro: micro.loss_mask,
            epochs=self._algorithm.epochs,
            optimizer=self.optimizer,
            context=self._context,
            watch=watch,
        )
        metrics = current.metrics | self._update_metrics(tally, updates.num_steps) | self._explained(current.micro_batches)
        result = update_result(step, self.policy_version, updates, metrics | watch.seconds, self._context)
        if updates.num_without_tokens and current.has_graph:
            forget_passes(self._model)
        self.policy_version = result.policy_version
        self._ledger.advance(StepStage.UPDATED, result)
        self._step = None
        return result

    def _drop_step(self) -> None:
        self._ledger.drop()
        if self._step is not None:
            self._step = None
            forget_passes(self._model)

    def _values(self, batch: MicroBatch) -> Tensor:
        mask = batch.response_mask
        return batch.pad(self._model(batch.inputs, batch.positions_before(mask)), mask)

    def _estimate(self, batch: MicroBatch) -> _CriticMicroBatch:
        """Values before each trained token and, if asked for, after the last token of truncated responses, in one pass."""
        mask, cut = batch.response_mask, batch.truncated
        positions = batch.positions_before(mask)
        if not self._algorithm.bootstrap_truncated:
            cut = torch.zeros_like(cut)
        ends = batch.positions_of_last(cut)
        values, bootstrap_values = self._model(batch.inputs, torch.cat((positions, ends))).split([len(positions), len(ends)])
        return _CriticMicroBatch(
            batch=batch,
            loss_mask=batch.loss_mask(mask_truncated=self._algorithm.mask_truncated),
            values=batch.pad(values, mask),
            bootstrap_values=batch.pad(bootstrap_values.detach(), cut),
        )

    def _write_values(self, micro_batches: Sequence[_CriticMicroBatch]) -> None:
        batches = [micro.batch for micro in micro_batches]
        self._loader.write_column("values", batches, [micro.values for micro in micro_batches])
        if self._algorithm.bootstrap_truncated:
            self._loader.write_scalars("bootstrap_values", batches, [micro.bootstrap_values for micro in micro_batches])

    def _read_returns(self, micro_batches: Sequence[_CriticMicroBatch], step: int) -> None:
        try:
            returns = self._loader.read_column("returns", [micro.batch for micro in micro_batches])
        except NotFoundError as error:
            raise StateError(f"update_batch of step {step}: {error}; run the actor's compute_advantages first") from error
        for micro, column in zip(micro_batches, returns, strict=True):
            micro.returns = column

    def _backward(self, micro: _CriticMicroBatch, counts: TrainedCounts, has_graph: bool, tally: Tally) -> None:
        assert micro.returns is not None, "read before the first backward"  # noqa: S101
        mask = micro.loss_mask
        values = micro.values if has_graph else self._values(micro.batch)
        terms = self._loss(values, micro.old_values, micro.returns, mask)
        loss = aggregate(terms.per_token, mask, counts, loss_aggregation=self._algorithm.loss_aggregation, norm_length=self._norm_length)
        backward_over_ranks(loss, self._context)
        tally.add({**terms.sums, "loss": loss, "trained": mask.sum()}, terms.maxima)

    def _forward_metrics(self, micro_batches: Sequence[_CriticMicroBatch]) -> dict[str, float]:
        tally = Tally(self._context)
        for micro in micro_batches:
            num_dropped = torch.tensor(float(micro.batch.num_dropped), device=self._context.device)
            tally.add({"num_tokens": micro.batch.response_mask.sum(), "num_dropped": num_dropped, "value_mean": micro.old_values.sum()})
        sums, _ = tally.reduce()
        sums["value_mean"] = sums.get("value_mean", 0.0) / max(sums.get("num_tokens", 0.0), 1.0)
        return sums

    def _explained(self, micro_batches: Sequence[_CriticMicroBatch]) -> dict[str, float]:
        """Share of the returns' variance that the values of the forward explained; 0 for returns without spread."""
        mask = join_rows([micro.batch.response_mask for micro in micro_batches])
        returns = join_rows([micro.old_values if micro.returns is None else micro.returns for micro in micro_batches])
        values = join_rows([micro.old_values for micro in micro_batches])
        spread = masked_moments(returns, mask, self._context.sum_over_ranks).variance().item()
        rest = masked_moments(returns - values, mask, self._context.sum_over_ranks).variance().item()
        return {"explained_variance": 1.0 - rest / spread if spread > 0 else 0.0}

    @staticmethod
    def _update_metrics(tally: Tally, num_steps: int) -> dict[str, float]:
        loss, means, maxima = tally.per_token(num_steps)
        means = {f"{name}_mean" if name == "return" else name: mean for name, mean in means.items() if name != "value"}
        return {"critic_loss": loss, **means, **maxima}
