"""Cuts a micro-batch into passes of similar length, so that less padding goes through the model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

MAX_WIDTHS = 32
"""Different widths that are looked at; longer ones are rounded up to a grid of so many."""

# A pass over no tokens costs what moving all parameters and gradients and launching the kernels costs. Counted in tokens, the first part
# is the same for all models, the second falls with their size. Estimates from forward, reference and backward passes.
_MOVE_TOKENS = {"cpu": 64.0, "cuda": 1000.0}
_LAUNCH_TOKENS_TIMES_PARAMETERS = {"cpu": 1e8, "cuda": 1e12}


def pass_overhead_tokens(num_parameters: int, device: torch.device) -> float:
    """Cost of one more pass, in tokens of an ordinary one."""
    return _MOVE_TOKENS[device.type] + _LAUNCH_TOKENS_TIMES_PARAMETERS[device.type] / max(num_parameters, 1)


def split_by_length(lengths: Sequence[int], overhead_tokens: float) -> list[list[int]]:
    """Split sequences into buckets with the least padded tokens plus overhead.

    Args:
        lengths: input positions of each sequence.
        overhead_tokens: cost of one more bucket.
    Returns: indices of each bucket, shortest sequences first; every index once. No bucket for no sequences.
    """
    if not lengths:
        return []
    grid = -(-max(lengths) // MAX_WIDTHS)
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    runs = [list(run) for _, run in itertools.groupby(order, key=lambda index: -(-lengths[index] // grid))]
    return [list(itertools.chain.from_iterable(runs[start:end])) for start, end in _cheapest_cuts(runs, lengths, overhead_tokens)]


def _cheapest_cuts(runs: Sequence[Sequence[int]], lengths: Sequence[int], overhead_tokens: float) -> list[tuple[int, int]]:
    """Ranges of runs, one per bucket. Dynamic programme: the cheapest way to cover the first `end` runs, for every end."""
    counts = [0, *itertools.accumulate(len(run) for run in runs)]
    costs, starts = [0.0], [0]
    for end in range(1, len(runs) + 1):
        width = lengths[runs[end - 1][-1]]
        options = [costs[start] + overhead_tokens + (counts[end] - counts[start]) * width for start in range(end)]
        starts.append(min(range(end), key=options.__getitem__))
        costs.append(options[starts[end]])
    cuts: list[tuple[int, int]] = []
    end = len(runs)
    while end > 0:
        cuts.append((starts[end], end))
        end = starts[end]
    return cuts[::-1]
