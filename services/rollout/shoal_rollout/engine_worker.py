"""Methods that vLLM adds to its worker class (`worker_extension_cls`), called by name with plain data through `collective_rpc`.

Errors of the Shoal tree come back as values: vLLM would turn an exception into text without its class.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config.models import PushSection
from shoal.errors import ShoalError, StateError
from shoal_rollout.worker_layout import Plain, buckets_from_plain, layout_to_plain, pairs_from_plain, pieces_to_plain
from shoal_rollout.worker_receiver import Reception
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
        """Record the model's layout; answers how weights are exchanged, and why."""

        def run() -> Plain:
            # vLLM imports this module before it can choose a platform; the model needs one.
            from shoal_rollout.engine_model import EngineModel

            module: nn.Module = self.model_runner.get_model()
            model = EngineModel(module, Path(folder), self.vllm_config)
            self.shoal_sink = WorkerSink(model, self.rank, str(next(module.parameters()).device))
            if self.vllm_config.parallel_config.world_size > 1:
                unlink_shared_memory()
            return [model.mode, model.reason]

        return _answer(run)

    def shoal_restrict(self, num_sampled: int) -> Plain:
        """Sample from ids below `num_sampled` alone, from now on."""

        def run() -> Plain:
            from shoal_rollout.sampled_ids import restrict_logits

            restrict_logits(self.model_runner.get_model(), num_sampled)

        return _answer(run)

    def shoal_prepare(self, push: Plain, name: str, host: str) -> Plain:
        """Allocate or reuse staging."""

        def run() -> Plain:
            layout, is_complete = _require(self).prepare(PushSection.model_validate(push), name, host)
            return [layout_to_plain(layout), is_complete]

        return _answer(run)

    def shoal_add_buckets(self, plan_hash: str, part: int, buckets: Plain) -> Plain:
        """Learn a part of a plan; buckets by worker rank."""
        return _answer(lambda: _require(self).add_buckets(plan_hash, part, buckets_from_plain(buckets[self.rank])))

    def shoal_plan(self, push_id: str, policy_version: int, plan_hash: str, reception: Plain) -> Plain:
        """Begin to be written to; the ranks that are to be met by worker rank."""

        def run() -> Plain:
            group, address, timeout_s, ranks = reception
            meeting = Reception(group=group, address=address, timeout_s=timeout_s, ranks=ranks[self.rank])
            _require(self).plan(push_id, policy_version, plan_hash, meeting)

        return _answer(run)

    def shoal_start_verify(self, pairs: Plain) -> Plain:
        """Match digests and buckets."""
        return _answer(lambda: _require(self).start_verify(pairs_from_plain(pairs)))

    def shoal_step_verify(self, budget_s: float) -> Plain:
        """Check digests and build packed weights for a while."""
        return _answer(lambda: list(_require(self).step_verify(budget_s)))

    def shoal_commit(self) -> Plain:
        """Swap."""
        return _answer(lambda: _require(self).commit())

    def shoal_start_digest(self, plan_hash: str) -> Plain:
        """Begin to digest the live weights."""
        return _answer(lambda: _require(self).start_digest(plan_hash))

    def shoal_step_digest(self, budget_s: float) -> Plain:
        """Digest live weights for a while."""

        def run() -> Plain:
            is_done, (pieces, staged) = _require(self).step_digest(budget_s)
            return [is_done, pieces_to_plain(pieces), staged]

        return _answer(run)

    def shoal_free(self) -> Plain:
        """Free what a commit replaced."""
        return _answer(lambda: _require(self).free())

    def shoal_drop(self) -> Plain:
        """Give up the current push."""
        return _answer(lambda: _require(self).drop())

    def shoal_close(self) -> Plain:
        """Remove staging."""
        return _answer(lambda: _require(self).close())


def _require(worker: EngineWorker) -> WorkerSink:
    sink: WorkerSink | None = getattr(worker, "shoal_sink", None)
    if sink is None:
        raise StateError("the layout of this worker is not known yet; discover it first")
    return sink


def unlink_shared_memory() -> None:
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
