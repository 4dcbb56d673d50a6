"""The end of a weight push inside one engine worker: layout, staging, digests, swap.

Stages, driven by `WeightSink` in the server process; calls come one at a time, between the engine's steps:

    discover -> prepare -> (trainer writes) -> start_verify -> step_verify ... -> commit | drop

Steps have a time budget, so that generation goes on between them.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from shoal.config.models import PushSection
from shoal.errors import CapacityError, StateError
from shoal.types import CopyDigest, SinkWorkerLayout
from shoal.weights.transports.base import SinkTransport
from shoal.weights.transports.factory import open_sink_transport
from shoal.weights.verification import verify_staging
from shoal_rollout.engine_parameters import collect_parameters, record_load
from shoal_rollout.weight_swap import Apply, check_swappable, prepare_swap, use_live_embeddings
from shoal_rollout.worker_layout import place_parameters


class WorkerSink:
    """State of one worker. Not thread-safe: the worker calls it from its own loop."""

    def __init__(self, model: nn.Module, folder: Path, worker_rank: int) -> None:
        """Discover the layout.

        Raises: ConfigError: the model cannot be updated in place.
        """
        self._parameters = collect_parameters(model)
        load = record_load(model, self._parameters, folder)
        use_live_embeddings(model)
        check_swappable(self._parameters)
        shapes = [(p.name, tuple(p.meta.shape), str(p.meta.dtype).removeprefix("torch.")) for p in self._parameters]
        placed, staging_bytes = place_parameters(shapes)
        self._layout = SinkWorkerLayout(
            worker_rank=worker_rank, parameters=placed, regions=load.regions, staging_path="", staging_bytes=staging_bytes
        )
        self._by_name = {parameter.name: parameter for parameter in placed}
        self._transport: SinkTransport | None = None
        self._work: Iterator[Apply | None] | None = None
        self._applies: list[Apply] = []
        self._replaced: list[object] = []
        self._num_bytes = 0
        self._is_ready = False

    @property
    def layout(self) -> SinkWorkerLayout:
        """What this worker needs; staging_path is empty before the first prepare."""
        return self._layout

    def prepare(self, push: PushSection, name: str) -> SinkWorkerLayout:
        """Allocate staging, or reuse it, and drop what an earlier push left ready.

        Raises: CapacityError: the folder has too little space. TransportError: staging cannot be created.
        """
        self.drop()
        if self._transport is not None and not os.path.exists(self._transport.address):
            self.close()
        if self._transport is None:
            _check_space(push, self._layout.staging_bytes)
            self._transport = open_sink_transport(push, name, self._layout.staging_bytes)
            self._layout = dataclasses.replace(self._layout, staging_path=self._transport.address)
        return self._layout

    def start_verify(self, digests: Sequence[CopyDigest]) -> None:
        """Check that the copies cover every region exactly once and begin the rest.

        Raises: StateError: nothing is prepared, or the coverage is wrong; names the parameter.
        """
        transport = self._require_transport()
        self.drop()
        self._work = self._verify_and_ready(transport, verify_staging(self._layout, digests, transport.digest))

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
            self.drop()
            raise
        self._work = None
        self._is_ready = True
        return True, self._num_bytes

    def commit(self) -> int:
        """Swap; the engine must be paused. What was replaced stays until `drop`.

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
        return len(applies)

    def drop(self) -> None:
        """Forget what is ready or replaced; staging stays for the next push."""
        self._work, self._applies, self._num_bytes, self._is_ready, self._replaced = None, [], 0, False, []

    def close(self) -> None:
        """Remove staging."""
        self.drop()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _verify_and_ready(self, transport: SinkTransport, checking: Iterator[int]) -> Iterator[Apply | None]:
        for num_bytes in checking:
            self._num_bytes += num_bytes
            yield None
        yield from prepare_swap(self._parameters, lambda name: transport.tensor(self._by_name[name]))

    def _require_transport(self) -> SinkTransport:
        if self._transport is None:
            raise StateError("nothing is prepared on this worker; prepare first")
        return self._transport


def _check_space(push: PushSection, num_bytes: int) -> None:
    status = os.statvfs(push.shm_dir)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < num_bytes:
        msg = (
            f"staging needs {num_bytes} bytes in {push.shm_dir}, which has {free_bytes} free; enlarge it (docker: --shm-size; "
            "mount -o remount,size=...) or set push.shm_dir to a larger tmpfs"
        )
        raise CapacityError(msg)
