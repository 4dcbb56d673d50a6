"""The model of the failure matrix: plain tensors whose values follow from the policy version alone.

So any process can say what a version must look like: ranks write it into their shards, tests compare it with what engines serve.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from shoal.types import Box, SinkRegion

Array = NDArray[np.float32]

SHAPES: dict[str, tuple[int, ...]] = {"embed": (75, 32), "layer.q": (24, 32), "layer.k": (9, 32), "norm": (32,), "head": (75, 32)}
FROZEN = "norm"
"""Does not change with the version, so that later pushes leave it out."""
PADDED_VOCAB = 80


def tensors_at(policy_version: int) -> dict[str, Array]:
    """The trainer's tensors at a version; version 0 is the checkpoint that engines load."""
    random = np.random.default_rng(11)
    base = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}
    return {name: tensor if name == FROZEN else tensor + np.float32(policy_version) for name, tensor in base.items()}


def engine_tensors(tensors: dict[str, Array]) -> dict[str, Array]:
    """The engine's parameters: q and k fused, the vocabulary padded."""
    padding = np.zeros((PADDED_VOCAB - SHAPES["embed"][0], 32), np.float32)
    return {
        "embed": np.concatenate([tensors["embed"], padding]),
        "qk": np.concatenate([tensors["layer.q"], tensors["layer.k"]]),
        "norm": tensors["norm"],
        "head": np.concatenate([tensors["head"], padding]),
    }


def fingerprints(parameters: dict[str, Array]) -> list[int]:
    """One number for each parameter; they fit into token ids."""
    return [xxhash.xxh3_64_intdigest(np.ascontiguousarray(parameters[name]).tobytes()) >> 34 for name in sorted(parameters)]


def fingerprints_at(policy_version: int) -> list[int]:
    """What an engine that serves exactly this version must answer."""
    return fingerprints(engine_tensors(tensors_at(policy_version)))


class PlainModel:
    """`SwapModel` over tensors of a dict: no engine behind it."""

    def __init__(self) -> None:
        self._live = {name: torch.from_numpy(tensor) for name, tensor in engine_tensors(tensors_at(0)).items()}
        self.parameters: tuple[tuple[str, tuple[int, ...], str], ...] = tuple(
            (name, tuple(tensor.shape), "float32") for name, tensor in self._live.items()
        )
        self.regions: tuple[SinkRegion, ...] = (
            region("embed", "embed", 0),
            region("qk", "layer.q", 0),
            region("qk", "layer.k", SHAPES["layer.q"][0]),
            region("norm", "norm", 0),
            region("head", "head", 0),
        )
        self.fail_after: int | None = None
        """Swaps of the next commit that work before one fails; a fault to be injected."""

    def prepare_swap(self, staged: Callable[[str], Tensor], changed: Collection[str]) -> Iterator[Callable[[], object] | None]:
        """Copy what is staged; each step answers the exchange of one parameter."""
        for name in sorted(changed):
            yield partial(self._set, name, staged(name).clone())

    def live(self, parameter: str) -> Tensor | None:
        """The values that are served."""
        return self._live[parameter]

    def spoil(self, parameter: str) -> None:
        """Serve a wrong value."""
        self._live[parameter] = self._live[parameter] * 2

    def fingerprints(self) -> list[int]:
        """Of what is served now."""
        return fingerprints({name: tensor.numpy() for name, tensor in self._live.items()})

    def _set(self, name: str, values: Tensor) -> object:
        if self.fail_after is not None:
            if self.fail_after == 0:
                raise RuntimeError("injected: the swap failed half way")
            self.fail_after -= 1
        replaced, self._live[name] = self._live[name], values
        return replaced


def region(parameter: str, source: str, row: int) -> SinkRegion:
    """A whole source tensor at a row of a parameter."""
    shape = SHAPES[source]
    start = (0,) * len(shape)
    return SinkRegion(
        parameter=parameter,
        source_name=source,
        source_box=Box(offsets=start, sizes=shape),
        parameter_box=Box(offsets=(row, *start[1:]), sizes=shape),
    )
