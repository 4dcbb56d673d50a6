"""A rollout server without vLLM for the push benchmark: real sink, staging, digests and swap around parameters that nothing computes with.

The workers' layout is derived from the model's shape. All workers live in this process, one after another, so with several of them VERIFY
takes longer than in an engine.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import torch
from shoal_rollout.engine import worker_values
from shoal_rollout.engine_worker import EngineWorker
from shoal_rollout.weight_sink import WeightSink
from shoal_rollout.weight_sink_servicer import SERVICE_NAME, WeightSinkServicer
from shoal_rollout.worker_layout import Plain
from shoal_rollout.worker_sink import WorkerSink
from torch import Tensor

from shoal.cli.plan_shapes import shape_of_model
from shoal.config.load import load_config
from shoal.config.models import RunConfig
from shoal.process import die_with_parent
from shoal.rpc.channel import join_address
from shoal.rpc.server import RpcServer, serve_until_signal
from shoal.service_arguments import add_service_arguments
from shoal.telemetry.logs import setup_logging
from shoal.types.weights import InflightMode, SinkWorkerLayout
from shoal.weights.llama_layouts import engine_layout
from shoal.weights.staging_names import server_staging


class ScriptedModel:
    """`SwapModel` over plain tensors: new values are copied while staging, a commit sets references."""

    def __init__(self, layout: SinkWorkerLayout) -> None:
        self.parameters = tuple((parameter.name, parameter.shape, parameter.dtype) for parameter in layout.parameters)
        self.regions = layout.regions
        self._values = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in self.parameters}

    def prepare_swap(self, staged: Callable[[str], Tensor], changed: Collection[str]) -> Iterator[Callable[[], object] | None]:
        """See `SwapModel.prepare_swap`."""
        for name in sorted(changed):
            yield partial(self._swap, name, staged(name).clone())

    def live(self, parameter: str) -> Tensor | None:
        """See `SwapModel.live`."""
        return self._values[parameter]

    def _swap(self, name: str, values: Tensor) -> object:
        replaced, self._values[name] = self._values[name], values
        return replaced


class ScriptedWorker(EngineWorker):
    """An engine worker with a scripted model."""

    def __init__(self, layout: SinkWorkerLayout) -> None:
        self.rank = layout.worker_rank
        self.shoal_sink = WorkerSink(ScriptedModel(layout), layout.worker_rank, "cpu")

    def shoal_discover(self, folder: str) -> Plain:
        """The layout is known."""
        return ["ok", ["copies", ""]]


class ScriptedEngine:
    """`SwappableEngine` that has nothing to pause."""

    def __init__(self, workers: list[ScriptedWorker]) -> None:
        self._workers = workers

    async def call_workers(self, method: str, *args: Plain) -> list[Plain]:
        """See `SwappableEngine.call_workers`."""
        return worker_values(await asyncio.to_thread(lambda: [getattr(worker, method)(*args) for worker in self._workers]))

    async def pause(self, inflight: InflightMode, timeout_s: float) -> int:
        """See `SwappableEngine.pause`."""
        return 0

    async def finish_swap(self, version: str) -> None:
        """See `SwappableEngine.finish_swap`."""

    async def resume(self) -> None:
        """See `SwappableEngine.resume`."""


async def serve(config: RunConfig, service_id: str) -> int:
    """Serve pushes until SIGTERM."""
    shape, rollout = shape_of_model(Path(config.model.path)), config.rollout
    layout = engine_layout(shape, server_id=service_id, tp=rollout.tensor_parallel_size, dtype=rollout.dtype, endpoints=(), device="cpu")
    engine = ScriptedEngine([ScriptedWorker(worker) for worker in layout.workers])
    rpc = RpcServer("127.0.0.1", 0, config.security)
    sink = WeightSink(
        engine,
        server_id=service_id,
        staging_name=server_staging(config.run.id, service_id, os.getpid()),
        push=config.push,
        on_committed=lambda _: None,
        on_failed=lambda _: None,
    )
    try:
        await sink.discover(config.model.path)
        await sink.reserve()
        rpc.add(WeightSinkServicer(sink).add_to, SERVICE_NAME)
        sink.listen_at(join_address("127.0.0.1", await rpc.start()))
        rpc.set_serving(True)
        await serve_until_signal(rpc, drain=_nothing, drain_timeout_s=1.0)
    finally:
        await sink.close()
    return 0


async def _nothing() -> None:
    """Nothing runs that could be waited for."""


def main() -> int:
    """Entry point of `python -m shoal_benchmarks.push_scripted`."""
    die_with_parent()
    import argparse

    parser = argparse.ArgumentParser(prog="push_scripted", description=__doc__)
    add_service_arguments(parser, example="rollout-0", coordinator_required=False)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    setup_logging(arguments.service_id, config.telemetry, run_id=config.run.id)
    torch.set_num_threads(config.rollout.threads)
    return asyncio.run(serve(config, arguments.service_id))


if __name__ == "__main__":
    sys.exit(main())
