"""A trainer rank of the failure matrix: the real gang, command store and weight source over plain sharded tensors; rank 0 serves.

There is no model and no optimizer: an update writes the tensors of the next version into the shards.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from shoal_trainer import servicer as trainer_servicer
from shoal_trainer import weight_servicer
from shoal_trainer.command_store import CommandStore, open_command_store
from shoal_trainer.commands import UPDATE
from shoal_trainer.distributed import RankContext
from shoal_trainer.gang import Gang, follow
from shoal_trainer.weight_servicer import DIGEST, PREPARE, TRANSFER, WeightCommands
from shoal_trainer.weight_source import SourceIdentity, WeightSource
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shoal.clients.registry import LeaseKeeper, this_process
from shoal.codec.services import update_result_to_proto
from shoal.config.models import RunConfig
from shoal.errors import UnavailableError
from shoal.rpc.server import RpcServer, serve_until_signal
from shoal.rpc.v1 import trainer_pb2, weights_pb2
from shoal.rpc.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from shoal.rpc.v1.weights_pb2_grpc import add_WeightSourceServiceServicer_to_server
from shoal.types import Place, ServiceKind, TrainerDescription, TrainerRole, UpdateResult
from shoal.weights.places import host_id
from shoal.weights.transports.factory import open_source_transport
from tests.helpers.push_matrix_config import load
from tests.helpers.push_matrix_faults import FaultBox, flip_byte
from tests.helpers.push_matrix_model import FROZEN, tensors_at

WORLD_SIZE = 2
VICTIM_SERVER = "rollout-0"
ANSWER_TIMEOUT_S = 1.5
"""How long rank 0 waits for the other before it gives the gang up."""
Handler = Callable[[bytes], bytes]


class Shards:
    """This rank's rows of every tensor, at a version."""

    def __init__(self, context: RankContext, policy_version: int, checkpoint: Path | None) -> None:
        self._context = context
        self._checkpoint = checkpoint
        self.policy_version = policy_version
        tensors = self._tensors_at(policy_version)
        self._locals = {name: self._rows(tensor).clone() for name, tensor in tensors.items()}
        self.parameters = {name: self._sharded(name, tensor) for name, tensor in tensors.items()}

    def update(self, payload: bytes) -> bytes:
        """Make the shards those of the next version; repeating does nothing."""
        policy_version = trainer_pb2.UpdateBatchRequest.FromString(payload).step
        with torch.no_grad():
            for name, tensor in self._tensors_at(policy_version).items():
                self._locals[name].copy_(self._rows(tensor))
        self.policy_version = policy_version
        return update_result_to_proto(UpdateResult(policy_version=policy_version, applied=True, metrics={})).SerializeToString()

    def _tensors_at(self, policy_version: int) -> dict[str, Tensor]:
        if self._checkpoint is None:
            return {name: torch.from_numpy(tensor) for name, tensor in tensors_at(policy_version).items()}
        return {name: tensor * (1 + policy_version / 64) for name, tensor in load_file(self._checkpoint / "model.safetensors").items()}

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self._context.world_size)[self._context.rank]

    def _sharded(self, name: str, tensor: Tensor) -> DTensor:
        sharded = DTensor.from_local(
            self._locals[name], self._context.mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        sharded.requires_grad_(name != FROZEN)
        return sharded


class FaultyCommands:
    """The handlers of a push, which meet this rank's faults."""

    def __init__(self, handlers: Mapping[str, Handler], faults: FaultBox) -> None:
        self._handlers = handlers
        self._faults = faults
        self._staging: dict[str, str] = {}

    def handlers(self) -> dict[str, Handler]:
        """The same commands."""
        return {**self._handlers, PREPARE: self._prepare, TRANSFER: self._transfer, DIGEST: self._digest}

    def _prepare(self, payload: bytes) -> bytes:
        fault = self._faults.enter("prepare")
        request = weights_pb2.PrepareRankRequest.FromString(payload).request
        self._staging = {sink.layout.server_id: sink.layout.workers[0].endpoints["shm"] for sink in request.sinks}
        answer = weights_pb2.PrepareSourceResponse.FromString(self._handlers[PREPARE](payload))
        if fault == "wrong plan hash":
            change_plan(answer)
        return answer.SerializeToString()

    def _transfer(self, payload: bytes) -> bytes:
        fault = self._faults.enter("transfer")
        answer = weights_pb2.TransferSourceResponse.FromString(self._handlers[TRANSFER](payload))
        change_transfer(answer, fault)
        if fault == "late write":
            flip_byte(self._staging[VICTIM_SERVER])
        return answer.SerializeToString()

    def _digest(self, payload: bytes) -> bytes:
        fault = self._faults.enter("digest")
        answer = weights_pb2.DigestSourceResponse.FromString(self._handlers[DIGEST](payload))
        change_digest(answer, fault)
        return answer.SerializeToString()


def change_plan(answer: weights_pb2.PrepareSourceResponse) -> None:
    """Tell of another plan."""
    planned = next(server for server in answer.servers if server.server_id == VICTIM_SERVER)
    planned.plan_hash = "0" * len(planned.plan_hash)


def change_transfer(answer: weights_pb2.TransferSourceResponse, fault: str) -> None:
    """Tell something wrong about what was sent to a server."""
    if not fault:
        return
    pairs = next(server for server in answer.servers if server.server_id == VICTIM_SERVER).pairs
    if fault == "wrong digest":
        pairs[0].xxh3[0] ^= 1
    elif fault == "missing digest":
        pairs[0].xxh3.pop()
        pairs[0].encodings.pop()
    elif fault == "swapped digests":
        pairs[0].xxh3[0], pairs[0].xxh3[1] = pairs[0].xxh3[1], pairs[0].xxh3[0]


def change_digest(answer: weights_pb2.DigestSourceResponse, fault: str) -> None:
    """Tell something wrong about what the trainer holds."""
    if fault == "wrong digest":
        next(server for server in answer.servers if server.server_id == VICTIM_SERVER).pairs[0].xxh3[0] ^= 1


class FaultyServicer(weight_servicer.WeightSourceServicer):
    """The gang's door, which meets the leader's faults."""

    def __init__(self, gang: Gang, faults: FaultBox) -> None:
        super().__init__(gang)
        self._faults = faults

    async def PrepareSource(self, request: weights_pb2.PrepareSourceRequest, context: Any) -> weights_pb2.PrepareSourceResponse:  # noqa: ANN401
        """PREPARE."""
        fault = self._faults.enter("prepare")
        answer = await super().PrepareSource(request, context)
        if fault == "wrong plan hash":
            change_plan(answer)
        return answer

    async def TransferSource(self, request: weights_pb2.TransferSourceRequest, context: Any) -> weights_pb2.TransferSourceResponse:  # noqa: ANN401
        """TRANSFER."""
        fault = self._faults.enter("transfer")
        answer = await super().TransferSource(request, context)
        change_transfer(answer, fault)
        return answer

    async def DigestSource(self, request: weights_pb2.DigestSourceRequest, context: Any) -> weights_pb2.DigestSourceResponse:  # noqa: ANN401
        """The audit after COMMIT."""
        fault = self._faults.enter("digest")
        answer = await super().DigestSource(request, context)
        change_digest(answer, fault)
        return answer


def main(folder: str, rank: int, start: int, policy_version: int, coordinator: str, checkpoint: str = "") -> int:
    """Run one rank until it is told to stop.

    Args:
        start: number of this start of the gang; its ranks meet under it.
        policy_version: version that the shards have at the start, as after loading a checkpoint.
        checkpoint: folder of a model to hold; the matrix's own tensors if there is none.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    path = Path(folder)
    config = load(path, f"rank-{rank}")
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/gang-{start}", rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=30)
    )
    context = RankContext(rank=rank, world_size=WORLD_SIZE, device=torch.device("cpu"), mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    store = open_command_store(context, "127.0.0.1")
    shards = Shards(context, policy_version, Path(checkpoint) if checkpoint else None)
    weights = WeightCommands(_source(config, context, shards, f"gang-{start}"), lambda: shards.policy_version).handlers()
    handlers = FaultyCommands(weights, FaultBox(path, f"rank-{rank}")).handlers() | {UPDATE: shards.update}
    if rank == 0:
        return asyncio.run(_serve(path, config, handlers, frozenset(weights), store, shards, coordinator))
    try:
        follow(handlers, _required(store), rank)
    except UnavailableError:
        return 0
    return 1


def _source(config: RunConfig, context: RankContext, shards: Shards, source_id: str) -> WeightSource:
    identity = SourceIdentity(
        rank=context.rank,
        world_size=context.world_size,
        source_id=source_id,
        place=Place(host_id=host_id(config.push.shm_dir), device="cpu"),
    )
    transport = open_source_transport(config.push, config.security)
    return WeightSource(shards.parameters, identity, transport, config.push, lambda: shards.policy_version)


def _required(store: CommandStore | None) -> CommandStore:
    assert store is not None
    return store


async def _serve(
    folder: Path,
    config: RunConfig,
    handlers: Mapping[str, Handler],
    independent: frozenset[str],
    store: CommandStore | None,
    shards: Shards,
    coordinator: str,
) -> int:
    stop = asyncio.Event()
    compute = ThreadPoolExecutor(1, "compute")
    gang = Gang(handlers, store, WORLD_SIZE, compute, ANSWER_TIMEOUT_S, independent, on_broken=stop.set)
    server = RpcServer("127.0.0.1", 0, config.security)
    trainer = trainer_servicer.TrainerServicer(gang, lambda: describe(shards))
    server.add(lambda s: add_TrainerServiceServicer_to_server(trainer, s), trainer_servicer.SERVICE_NAME)
    source = FaultyServicer(gang, FaultBox(folder, "leader"))
    server.add(lambda s: add_WeightSourceServiceServicer_to_server(source, s), weight_servicer.SERVICE_NAME)
    port = await server.start()
    server.set_serving(True)
    info = this_process(run_id=config.run.id, service_id="actor", kind=ServiceKind.ACTOR, address=f"127.0.0.1:{port}")
    async with LeaseKeeper(coordinator, info, config.security):
        await serve_until_signal(server, drain=gang.drain, drain_timeout_s=1.0, grace_s=0.5, stop_event=stop)
    return 1 if gang.is_broken else 0


def describe(shards: Shards) -> TrainerDescription:
    """Facts about the gang."""
    return TrainerDescription(
        service_id="actor",
        role=TrainerRole.ACTOR,
        world_size=WORLD_SIZE,
        num_parameters=sum(parameter.numel() for parameter in shards.parameters.values()),
        step=shards.policy_version,
        has_reference=False,
    )
