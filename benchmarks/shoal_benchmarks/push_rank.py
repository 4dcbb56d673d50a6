"""One trainer rank of the push benchmark: a sharded model behind the trainer's own weight source, gang and service, without training.

Rank 0 takes lines on its standard input and answers each with a line of JSON: `update` changes the weights as --change says.
Started by `push_gang`; RANK and its like are in the environment, as torchrun sets them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from shoal.process import SUPERVISED_VARIABLE, die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shoal_trainer.distributed import RankContext
    from torch import nn

    from shoal.config.models import RunConfig

UPDATE = "bench.update"
UPDATE_TIMEOUT_S = 600.0
CHANGES = ("all", "adam", "none")
"""all: every element gets other bits. adam: a step of AdamW at the run's learning rate with random gradients. none: only the version."""


class ChangingModel:
    """A policy whose weights change on command; nothing else about it is trained."""

    def __init__(self, config: RunConfig, context: RankContext, change: str) -> None:
        import torch
        from shoal_trainer.models import load_policy

        self.module: nn.Module = load_policy(config.model.path, config.model, config.actor, context, trainable=True)
        self.policy_version = 0
        self._change = change
        self._adam = torch.optim.AdamW(self.module.parameters(), lr=config.actor.lr, weight_decay=0.0) if change == "adam" else None

    def update(self, _payload: bytes) -> bytes:
        """Make the next version."""
        import torch

        with torch.no_grad():
            for parameter in self.module.parameters() if self._change != "none" else ():
                if self._adam is None:
                    # Another bit in every element, of any dtype, and no drift over many pushes.
                    parameter.neg_()
                else:
                    parameter.grad = torch.randn_like(parameter)
        if self._adam is not None:
            self._adam.step()
            self._adam.zero_grad(set_to_none=True)
        self.policy_version += 1
        return b""


def build_handlers(model: ChangingModel, config: RunConfig, context: RankContext) -> Mapping[str, Callable[[bytes], bytes]]:
    """The weight commands of a trainer rank, and `update`."""
    from shoal_trainer.distributed import prepare_thread, shared_random_id
    from shoal_trainer.models import named_shards
    from shoal_trainer.weight_servicer import WeightCommands
    from shoal_trainer.weight_source import SourceIdentity, WeightSource

    from shoal.types.weights import Place
    from shoal.weights.places import host_id
    from shoal.weights.transports.factory import open_source_transport

    identity = SourceIdentity(
        rank=context.rank,
        world_size=context.world_size,
        source_id=shared_random_id(context),
        place=Place(host_id=host_id(config.push.shm_dir), device=context.device.type),
    )
    source = WeightSource(
        named_shards(model.module),
        identity,
        open_source_transport(config.push, config.security),
        config.push,
        policy_version=lambda: model.policy_version,
        prepare_thread=partial(prepare_thread, config.actor, context.device),
    )
    return {**WeightCommands(source, lambda: model.policy_version).handlers(), UPDATE: model.update}


def run(arguments: argparse.Namespace) -> int:
    """Join the gang, then serve (rank 0) or follow until rank 0 ends."""
    from shoal_trainer.command_store import open_command_store
    from shoal_trainer.distributed import join_gang, prepare_thread
    from shoal_trainer.gang import Gang, follow

    from shoal.config.load import load_config
    from shoal.errors import UnavailableError
    from shoal.telemetry.logs import setup_logging

    config = load_config(arguments.config)
    setup_logging(f"push-rank.{os.environ['RANK']}", config.telemetry, run_id=config.run.id)
    context = join_gang(config.actor)
    compute = ThreadPoolExecutor(1, "compute", prepare_thread, (config.actor, context.device))
    model = compute.submit(ChangingModel, config, context, arguments.change).result()
    handlers = compute.submit(build_handlers, model, config, context).result()
    store = open_command_store(context, os.environ["MASTER_ADDR"])
    if context.rank > 0:
        assert store is not None, "a gang of more than one has a store"
        try:
            compute.submit(follow, handlers, store, context.rank).result()
        except UnavailableError:
            # Rank 0 has ended, hence the benchmark.
            return 0
    gang = Gang(handlers, store, context.world_size, compute, config.actor.collective_timeout_s, frozenset(handlers))
    return asyncio.run(_serve(gang, config))


async def _serve(gang: object, config: RunConfig) -> int:
    from shoal_trainer import weight_servicer
    from shoal_trainer.gang import Gang

    from shoal.rpc.server import RpcServer
    from shoal.rpc.v1.weights_pb2_grpc import add_WeightSourceServiceServicer_to_server

    assert isinstance(gang, Gang)
    server = RpcServer("127.0.0.1", 0, config.security)
    servicer = weight_servicer.WeightSourceServicer(gang)
    server.add(lambda one: add_WeightSourceServiceServicer_to_server(servicer, one), weight_servicer.SERVICE_NAME)
    port = await server.start()
    server.set_serving(True)
    _answer({"address": f"127.0.0.1:{port}"})
    version = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        started_s = time.monotonic()
        if line.strip() == "update":
            await gang.run(UPDATE, b"", UPDATE_TIMEOUT_S)
            version += 1
        _answer({"policy_version": version, "update_s": time.monotonic() - started_s})
    await server.stop(0.0)
    return 0


def _answer(fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Entry point of `python -m shoal_benchmarks.push_rank`."""
    os.environ.setdefault(SUPERVISED_VARIABLE, "1")
    die_with_parent()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    parser = argparse.ArgumentParser(prog="push_rank", description=__doc__)
    parser.add_argument("--config", required=True, help="configuration of the run")
    parser.add_argument("--change", choices=CHANGES, default="all", help="what `update` changes")
    status = run(parser.parse_args())
    sys.stdout.flush()
    # The computing thread of a follower may wait for a command that never comes.
    os._exit(status)


if __name__ == "__main__":
    main()
