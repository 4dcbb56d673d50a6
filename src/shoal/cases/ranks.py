"""A function with one reduction over ranks, run for every rank of a gang in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shoal.algo.masking import SumOverRanks

Part = TypeVar("Part")
Result = TypeVar("Result")


class _Gather:
    """Keeps what a rank gives."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def __call__(self, local: Tensor) -> Tensor:
        self.given.append(local)
        return local


class _Total:
    """Answers with the sum over all ranks."""

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def __call__(self, local: Tensor) -> Tensor:
        return self._total


def on_every_rank(run: Callable[[Part, SumOverRanks], Result], parts: Sequence[Part]) -> list[Result]:
    """Return what each rank gets.

    Args:
        run: (this rank's part, sum over ranks) -> result; it must reduce exactly once.
        parts: of each rank, at least one.
    """
    gather = _Gather()
    for part in parts:
        run(part, gather)
    total = _Total(torch.stack(gather.given).sum(dim=0))
    return [run(part, total) for part in parts]
