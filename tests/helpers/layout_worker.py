"""Worker extension for tests: a push into every worker without server and transports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.staged_copies import live_bytes, stage_copies, swap, trained_tensors

if TYPE_CHECKING:
    from shoal_rollout.engine_model import EngineModel


class LayoutWorker:
    """Mixed into every engine worker."""

    layout_model: EngineModel
    model_runner: Any
    vllm_config: Any

    def layout_discover(self, folder: str) -> list[Any]:
        """Find the layout; answers its mode and how many elements are staged here."""
        # vLLM imports this module before it can choose a platform.
        from shoal_rollout.engine_model import EngineModel
        from shoal_rollout.engine_worker import unlink_shared_memory

        # vLLM leaves it behind when the workers end.
        unlink_shared_memory()
        self.layout_model = EngineModel(self.model_runner.get_model(), Path(folder), self.vllm_config)
        num_elements = sum(_num_elements(shape) for _, shape, _ in self.layout_model.parameters)
        return [self.layout_model.mode, num_elements]

    def layout_swap(self, folder: str) -> bool:
        """Stage a checkpoint folder and swap; answers whether the live weights are the staged ones afterwards, where they can be read."""
        staged = stage_copies(self.layout_model, trained_tensors(Path(folder)))
        swap(self.layout_model, staged)
        if self.layout_model.mode == "reload":
            return True
        return live_bytes(self.layout_model) == {name: tensor.view(-1).numpy().tobytes() for name, tensor in staged.items()}


def _num_elements(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
