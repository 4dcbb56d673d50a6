"""One engine worker's model as a weight push sees it: what it needs, how it is exchanged, and what it computes with now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from vllm.config import set_current_vllm_config

from shoal.types import SinkRegion
from shoal_rollout.engine_parameters import collect_parameters, record_load
from shoal_rollout.weight_swap import Apply, check_swappable, live_values, prepare_swap, use_live_embeddings


class EngineModel:
    """A loaded model. Not thread-safe: nothing may run on the model during a call.

    Args:
        folder: The checkpoint that the model was loaded from.
        vllm_config: The engine's configuration.
    Raises: ConfigError: the model's weights cannot be exchanged.
    """

    mode: Literal["copies", "reload"]
    """copies: engine parameters are staged; reload: the checkpoint's own tensors are, and the engine loads them."""
    reason: str
    """Why the mode is reload."""
    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    """Name, shape and dtype of what is staged."""
    regions: tuple[SinkRegion, ...]
    """Which part of which checkpoint tensor belongs where in a parameter; everything else of it is zero."""

    def __init__(self, model: nn.Module, folder: Path, vllm_config: Any) -> None:  # noqa: ANN401 - vLLM is not type-checked here
        self._config = vllm_config
        self._parameters = collect_parameters(model)
        with set_current_vllm_config(vllm_config):
            load = record_load(model, self._parameters, folder)
        use_live_embeddings(model)
        check_swappable(self._parameters)
        self.mode, self.reason = "copies", ""
        self.parameters = tuple((p.name, tuple(p.meta.shape), str(p.meta.dtype).removeprefix("torch.")) for p in self._parameters)
        self.regions = load.regions

    def prepare_swap(self, staged: Callable[[str], Tensor], changed: Collection[str]) -> Iterator[Apply | None]:
        """Do the slow part of a swap bit by bit.

        Args:
            staged: The staged elements of a parameter by name.
            changed: Names of the parameters to exchange; the others keep what they hold.
        Returns: after each step, None or what to call during the pause, in this order, without gradients.
        """
        with set_current_vllm_config(self._config):
            yield from prepare_swap([parameter for parameter in self._parameters if parameter.name in changed], staged)

    def live(self, parameter: str) -> Tensor | None:
        """The values that the model computes with now, in the shape and dtype of staging; None if the engine keeps nothing readable.

        Raises: KeyError: no such parameter.
        """
        return live_values(next(p for p in self._parameters if p.name == parameter))
