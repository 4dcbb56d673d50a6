"""Sums, maxima and times of a command, reduced over the ranks once at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal_trainer.distributed import RankContext


class Tally:
    """Adds up named float64 scalars; every rank must use the same names."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor] | None = None) -> None:
        """Add sums and keep maxima of one micro-batch."""
        for name, value in sums.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in (maxima or {}).items():
            value = value.detach().double()
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def reduce(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return sums and maxima over all ranks."""
        return self._over_ranks(self._sums, self._context.sum_over_ranks), self._over_ranks(self._maxima, self._context.max_over_ranks)

    def per_token(self, num_steps: int) -> tuple[float, dict[str, float], dict[str, float]]:
        """Reduce what an update added: the sums `loss`, over its optimizer steps, and `trained`, tokens, with sums per token beside them.

        Returns: the mean loss of a step, the means per trained token, the maxima.
        """
        sums, maxima = self.reduce()
        num_trained = max(sums.pop("trained", 0.0), 1.0)
        loss = sums.pop("loss", 0.0) / max(num_steps, 1)
        return loss, {name: total / num_trained for name, total in sums.items()}, maxima

    @staticmethod
    def _over_ranks(local: Mapping[str, Tensor], reduction: object) -> dict[str, float]:
        if not local:
            return {}
        names = sorted(local)
        reduced = reduction(torch.stack([local[name] for name in names]))  # type: ignore[operator]
        return dict(zip(names, reduced.tolist(), strict=True))


class Stopwatch:
    """Seconds spent per part of a command, on this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the block's seconds to a name such as "forward_s"."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start_s
