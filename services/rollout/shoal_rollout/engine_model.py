"""One engine worker's model as a weight push sees it: what it needs, how it is exchanged, and what it computes with now.

copies: every engine parameter is staged whole, in the shape that its loader fills; new forms are built beforehand and the swap sets
references. Only for models whose loading was seen to be copies of boxes (with a cast) and whose processing after loading is known.

reload: anything else. The checkpoint's own tensors are staged, whole and in their own dtype, and one Apply lets the engine load them
during the pause. Proven at the start, on the engine itself; a model that neither way fits is refused then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from vllm.config import set_current_vllm_config

from shoal.errors import ConfigError
from shoal.types import SinkRegion
from shoal.weights.boxes import whole
from shoal_rollout.checkpoint_shapes import meta_checkpoint
from shoal_rollout.engine_parameters import EngineParameter, collect_parameters, record_load, stage_parameters, tensors_read
from shoal_rollout.layer_reload import prove_reload, reload_layers
from shoal_rollout.layout_check import check_layout
from shoal_rollout.live_weights import live_values
from shoal_rollout.load_recorder import Origin
from shoal_rollout.trained_form import as_trained, trained_origins
from shoal_rollout.weight_swap import Apply, check_swappable, prepare_swap, use_live_embeddings

StagedShapes = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and dtype, as the push names it, of what is staged."""


class EngineModel:
    """A loaded model. Not thread-safe: nothing may run on the model during a call.

    Args:
        folder: The checkpoint that the model was loaded from.
        vllm_config: The engine's configuration.
    Raises: ConfigError: the model's weights cannot be exchanged; says why neither way fits.

    Attributes:
        mode: copies: engine parameters are staged; reload: the checkpoint's own tensors are.
        reason: Why the mode is reload; empty otherwise.
        parameters: What is staged.
        regions: Which part of which tensor of the trained model belongs where in a parameter; what none covers is zero.
    """

    mode: Literal["copies", "reload"]
    reason: str
    parameters: StagedShapes
    regions: tuple[SinkRegion, ...]

    def __init__(self, model: nn.Module, folder: Path, vllm_config: Any) -> None:  # noqa: ANN401 - vLLM is not type-checked here
        self._model = model
        self._config = vllm_config
        checkpoint = meta_checkpoint(folder)
        parameters = collect_parameters(model)
        self._by_name = {parameter.name: parameter for parameter in parameters}
        with set_current_vllm_config(vllm_config):
            try:
                self._use_copies(parameters, checkpoint, folder)
            except ConfigError as error:
                self._use_reload(parameters, checkpoint, folder, str(error))
        self._shapes = {name: shape for name, shape, _ in self.parameters}

    def prepare_swap(self, staged: Callable[[str], Tensor], changed: Collection[str]) -> Iterator[Apply | None]:
        """Do the slow part of a swap bit by bit. On a CPU in copies mode it is done when a step returns; else Apply reads staging.

        Args:
            staged: The staged elements of a parameter by name.
            changed: Names of the parameters to exchange; the others keep what they hold.
        Returns: after each step, None or what to call during the pause, in this order, without gradients. It answers what it
            replaced, to be dropped after the pause. In reload mode an Apply that raises leaves the model unusable.
        """
        unknown = set(changed) - self._shapes.keys()
        if unknown:
            msg = f"{sorted(unknown)[0]} is not staged by this model"
            raise ConfigError(msg)
        if self.mode == "reload":
            if changed:
                yield lambda: self._reload(staged)
            return
        yield from prepare_swap([self._by_name[name] for name, _, _ in self.parameters if name in changed], staged)

    def live(self, parameter: str) -> Tensor | None:
        """The values that the model computes with now, in the shape and dtype of staging; None if the engine keeps nothing readable.

        Raises: KeyError: no such parameter.
        """
        shape = self._shapes[parameter]
        if self.mode == "reload":
            return None
        values = live_values(self._by_name[parameter])
        return None if values is None else values.reshape(shape)

    def _use_copies(self, parameters: tuple[EngineParameter, ...], checkpoint: Mapping[str, Tensor], folder: Path) -> None:
        check_swappable(self._model, parameters)
        load = record_load(self._model, parameters, checkpoint)
        check_layout(parameters, stage_parameters(load, parameters), folder)
        staged = stage_parameters(as_trained(load, trained_origins(folder, checkpoint)), parameters)
        use_live_embeddings(self._model)
        self.mode, self.reason = "copies", ""
        self.parameters = tuple((p.name, staged[p.name].shape, _dtype_name(p.meta)) for p in parameters)
        self.regions = tuple(region for p in parameters for region in staged[p.name].regions)

    def _use_reload(self, parameters: tuple[EngineParameter, ...], checkpoint: Mapping[str, Tensor], folder: Path, reason: str) -> None:
        read = tensors_read(self._model, parameters, checkpoint)
        names = [name for name in checkpoint if name in read]
        use_live_embeddings(self._model)
        try:
            _check_floating(checkpoint, names)
            prove_reload(self._model, self._config.model_config, parameters, folder, names)
        except ConfigError as error:
            msg = (
                f"the weights of {type(self._model).__name__} cannot be pushed: in place they cannot be exchanged because {reason}; "
                f"and {error}; serve another model, or this one unquantised"
            )
            raise ConfigError(msg) from error
        self.mode, self.reason = "reload", reason
        origins = trained_origins(folder, checkpoint)
        sources = {name: origins.get(name) or _itself(name, checkpoint[name]) for name in names}
        self._checkpoint = checkpoint
        self.parameters = tuple((name, origin.box.sizes, _dtype_name(checkpoint[name])) for name, origin in sources.items())
        self.regions = tuple(_whole_region(name, origin) for name, origin in sources.items())

    def _reload(self, staged: Callable[[str], Tensor]) -> None:
        with set_current_vllm_config(self._config):
            reload_layers(
                self._model, self._config.model_config, ((name, staged(name).view(self._checkpoint[name].shape)) for name in self._shapes)
            )


def _itself(name: str, tensor: Tensor) -> Origin:
    return Origin(name, tuple(tensor.shape), whole(tensor.shape))


def _whole_region(name: str, origin: Origin) -> SinkRegion:
    return SinkRegion(parameter=name, source_name=origin.name, source_box=origin.box, parameter_box=whole(origin.box.sizes))


def _check_floating(checkpoint: Mapping[str, Tensor], names: Collection[str]) -> None:
    for name in names:
        if not checkpoint[name].is_floating_point():
            msg = f"checkpoint tensor {name} is {_dtype_name(checkpoint[name])}, which a trainer does not have"
            raise ConfigError(msg)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
