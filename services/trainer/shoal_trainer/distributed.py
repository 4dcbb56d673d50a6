"""One rank of a gang: its place, its device and the few collectives that it needs.

Every collective waits at most `collective_timeout_s`; none spans a command. A failure on one rank is agreed on by all of them before
the next collective, so that no rank is left waiting for one that gave up.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.config.gang import GangSection
from shoal.errors import ConfigError, ShoalError


class PeerError(ShoalError):
    """Another rank failed; its own error says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Place of this process in its gang.

    mesh: one axis over all ranks.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    def sum_over_ranks(self, local: Tensor) -> Tensor:
        """Add a small tensor over the ranks; `shoal.algo.masking.SumOverRanks`."""
        return self._reduce(local, dist.ReduceOp.SUM)

    def max_over_ranks(self, local: Tensor) -> Tensor:
        """Element-wise maximum over the ranks."""
        return self._reduce(local, dist.ReduceOp.MAX)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Leave the block together: if it failed on any rank, it fails on all.

        Put everything that can fail on one rank alone (reading Redis, writing files) into such a block.

        Raises: the rank's own exception, or PeerError on the ranks that did not fail.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, once the other ranks know
            failure = error
        any_failed = self.max_over_ranks(torch.tensor([float(failure is not None)], device=self.device)).item() > 0
        if failure is not None:
            raise failure
        if any_failed:
            raise PeerError(f"rank {self.rank} gave up since another rank failed")

    def _reduce(self, local: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size == 1:
            return local
        # The reduction works in place, and the caller may still need its own part.
        total = local.detach().to(self.device, copy=True)
        dist.all_reduce(total, op=operation)
        return total.to(local.device)


def join_gang(gang: GangSection) -> RankContext:
    """Join the process group that torchrun describes in the environment.

    Raises: ConfigError: not started by torchrun, or `device: cuda` without a GPU.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not set: start ranks with `python -m torch.distributed.run ... -m shoal_trainer ...`")
    device = _choose_device(gang)
    backend = _backend(gang, device)
    if os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE"):
        # All ranks are on this machine: the host name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, timeout=timedelta(seconds=gang.collective_timeout_s))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("fsdp",))
    return RankContext(rank=rank, world_size=world_size, device=device, mesh=mesh)


def _backend(gang: GangSection, device: torch.device) -> str:
    """Names of the process group's backends; shards that are offloaded from a GPU are gathered in host memory, which nccl cannot."""
    if device.type == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if gang.offload else "nccl"


def shared_random_id(context: RankContext) -> str:
    """A random name that is the same on all ranks and for no other start of a gang; enters a collective."""
    drawn = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8, device=context.device)
    if context.world_size > 1:
        dist.broadcast(drawn, src=0)
    return bytes(drawn.tolist()).hex()


def prepare_thread(gang: GangSection, device: torch.device) -> None:
    """Set the number of threads and the current GPU; both belong to a thread, so the computing thread calls this itself."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(gang.threads)


def _choose_device(gang: GangSection) -> torch.device:
    if gang.device == "cpu" or (gang.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but torch sees no GPU; use 'auto' or 'cpu'")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
