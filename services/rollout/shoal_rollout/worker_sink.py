"""The end of a weight push inside one engine worker: staging, digests, swap.

Stages, driven by `WeightSink` in the server process; calls come one at a time, between the engine's steps:

    prepare -> add_buckets ... -> plan -> (trainer writes) -> start_verify -> step_verify ... -> commit -> free | drop

Steps have a time budget, so that generation goes on between them.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shoal.config.models import PushSection
from shoal.errors import CapacityError, StateError
from shoal.types import SinkRegion, SinkWorkerLayout
from shoal.types.weights import PairDigests, Place
from shoal.weights.buckets import Bucket
from shoal.weights.places import host_id
from shoal.weights.staging_names import worker_staging
from shoal.weights.transports.base import StagingBuffer
from shoal.weights.transports.factory import open_staging
from shoal.weights.transports.pieces import bucket_digest
from shoal.weights.transports.staging import ParameterPieces
from shoal.weights.verification import Expected, match_digests, verify_buckets
from shoal_rollout.staged_content import StagedContent
from shoal_rollout.worker_digest import DigestResult, digest_pieces
from shoal_rollout.worker_layout import place_parameters
from shoal_rollout.worker_receiver import Reception, WorkerReceiver

Apply = Callable[[], object]
_HOST_TRANSPORTS = frozenset({"shm", "grpc"})


class SwapModel(Protocol):
    """What a worker needs of its model; `EngineModel` has it."""

    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    regions: tuple[SinkRegion, ...]

    def prepare_swap(self, staged: Callable[[str], Tensor], changed: Collection[str]) -> Iterator[Apply | None]:
        """See `EngineModel.prepare_swap`."""
        ...

    def live(self, parameter: str) -> Tensor | None:
        """See `EngineModel.live`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    plan_hash: str
    buckets: tuple[Bucket, ...]


class WorkerSink:
    """State of one worker. Not thread-safe: the worker calls it from its own loop."""

    def __init__(self, model: SwapModel, worker_rank: int, device: str) -> None:
        """Place the model's parameters in a staging buffer that is opened later.

        Args:
            device: Where the model is, for example "cpu" or "cuda:0".
        """
        self._model = model
        self._rank = worker_rank
        self._device = device
        self._parameters, self._staging_bytes = place_parameters(model.parameters)
        self._by_name = {parameter.name: parameter for parameter in self._parameters}
        self._content = StagedContent(self._by_name)
        # Asks for the current buffer every time, since a push that breaks off is followed by a new one.
        self._pieces = ParameterPieces(self._parameters, lambda parameter: self._require_staging().view(parameter), f"rank {worker_rank}")
        self._receiver = WorkerReceiver(self._pieces, worker_rank)
        self._staging: StagingBuffer | None = None
        self._num_stagings = 0
        self._push_id = ""
        self._parts: list[tuple[Bucket, ...]] = []
        self._plan: _Plan | None = None
        self._committed_plan: _Plan | None = None
        self._work: Iterator[Apply | None] | None = None
        self._digesting: Iterator[DigestResult | None] | None = None
        self._applies: list[Apply] = []
        self._replaced: list[object] = []
        self._num_bytes = 0
        self._is_ready = False

    def prepare(self, push: PushSection, name: str, host: str) -> tuple[SinkWorkerLayout, bool]:
        """Allocate staging, or reuse it, and drop what an earlier push left ready.

        Args:
            name: Start of the buffer's name, unique on the host.
            host: Where others reach this machine; empty if it is not known yet.
        Returns: the layout, and whether staging holds a complete version.
        Raises: CapacityError: there is too little space. TransportError: staging cannot be created.
        """
        self.drop()
        if self._staging is not None and not _exists(self._staging):
            self._close_staging()
        if self._staging is None:
            self._open_staging(push, name)
        return self._layout(push, host), self._content.is_complete

    def add_buckets(self, plan_hash: str, part: int, buckets: tuple[Bucket, ...]) -> None:
        """Learn a part of a plan. Part 0 begins anew.

        Raises: StateError: the parts before it are not there.
        """
        if part == 0:
            self._parts = []
        if part != len(self._parts):
            raise StateError(f"part {part} of plan {plan_hash} came after {len(self._parts)} parts on worker {self._rank}; plan again")
        self._parts.append(buckets)

    def plan(self, push_id: str, policy_version: int, plan_hash: str, reception: Reception) -> None:
        """Begin to be written to by the plan whose parts were added; from now on staging holds no complete version.

        Args:
            reception: Where to meet the ranks that send over the collective transport.
        """
        self._require_staging()
        buckets = tuple(bucket for part in self._parts for bucket in part)
        self._content.begin(push_id)
        self._push_id, self._plan, self._parts = push_id, _Plan(plan_hash, buckets), []
        if reception.ranks:
            self._receiver.start(push_id, policy_version, buckets, reception, self._staging_device)

    def start_verify(self, pairs: Sequence[PairDigests]) -> None:
        """Match digests and buckets and begin to check them.

        Raises: StateError: nothing is planned, or there is not one digest for each bucket. TransportError: not everything was received.
        """
        if self._plan is None or not self._push_id:
            raise StateError("nothing is planned on this worker; plan first")
        expected = match_digests(self._rank, self._plan.buckets, pairs)
        self._receiver.finish()
        self.free()
        self._content.begin(self._push_id)
        self._work = self._verify(self._plan, expected)

    def step_verify(self, budget_s: float) -> tuple[bool, int]:
        """Go on for about `budget_s` seconds.

        Returns: whether all is checked and ready, and the bytes checked so far.
        Raises: StateError: nothing to verify, or a digest differs; names the parameter.
        """
        if self._is_ready:
            return True, self._num_bytes
        if self._work is None:
            raise StateError("nothing to verify on this worker; send digests first")
        end_s = time.monotonic() + budget_s
        try:
            for apply in self._work:
                if apply is not None:
                    self._applies.append(apply)
                if time.monotonic() >= end_s:
                    return False, self._num_bytes
        except BaseException:
            # A generator that has raised looks like one that is done: nothing of it may be committed.
            self.free()
            raise
        self._work = None
        self._is_ready = True
        return True, self._num_bytes

    def commit(self) -> int:
        """Swap; the engine must be paused. What was replaced stays until `free`.

        Returns: how many references were set or tensors copied.
        Raises: StateError: nothing is ready; no weight was touched.
        """
        if not self._is_ready:
            raise StateError("no verified weights on this worker; nothing was swapped")
        applies, self._applies, self._is_ready = self._applies, [], False
        with torch.no_grad():
            self._replaced = [apply() for apply in applies]
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._content.committed()
        self._content.end()
        self._push_id, self._committed_plan = "", self._plan
        return len(applies)

    def start_digest(self, plan_hash: str) -> None:
        """Begin to digest the live weights, piece by piece of a plan that is current or was committed last.

        Raises: StateError: another plan.
        """
        plan = next((plan for plan in (self._committed_plan, self._plan) if plan is not None and plan.plan_hash == plan_hash), None)
        if plan is None:
            raise StateError(f"worker {self._rank} has no plan {plan_hash}; audit right after a push, with that push's plan")
        self._digesting = digest_pieces(self._rank, plan.buckets, self._read)

    def step_digest(self, budget_s: float) -> tuple[bool, DigestResult]:
        """Go on for about `budget_s` seconds, at least one parameter.

        Returns: whether all is done; and once, when it is, the digests by rank and the parameters that could be read from staging only.
        Raises: StateError: nothing was started, or a parameter can be read neither from the engine nor from staging.
        """
        if self._digesting is None:
            raise StateError("no digest was started on this worker; start one first")
        end_s = time.monotonic() + budget_s
        with torch.no_grad():
            for result in self._digesting:
                if result is not None:
                    return True, result
                if time.monotonic() >= end_s:
                    return False, ([], [])
        return True, ([], [])

    def free(self) -> None:
        """Forget what is ready and free what was replaced."""
        self._work, self._applies, self._num_bytes, self._is_ready, self._replaced = None, [], 0, False, []
        self._digesting = None

    def drop(self) -> None:
        """Give up the current push. If it may have been writing, a mapped buffer is left to it, and the next push gets a new one.

        A trainer rank that was stopped and goes on later then writes where nobody reads.
        """
        self.free()
        self._receiver.stop()
        if self._content.is_open and self._staging is not None and self._staging.endpoint[0] == "shm":
            self._close_staging()
        self._content.end()
        self._push_id = ""

    def close(self) -> None:
        """Remove staging."""
        self.free()
        self._receiver.close()
        self._close_staging()

    def _verify(self, plan: _Plan, expected: Sequence[Expected]) -> Iterator[Apply | None]:
        for num_bytes in verify_buckets(expected, self._content.known(plan.plan_hash), partial(bucket_digest, self._pieces)):
            self._num_bytes += num_bytes
            yield None
        yield from self._model.prepare_swap(self._staged, self._content.to_swap(expected))
        self._content.verified(plan.plan_hash, expected)

    def _read(self, parameter: str) -> tuple[Tensor, bool]:
        """The values that are served, and whether they are the engine's own."""
        live = self._model.live(parameter)
        if live is not None:
            return live, True
        if parameter in self._content.uncommitted or self._content.is_open:
            raise StateError(f"the engine keeps nothing readable of {parameter}, and staging holds another version; audit after a commit")
        return self._staged(parameter), False

    def _staged(self, parameter: str) -> Tensor:
        return self._require_staging().view(self._by_name[parameter])

    def _require_staging(self) -> StagingBuffer:
        if self._staging is None:
            raise StateError("nothing is prepared on this worker; prepare first")
        return self._staging

    def _open_staging(self, push: PushSection, name: str) -> None:
        if self._device == "cpu" or push.transport in _HOST_TRANSPORTS:
            _check_space(push, self._staging_bytes)
        self._num_stagings += 1
        # A new name every time: who still has the old buffer mapped cannot take the new one for it.
        self._staging = open_staging(push, worker_staging(name, self._rank, self._num_stagings), self._staging_bytes, self._device)
        self._content.forget()

    def _close_staging(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self._content.forget()

    @property
    def _staging_device(self) -> str:
        return "cpu" if self._require_staging().endpoint[0] == "shm" else self._device

    def _layout(self, push: PushSection, host: str) -> SinkWorkerLayout:
        transport, address = self._require_staging().endpoint
        device = self._staging_device
        return SinkWorkerLayout(
            worker_rank=self._rank,
            parameters=self._parameters,
            regions=self._model.regions,
            staging_bytes=self._staging_bytes,
            place=Place(host_id=host_id(push.shm_dir), device=device.partition(":")[0]),
            endpoints={transport: address, **self._receiver.endpoints(push, host, device)},
        )


def _exists(staging: StagingBuffer) -> bool:
    transport, address = staging.endpoint
    return transport != "shm" or os.path.exists(address)


def _check_space(push: PushSection, num_bytes: int) -> None:
    status = os.statvfs(push.shm_dir)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < num_bytes:
        msg = (
            f"staging needs {num_bytes} bytes in {push.shm_dir}, which has {free_bytes} free; enlarge it (docker: --shm-size; "
            "mount -o remount,size=...) or set push.shm_dir to a larger tmpfs"
        )
        raise CapacityError(msg)
