"""What both roles share: when to keep the graph of the first forward, and the loop over optimizer steps.

With one optimizer step per batch the forward that gives the old log-probabilities (or values) is the same computation as the first
forward of the update. Its graph is kept then, and the update is a backward only: no second forward, and the ratio is exactly 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from shoal.algo.aggregation import TrainedCounts, count_trained
from shoal.config.algorithm import AlgorithmSection
from shoal.config.gang import GangSection
from shoal.config.models import RunConfig
from shoal.telemetry.logs import get_logger
from shoal.types import Batch, UpdateResult
from shoal_trainer.distributed import RankContext
from shoal_trainer.loading import BatchLoader, MiniBatches, flatten
from shoal_trainer.metrics import Stopwatch
from shoal_trainer.optimizer import Optimizer, StepOutcome

log = get_logger(__name__)

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """The optimizer steps of a batch.

    outcomes: of those that had a trained token. num_without_tokens: the others; they are not made. lr: rate of the last, or of the next.
    """

    outcomes: tuple[StepOutcome, ...]
    num_without_tokens: int
    lr: float

    @property
    def num_steps(self) -> int:
        """Optimizer steps that were asked for."""
        return len(self.outcomes) + self.num_without_tokens

    @property
    def num_applied(self) -> int:
        """Optimizer steps that changed parameters."""
        return sum(outcome.applied for outcome in self.outcomes)

    def metrics(self) -> dict[str, float]:
        """Mean norm (0 where nothing was trained), rate, and steps that were made and skipped."""
        return {
            "grad_norm": sum(outcome.grad_norm for outcome in self.outcomes) / max(self.num_steps, 1),
            "lr": self.lr,
            "num_updates": float(self.num_applied),
            "num_updates_skipped": float(self.num_steps - self.num_applied),
        }

    def why_skipped(self) -> str:
        """Why steps were skipped: the worst reason."""
        if any(not math.isfinite(outcome.grad_norm) for outcome in self.outcomes):
            return "gradient_not_finite"
        return "no_trained_token" if self.num_without_tokens else "gradient_zero"


def keeps_graph(mini_batches: MiniBatches, algorithm: AlgorithmSection, gang: GangSection, context: RankContext) -> bool:
    """True if the graphs of this batch are kept; decided by the fullest rank, since all must run the same passes."""
    own_tokens = sum(micro.num_padded_tokens for micro in flatten(mini_batches))
    most_tokens = context.max_over_ranks(torch.tensor([float(own_tokens)], device=context.device)).item()
    return algorithm.epochs * len(mini_batches) == 1 and most_tokens <= gang.retain_graph_tokens


def read_mini_batches(loader: BatchLoader, batch: Batch, context: RankContext, watch: Stopwatch) -> MiniBatches:
    """Fetch this rank's records and pad them; all ranks fail together.

    Args:
        watch: gets fetch_s and pad_s.
    Raises: errors of reading the records.
    """
    with watch.time("fetch_s"), context.agreed():
        loaded = loader.load(batch)
    with watch.time("pad_s"):
        return loader.pad(loaded)


@contextmanager
def graph(keep: bool) -> Iterator[None]:
    """Record gradients only if the graph is kept."""
    with torch.set_grad_enabled(keep):
        yield


def split_like(items: Sequence[Item], mini_batches: MiniBatches) -> list[list[Item]]:
    """Cut one item per micro-batch into mini-batches again."""
    rest = iter(items)
    return [[next(rest) for _ in mini] for mini in mini_batches]


def run_updates(
    mini_batches: Sequence[Sequence[Item]],
    backward: Callable[[Item, TrainedCounts], None],
    mask_of: Callable[[Item], Tensor],
    *,
    epochs: int,
    optimizer: Optimizer,
    context: RankContext,
    watch: Stopwatch,
) -> Updates:
    """Run every optimizer step of a batch.

    Args:
        mini_batches: one list of micro-batches per optimizer step of an epoch; as long on every rank.
        backward: computes the loss of one micro-batch, given the counts of its whole step, and its gradients.
        mask_of: [B, T] bool mask of the tokens whose loss counts.
        epochs: passes over the mini-batches.
        watch: gets backward_s (with the forward, where it is run again) and optimizer_s.
    """
    outcomes: list[StepOutcome] = []
    num_without_tokens = 0
    for mini in (mini for _ in range(epochs) for mini in mini_batches):
        counts = count_trained([mask_of(item) for item in mini], context.sum_over_ranks)
        if counts.num_tokens == 0:
            num_without_tokens += 1
            continue
        with watch.time("backward_s"):
            for item in mini:
                backward(item, counts)
        with watch.time("optimizer_s"):
            outcomes.append(optimizer.step())
    lr = outcomes[-1].lr if outcomes else optimizer.lr
    return Updates(outcomes=tuple(outcomes), num_without_tokens=num_without_tokens, lr=lr)


def backward_over_ranks(loss: Tensor, context: RankContext) -> None:
    """Compute gradients of a loss, [], whose sum over the ranks is minimised."""
    # FSDP averages gradients over the ranks.
    (loss * context.world_size).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def loss_norm_length(config: RunConfig) -> float:
    """Constant divisor of seq_mean_token_sum_norm, in tokens."""
    length = config.algorithm.loss_norm_length
    return float(config.rollout.max_new_tokens if length is None else length)


def update_result(step: int, policy_version: int, updates: Updates, metrics: dict[str, float], context: RankContext) -> UpdateResult:
    """What an update answers; the version grows by one if any optimizer step was applied. Skipped steps are logged once.

    Args:
        policy_version: the one before the update.
        metrics: of the command; those of the updates are added.
    """
    num_skipped = updates.num_steps - updates.num_applied
    if num_skipped and context.rank == 0:
        log.warning("update_skipped", step=step, reason=updates.why_skipped(), num_skipped=num_skipped, num_updates=updates.num_applied)
    applied = updates.num_applied > 0
    return UpdateResult(policy_version=policy_version + int(applied), applied=applied, metrics=metrics | updates.metrics())
