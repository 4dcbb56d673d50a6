"""The trainer's end of a weight push on one rank: what it holds, what it copies where, and the copying.

Each rank runs the same three commands as its gang, in its own process, with no collective in between:
`describe` names the local shards, `prepare` plans against the sinks and keeps this rank's copies, `transfer` writes them.
Only local tensors are touched, so a rank never holds more of the model than its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shoal.errors import ShoalError, StateError, TransportError
from shoal.telemetry.logs import get_logger
from shoal.types.weights import Box, CopyDigest, SinkLayout, SinkWorkerLayout, SourceShard
from shoal.weights.planner import Copy, plan_copies
from shoal.weights.transports.base import SourceTransport, StagingWriter

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedPush:
    push_id: str
    policy_version: int
    copies: tuple[Copy, ...]
    workers: Mapping[tuple[str, int], SinkWorkerLayout]
    server_ids: tuple[str, ...]

    def num_bytes_to(self, server_ids: Collection[str]) -> int:
        """Bytes that this rank writes into some servers."""
        return sum(copy.num_bytes for copy in self.copies if copy.server_id in server_ids)


class WeightSource:
    """One rank's weight source.

    Args:
        named_parameters: Hugging Face name to live parameter; a plain tensor counts as replicated on every rank.
        rank: this process in the gang.
        world_size: processes in the gang.
        transport: the trainer's end of the push's transport; closed by `close`.
        policy_version: tells the version that the parameters hold now, so that no other version is ever sent under a push's name;
            None leaves that to the caller.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, DTensor | Tensor],
        rank: int,
        world_size: int,
        transport: SourceTransport,
        policy_version: Callable[[], int] | None = None,
    ) -> None:
        self._held_version = policy_version
        self._parameters = dict(named_parameters)
        self._rank = rank
        self._world_size = world_size
        self._transport = transport
        self._boxes = {name: local_box(name, parameter) for name, parameter in self._parameters.items()}
        self._push: _PreparedPush | None = None
        self._planned: tuple[tuple[tuple[SourceShard, ...], tuple[SinkLayout, ...]], str, tuple[Copy, ...]] | None = None
        self.transferred_bytes = 0
        """Bytes that the last transfer wrote, servers that failed not counted."""

    def describe(self) -> list[SourceShard]:
        """Name the shard of every tensor that this rank holds; empty shards are left out."""
        return [
            SourceShard(name=name, shape=tuple(parameter.shape), dtype=_dtype_name(parameter), rank=self._rank, box=self._boxes[name])
            for name, parameter in self._parameters.items()
            if self._boxes[name].num_elements > 0
        ]

    def prepare(
        self, push_id: str, policy_version: int, all_shards: Sequence[SourceShard], sinks: Sequence[SinkLayout]
    ) -> tuple[str, int, int]:
        """Plan the whole push and keep this rank's copies; replaces whatever was prepared before.

        Args:
            push_id: identity of the push.
            policy_version: version that the bytes will be.
            all_shards: `describe` of every rank of the gang, in any order.
            sinks: layouts of the rollout servers.
        Returns: hash of the whole plan (the same on every rank), number of this rank's copies, bytes that they write.
        Raises: TransportError: the layouts cannot be matched; names the parameter.
            StateError: the parameters are of another version.
        """
        self._push = None
        self._check_version(policy_version)
        strangers = sorted({shard.rank for shard in all_shards}.difference(range(self._world_size)))
        if strangers:
            msg = f"shards of ranks {strangers} do not belong to a gang of {self._world_size}"
            raise TransportError(msg)
        plan_hash, copies = self._plan(tuple(all_shards), tuple(sinks))
        self._push = _PreparedPush(
            push_id=push_id,
            policy_version=policy_version,
            copies=copies,
            workers={(sink.server_id, worker.worker_rank): worker for sink in sinks for worker in sink.workers},
            server_ids=tuple(sink.server_id for sink in sinks),
        )
        return plan_hash, len(copies), sum(copy.num_bytes for copy in copies)

    def transfer(self, push_id: str) -> dict[str, list[CopyDigest]]:
        """Write this rank's slices into every sink; may be repeated for the same push.

        Returns: digests of the written copies per server id. A server whose staging cannot be written is logged and left out,
            so that the other servers still get the push.
        Raises: StateError: this push is not the prepared one, or the parameters have moved on to another version.
        """
        push = self._push
        if push is None or push.push_id != push_id:
            prepared = "none" if push is None else push.push_id
            msg = f"push {push_id} is not prepared on rank {self._rank} (prepared: {prepared}); call prepare first"
            raise StateError(msg)
        self._check_version(push.policy_version)
        digests: dict[str, list[CopyDigest]] = {}
        self.transferred_bytes = 0
        for server_id in push.server_ids:
            try:
                digests[server_id] = self._transfer_to(push, server_id)
            except ShoalError as error:
                log.warning("weight_transfer_failed", push_id=push_id, server_id=server_id, rank=self._rank, reason=str(error))
        self.transferred_bytes = push.num_bytes_to(digests)
        return digests

    def abort(self, push_id: str) -> None:
        """Forget a prepared push; another push id, or repeating, changes nothing."""
        if self._push is not None and self._push.push_id == push_id:
            self._push = None

    def close(self) -> None:
        """Let go of the sinks' staging buffers."""
        self._push = None
        self._transport.close()

    def _plan(self, all_shards: tuple[SourceShard, ...], sinks: tuple[SinkLayout, ...]) -> tuple[str, tuple[Copy, ...]]:
        """Hash of the plan and this rank's copies; layouts seldom change between pushes, so the last ones are kept."""
        if self._planned is None or self._planned[0] != (all_shards, sinks):
            plan = plan_copies(all_shards, sinks)
            self._planned = (all_shards, sinks), plan.plan_hash, plan.copies_of(self._rank)
        return self._planned[1:]

    def _check_version(self, policy_version: int) -> None:
        if self._held_version is not None and (held := self._held_version()) != policy_version:
            msg = f"rank {self._rank} holds policy version {held}, the push is for {policy_version}; start a push of the held version"
            raise StateError(msg)

    def _transfer_to(self, push: _PreparedPush, server_id: str) -> list[CopyDigest]:
        writers: dict[int, StagingWriter] = {}
        digests = []
        for copy in push.copies:
            if copy.server_id != server_id:
                continue
            if copy.worker_rank not in writers:
                writers[copy.worker_rank] = self._transport.open(push.workers[server_id, copy.worker_rank])
            source = self._slice(copy.source_name, copy.source_box)
            xxh3 = writers[copy.worker_rank].write(copy.parameter, copy.parameter_box, source)
            digests.append(CopyDigest(worker_rank=copy.worker_rank, parameter=copy.parameter, parameter_box=copy.parameter_box, xxh3=xxh3))
        return digests

    def _slice(self, name: str, box: Box) -> Tensor:
        """The part of the local shard that a box in global coordinates names; a view."""
        local = local_tensor(self._parameters[name])
        held = self._boxes[name]
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            local = local.narrow(dim, offset - held.offsets[dim], size)
        return local


def local_tensor(parameter: DTensor | Tensor) -> Tensor:
    """This rank's part of a parameter, without communication or autograd."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


def local_box(name: str, parameter: DTensor | Tensor) -> Box:
    """Where this rank's part lies in the whole tensor.

    Raises: TransportError: a placement other than Shard and Replicate, or a local part of another shape than its placements say.
    """
    if not isinstance(parameter, DTensor):
        return Box(offsets=(0,) * parameter.dim(), sizes=tuple(parameter.shape))
    if any(type(placement) not in (Shard, Replicate) for placement in parameter.placements):
        msg = f"{name} has placements {parameter.placements}; a push can read Shard and Replicate only"
        raise TransportError(msg)
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if tuple(parameter.to_local().shape) != tuple(sizes):
        msg = f"{name} holds a local part of shape {tuple(parameter.to_local().shape)}, its placements say {tuple(sizes)}"
        raise TransportError(msg)
    return Box(offsets=tuple(offsets), sizes=tuple(sizes))


def _dtype_name(parameter: Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")
