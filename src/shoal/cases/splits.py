"""Family of losses over ranks and micro-batches."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.algo.aggregation import LOSS_AGGREGATIONS, TrainedCounts, aggregate, count_trained
from shoal.cases.comparing import Claim, step_claim
from shoal.cases.family import Compute, Family
from shoal.cases.inputs import Inputs
from shoal.cases.ranks import on_every_rank
from shoal.errors import DataError

_NORMALISED = "seq_mean_token_sum_norm"
_BACKWARD = "backward_scalar_per_rank_and_microbatch_for_token_mean_when_dp_averages_gradients"


def _ranks(inputs: Inputs) -> list[list[tuple[Tensor, Tensor]]]:
    """[B, T] loss and mask of every micro-batch of every rank; a rank may have none."""
    ranks: list[list[tuple[Tensor, Tensor]]] = []
    given = inputs.items("ranks")
    if not given:
        raise DataError("inputs.ranks is empty; give a list of micro-batches for each rank")
    for number, micro_batches in enumerate(given):
        if not isinstance(micro_batches, list):
            raise DataError(f"inputs.ranks[{number}] is {micro_batches!r}; it must be a list of micro-batches")
        parts = [inputs.part(f"ranks[{number}][{i}]", item, required=("loss", "mask")) for i, item in enumerate(micro_batches)]
        ranks.append([(part.rows("loss"), part.mask()) for part in parts])
    return ranks


def _counts(ranks: list[list[tuple[Tensor, Tensor]]]) -> TrainedCounts:
    """Counts as every rank gets them: its own masks, and the sum over all ranks."""
    masks = [[mask for _, mask in rank] or [torch.zeros(0, 1, dtype=torch.bool)] for rank in ranks]
    return on_every_rank(count_trained, masks)[0]


def _parts(inputs: Inputs, ranks: list[list[tuple[Tensor, Tensor]]], loss_aggregation: str) -> list[list[Tensor]]:
    """Each micro-batch's part of the step's loss."""
    counts = _counts(ranks)
    norm_length = inputs.number("norm_length") if inputs.has("norm_length") else None
    return [
        [aggregate(loss, mask, counts, loss_aggregation=loss_aggregation, norm_length=norm_length) for loss, mask in rank] for rank in ranks
    ]


def _total(parts: list[list[Tensor]]) -> Tensor:
    return torch.stack([part for rank in parts for part in rank] or [torch.zeros(())]).sum()


def _aggregated(loss_aggregation: str) -> Compute:
    return lambda inputs: _total(_parts(inputs, _ranks(inputs), loss_aggregation))


def _backward_scalars(inputs: Inputs) -> list[list[float]]:
    """What each rank calls backward on where the framework averages gradients over ranks."""
    ranks = _ranks(inputs)
    return [[float(part) * len(ranks) for part in rank] for rank in _parts(inputs, ranks, "token_mean")]


def _gradients(inputs: Inputs) -> Claim:
    """Of every aggregation by every per-token loss."""

    def check(sentence: str) -> str | None:
        if re.fullmatch(r"all exactly 0([ ,;].*)?\.?", sentence.strip().lower()) is None:
            raise DataError(f"{sentence!r} is no known sentence; known is 'all exactly 0'")
        names = [name for name in LOSS_AGGREGATIONS if name != _NORMALISED or inputs.has("norm_length")]
        largest = max(_largest_gradient(inputs, name) for name in names)
        return None if largest == 0 else f"a gradient of size {largest:g}"

    return Claim(check)


def _largest_gradient(inputs: Inputs, loss_aggregation: str) -> float:
    ranks = _ranks(inputs)
    leaves = [loss.requires_grad_() for rank in ranks for loss, _ in rank]
    total = _total(_parts(inputs, ranks, loss_aggregation))
    gradients = torch.autograd.grad(total, leaves) if leaves else ()
    # NaN is not equal to 0 and must not pass as it.
    return max((float(gradient.abs().nan_to_num(torch.inf).max()) for gradient in gradients if gradient.numel()), default=0.0)


def _optimizer_step(inputs: Inputs) -> Claim:
    """A step without a trained token is skipped by every rank."""
    return step_claim(is_skipped=_counts(_ranks(inputs)).num_tokens == 0)


def _count(read: Callable[[TrainedCounts], float]) -> Compute:
    return lambda inputs: read(_counts(_ranks(inputs)))


LOSS_AGGREGATION = Family(
    required=("ranks",),
    optional=("norm_length",),
    outputs={
        **{name: _aggregated(name) for name in LOSS_AGGREGATIONS},
        "valid_tokens": _count(lambda counts: counts.num_tokens),
        "valid_sequences": _count(lambda counts: counts.num_sequences),
        _BACKWARD: _backward_scalars,
        "gradients": _gradients,
        "optimizer_step": _optimizer_step,
    },
)
