"""Engine workers whose model is a few plain tensors; everything else of their end of a push is real."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import msgspec
import torch
from shoal_rollout.engine import worker_values
from shoal_rollout.engine_worker import EngineWorker
from shoal_rollout.worker_layout import Plain
from shoal_rollout.worker_sink import Apply, WorkerSink
from torch import Tensor

from shoal.types import SinkRegion
from shoal.weights import boxes


class PlainModel:
    """A model that computes with whole checkpoint tensors, and records which were exchanged.

    Args:
        shapes: Parameter names, which are the checkpoint's too, and their shapes.
        unreadable: Parameters whose live values the engine does not show.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, dtype: str = "float32", unreadable: Collection[str] = ()) -> None:
        self.parameters = tuple((name, shape, dtype) for name, shape in shapes.items())
        self.regions = tuple(
            SinkRegion(parameter=name, source_name=name, source_box=boxes.whole(shape), parameter_box=boxes.whole(shape))
            for name, shape in shapes.items()
        )
        self.weights = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape in shapes.items()}
        self.prepared: list[frozenset[str]] = []
        self._unreadable = unreadable

    def prepare_swap(self, staged: Callable[[str], Tensor], changed: Collection[str]) -> Iterator[Apply | None]:
        """Copy what changed, one parameter a step."""
        self.prepared.append(frozenset(changed))
        for name in sorted(changed):
            yield partial(self.weights.__setitem__, name, staged(name).clone())

    def live(self, parameter: str) -> Tensor | None:
        """What the model computes with."""
        return None if parameter in self._unreadable else self.weights[parameter]


class PlainWorkers:
    """Answers `collective_rpc` as vLLM's workers would, data through its message format."""

    def __init__(self, models: list[PlainModel]) -> None:
        self.workers = [_worker(rank, model) for rank, model in enumerate(models)]

    def call(self, method: str, *args: Plain) -> list[Plain]:
        """Call a method of every worker; raises what a worker raised."""
        sent = _through_msgpack(list(args))
        answers = [getattr(worker, method)(*sent) for worker in self.workers]
        return worker_values(_through_msgpack(answers))


def _worker(rank: int, model: PlainModel) -> EngineWorker:
    worker = EngineWorker()
    worker.rank = rank
    worker.shoal_sink = WorkerSink(model, rank, "cpu")
    return worker


def _through_msgpack(value: Plain) -> Plain:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
