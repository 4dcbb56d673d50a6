"""The engine model's parameters as they were before vLLM packed them, and where each comes from in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from shoal.errors import ConfigError
from shoal_rollout.checkpoint_shapes import meta_checkpoint
from shoal_rollout.load_recorder import LoadRecorder, RecordedLoad, check_coverage

_PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@dataclass(frozen=True, slots=True)
class Holder:
    """A module that uses a parameter, and under which name."""

    module: nn.Module
    attribute: str

    @property
    def live(self) -> nn.Parameter:
        """What the module computes with now; empty where the weight was packed."""
        parameter = self.module._parameters[self.attribute]
        assert parameter is not None  # noqa: S101 - collect_parameters saw it
        return parameter


@dataclass(frozen=True, slots=True)
class EngineParameter:
    """One parameter: tied ones appear once, under their first name, with several holders.

    meta has the shape, dtype and weight loader that the model was created with.
    """

    name: str
    meta: Tensor
    holders: tuple[Holder, ...]


def collect_parameters(model: nn.Module) -> tuple[EngineParameter, ...]:
    """List the parameters of a loaded model."""
    found: dict[int, tuple[str, list[Holder]]] = {}
    for path, module in model.named_modules():
        for attribute, live in module._parameters.items():
            if live is not None:
                name = f"{path}.{attribute}" if path else attribute
                found.setdefault(id(live), (name, []))[1].append(Holder(module, attribute))
    return tuple(EngineParameter(name, _created_as(holders[0]), tuple(holders)) for name, holders in found.values())


def record_load(model: nn.Module, parameters: Sequence[EngineParameter], folder: Path) -> RecordedLoad:
    """Let the model load its checkpoint's names and shapes, without data, and record where everything goes.

    The live parameters are put aside meanwhile, so nothing may run on the model.

    Raises: ConfigError: the model does something else than copy rectangles, or leaves a parameter out.
    """
    check_updatable(model)
    recorder = LoadRecorder(meta_checkpoint(folder), {parameter.name: parameter.meta for parameter in parameters})
    with _on_meta(parameters), recorder:
        try:
            model.load_weights(recorder.checkpoint.items())  # type: ignore[operator]  # every vLLM model has it
        except NotImplementedError as error:
            msg = f"{type(model).__name__} computes with weights while it loads them ({error}); it cannot be updated in place yet"
            raise ConfigError(msg) from error
    load = recorder.result()
    check_coverage(load, {parameter.name: tuple(parameter.meta.shape) for parameter in parameters})
    return load


def check_updatable(model: nn.Module) -> None:
    """Refuse models whose weights are transformed after loading in ways that a swap does not repeat.

    Raises: ConfigError: names the first such layer.
    """
    if hasattr(model, "process_weights_after_loading"):
        msg = f"{type(model).__name__} derives tensors from its weights after loading; it cannot be updated in place yet"
        raise ConfigError(msg)
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, MLAAttention) or (method is not None and type(method) not in _PLAIN_METHODS):
            kind = type(module if method is None else method).__name__
            msg = f"layer {path} ({kind}) transforms its weights after loading; quantised, MLA and MoE cannot be updated in place yet"
            raise ConfigError(msg)


def _created_as(holder: Holder) -> Tensor:
    """A fresh meta tensor with the shape, dtype, class and weight loader of the parameter at creation."""
    module, live = holder.module, holder.live
    recorded = get_layerwise_info(module).restore_metadata[0].get(holder.attribute)
    template = live if recorded is None else recorded
    # vLLM does not record biases, and some CPU kernels widen them after loading.
    dtype = getattr(module, "params_dtype", template.dtype) if recorded is None else template.dtype
    meta = torch.empty(template.shape, dtype=dtype, device="meta")
    meta.__class__ = template.__class__
    meta.__dict__ = template.__dict__.copy()
    return restore_layer_refs(meta, module)  # type: ignore[no-any-return]  # vLLM is not type-checked here


@contextmanager
def _on_meta(parameters: Sequence[EngineParameter]) -> Iterator[None]:
    live: Mapping[tuple[int, str], nn.Parameter] = {
        (id(holder.module), holder.attribute): holder.live for parameter in parameters for holder in parameter.holders
    }
    try:
        for parameter in parameters:
            for holder in parameter.holders:
                holder.module._parameters[holder.attribute] = parameter.meta  # type: ignore[assignment]  # a parameter class, on meta
        yield
    finally:
        for parameter in parameters:
            for holder in parameter.holders:
                holder.module._parameters[holder.attribute] = live[id(holder.module), holder.attribute]
