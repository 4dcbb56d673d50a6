"""What both roles share: when to keep the graph of the first forward, and the loop over optimizer steps.

With one optimizer step per batch the forward that gives the old log-probabilities (or values) is the same computation as the first
forward of the update. Its graph is kept then, and the update is a backward only: no second forward, and the ratio is exactly 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from shoal.algo.aggregation import TrainedCounts, count_trained
from shoal.config.algorithm import AlgorithmSection
from shoal.config.gang import GangSection
from shoal.telemetry.logs import get_logger
from shoal.types import Batch, UpdateResult
from shoal_trainer.batching import MicroBatch
from shoal_trainer.distributed import RankContext
from shoal_trainer.loading import BatchLoader, MiniBatches, flatten
from shoal_trainer.metrics import Stopwatch
from shoal_trainer.optimizer import Optimizer, StepOutcome

log = get_logger(__name__)

Item = TypeVar("Item")


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
) -> list[StepOutcome]:
    """Run every optimizer step of a batch.

    Args:
        mini_batches: one list of micro-batches per optimizer step of an epoch; as long on every rank.
        backward: computes the loss of one micro-batch, given the counts of its whole step, and its gradients.
        mask_of: [B, T] bool mask of a micro-batch's trained tokens.
        epochs: passes over the mini-batches.
        watch: gets backward_s (with the forward, where it is run again) and optimizer_s.
    Returns: one outcome per optimizer step; a step without a trained token is not applied and has norm 0.
    """
    outcomes = []
    for mini in (mini for _ in range(epochs) for mini in mini_batches):
        counts = count_trained([mask_of(item) for item in mini], context.sum_over_ranks)
        if counts.num_tokens == 0:
            outcomes.append(StepOutcome(applied=False, grad_norm=0.0, lr=optimizer.lr))
            continue
        with watch.time("backward_s"):
            for item in mini:
                backward(item, counts)
        with watch.time("optimizer_s"):
            outcomes.append(optimizer.step())
    return outcomes


def backward_over_ranks(loss: Tensor, context: RankContext) -> None:
    """Compute gradients of a loss, [], whose sum over the ranks is minimised."""
    # FSDP averages gradients over the ranks.
    (loss * context.world_size).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def update_result(step: int, policy_version: int, outcomes: Sequence[StepOutcome], metrics: dict[str, float]) -> UpdateResult:
    """What an update answers; the version grows by one if any optimizer step was applied, else a warning is logged.

    Args:
        policy_version: the one before the update.
        metrics: with num_tokens and grad_norm.
    """
    applied = any(outcome.applied for outcome in outcomes)
    if not applied:
        log.warning("update_skipped", step=step, num_tokens=metrics["num_tokens"], grad_norm=metrics["grad_norm"])
    return UpdateResult(policy_version=policy_version + int(applied), applied=applied, metrics=metrics)


def outcome_metrics(outcomes: Sequence[StepOutcome], optimizer: Optimizer) -> dict[str, float]:
    """Mean norm and last rate of a batch's optimizer steps, and how many were made and skipped."""
    norms = [outcome.grad_norm for outcome in outcomes]
    return {
        "grad_norm": sum(norms) / max(len(norms), 1),
        "lr": outcomes[-1].lr if outcomes else optimizer.lr,
        "num_updates": float(sum(outcome.applied for outcome in outcomes)),
        "num_updates_skipped": float(sum(not outcome.applied for outcome in outcomes)),
    }


def masks_of(micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
    """[B, T] masks of trained tokens, one per micro-batch."""
    return [micro.response_mask for micro in micro_batches]
