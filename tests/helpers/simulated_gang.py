"""A gang of ranks as threads of this process: every rank runs the same function and meets the others in each reduction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from shoal.algo.masking import SumOverRanks

Part = TypeVar("Part")
Result = TypeVar("Result")


class SimulatedGang:
    """Sums over ranks that are threads. A rank that misses a reduction breaks the barrier of all."""

    def __init__(self, num_ranks: int, *, timeout_s: float = 20.0) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=timeout_s)
        self._locals: list[Tensor | None] = [None] * num_ranks
        self.num_reductions = 0

    def sum_over_ranks(self, rank: int) -> SumOverRanks:
        """Return `SumOverRanks` of one rank."""

        def reduce(local: Tensor) -> Tensor:
            self._locals[rank] = local
            if self._barrier.wait() == 0:
                self.num_reductions += 1
            given = [tensor for tensor in self._locals if tensor is not None]
            assert len({tensor.shape for tensor in given}) == 1, "ranks reduce tensors of different shapes"
            total = sum(given[1:], given[0].clone())
            # No rank may write its next tensor before all have read this one.
            self._barrier.wait()
            return total

        return reduce

    def abort(self) -> None:
        """Wake the ranks that wait, since one has failed."""
        self._barrier.abort()


def run_gang(parts: Sequence[Part], function: Callable[[Part, SumOverRanks], Result]) -> list[Result]:
    """Run the function on each part as one rank of a gang; the results in the order of the parts."""
    gang = SimulatedGang(len(parts))

    def one(rank: int) -> Result:
        try:
            return function(parts[rank], gang.sum_over_ranks(rank))
        except BaseException:
            gang.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        results = list(pool.map(one, range(len(parts))))
    assert gang.num_reductions, "nothing was reduced over the ranks"
    return results
