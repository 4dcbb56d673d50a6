"""Methods that vLLM adds to its worker class (`worker_extension_cls`), called by name with plain data through `collective_rpc`.

Errors of the Shoal tree come back as values: vLLM would turn an exception into text without its class.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config.models import PushSection
from shoal.errors import ShoalError, StateError
from shoal_rollout.worker_layout import Plain, digests_from_plain, layout_to_plain
from shoal_rollout.worker_sink import WorkerSink

if TYPE_CHECKING:
    from torch import nn


_VLLM_SHARED_MEMORY = ("/dev/shm/psm_", "/dev/shm/vllm_dist_")  # noqa: S108 - where shm_open puts them
"""Message queues between engine core and workers, and buffers of collectives between CPU workers."""


class EngineWorker:
    """Mixed into every engine worker; all names start with `shoal_` so that none meets one of vLLM's."""

    shoal_sink: WorkerSink | None
    rank: int
    model_runner: Any
    vllm_config: Any

    def shoal_discover(self, folder: str) -> Plain:
        """Record the model's layout."""

        def run() -> Plain:
            # vLLM imports this module before it can choose a platform; the sink needs one.
            from vllm.config import set_current_vllm_config

            model: nn.Module = self.model_runner.get_model()
            with set_current_vllm_config(self.vllm_config):
                self.shoal_sink = WorkerSink(model, Path(folder), self.rank)
            if self.vllm_config.parallel_config.world_size > 1:
                _unlink_shared_memory()
            return layout_to_plain(self.shoal_sink.layout)

        return _answer(run)

    def shoal_prepare(self, push: Plain, name: str) -> Plain:
        """Allocate or reuse staging."""
        return _answer(lambda: layout_to_plain(_require(self).prepare(PushSection.model_validate(push), f"{name}-w{self.rank}")))

    def shoal_start_verify(self, digests: Plain) -> Plain:
        """Check coverage."""
        return _answer(lambda: _require(self).start_verify(digests_from_plain(digests)))

    def shoal_step_verify(self, budget_s: float) -> Plain:
        """Check digests and build packed weights for a while."""
        return _answer(lambda: list(_require(self).step_verify(budget_s)))

    def shoal_commit(self) -> Plain:
        """Swap."""
        return _answer(lambda: _require(self).commit())

    def shoal_drop(self) -> Plain:
        """Forget what is ready."""
        return _answer(lambda: _require(self).drop())

    def shoal_close(self) -> Plain:
        """Remove staging."""
        return _answer(lambda: _require(self).close())


def _require(worker: EngineWorker) -> WorkerSink:
    sink: WorkerSink | None = getattr(worker, "shoal_sink", None)
    if sink is None:
        raise StateError("the layout of this worker is not known yet; discover it first")
    return sink


def _unlink_shared_memory() -> None:
    """Remove the names of vLLM's shared memory between its processes: all have mapped it, and killed ones would leave it behind."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    for line in maps.read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if path.startswith(_VLLM_SHARED_MEMORY) and not path.endswith(" (deleted)"):
            Path(path).unlink(missing_ok=True)


def _answer(run: Callable[[], Plain]) -> Plain:
    try:
        return ["ok", run()]
    except ShoalError as error:
        return [type(error).__name__, str(error)]
