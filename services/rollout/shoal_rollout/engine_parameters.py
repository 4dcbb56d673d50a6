"""The engine model's parameters as they were before vLLM packed them, and where each comes from in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from shoal.errors import ConfigError
from shoal_rollout.load_recorder import LoadRecorder, RecordedLoad
from shoal_rollout.staged_layout import StagedParameter, stage


@dataclass(frozen=True, slots=True)
class Holder:
    """A module that uses a parameter, and under which name.

    meta has the shape, dtype and weight loader that the parameter was created with.
    """

    path: str
    module: nn.Module
    attribute: str
    meta: Tensor

    @property
    def live(self) -> nn.Parameter:
        """What the module computes with now; empty where the weight was packed."""
        parameter = self.module._parameters[self.attribute]
        assert parameter is not None  # noqa: S101 - collect_parameters saw it
        return parameter


@dataclass(frozen=True, slots=True)
class EngineParameter:
    """One parameter: tied ones appear once, under their first name, with several holders."""

    name: str
    holders: tuple[Holder, ...]

    @property
    def meta(self) -> Tensor:
        """Shape and dtype at creation."""
        return self.holders[0].meta


def collect_parameters(model: nn.Module) -> tuple[EngineParameter, ...]:
    """List the parameters of a loaded model that have any element."""
    found: dict[int, list[Holder]] = {}
    for path, module in model.named_modules():
        for attribute, live in module._parameters.items():
            if live is not None:
                name = f"{path}.{attribute}" if path else attribute
                found.setdefault(id(live), []).append(Holder(name, module, attribute, _created_as(module, attribute, live)))
    return tuple(EngineParameter(holders[0].path, tuple(holders)) for holders in found.values() if holders[0].meta.numel() > 0)


def record_load(model: nn.Module, parameters: Sequence[EngineParameter], checkpoint: Mapping[str, Tensor]) -> RecordedLoad:
    """Let the model load its checkpoint's names and shapes, without data.

    The live parameters are put aside meanwhile, so nothing may run on the model.

    Returns: what was written, by path of the holders.
    Raises: ConfigError: the model does something else than copy rectangles.
    """
    holders = {holder.path: holder for parameter in parameters for holder in parameter.holders}
    recorder = LoadRecorder(checkpoint, {path: holder.meta for path, holder in holders.items()})
    with _on_meta(holders.values()), recorder:
        _load(model, recorder.checkpoint.items())
    return recorder.result()


def stage_parameters(load: RecordedLoad, parameters: Sequence[EngineParameter]) -> dict[str, StagedParameter]:
    """Find what to stage for every parameter. Raises: ConfigError: one is left out, or not written exactly once."""
    staged = stage(load, {holder.path: tuple(holder.meta.shape) for parameter in parameters for holder in parameter.holders})
    return {parameter.name: _staged_as(parameter, staged) for parameter in parameters}


def tensors_read(model: nn.Module, parameters: Sequence[EngineParameter], checkpoint: Mapping[str, Tensor]) -> frozenset[str]:
    """Which checkpoint tensors the model's loading looks at; all of them if that cannot be seen without data."""
    recorder = LoadRecorder(checkpoint, {}, watch_only=True)
    with _on_meta([holder for parameter in parameters for holder in parameter.holders]), recorder:
        try:
            _load(model, recorder.checkpoint.items())
        except ConfigError:
            return frozenset(checkpoint)
    return recorder.touched


def _load(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    load: Callable[..., Any] = model.load_weights  # type: ignore[assignment]  # every vLLM model has it
    try:
        load(tensors)
    except ConfigError:
        raise
    except Exception as error:  # a model's own code may raise anything when its tensors hold no data
        msg = f"{type(model).__name__} cannot load tensors without data ({type(error).__name__}: {error})"
        raise ConfigError(msg) from error


def _staged_as(parameter: EngineParameter, staged: Mapping[str, StagedParameter]) -> StagedParameter:
    """What was loaded into the first holder that anything was loaded into; a tied head may be loaded as well, with the same values."""
    for holder in parameter.holders:
        if holder.path in staged:
            found = staged[holder.path]
            regions = tuple(replace(region, parameter=parameter.name) for region in found.regions)
            return StagedParameter(found.shape, regions)
    msg = f"engine parameter {parameter.name} is not loaded from the checkpoint"
    raise ConfigError(msg)


def _created_as(module: nn.Module, attribute: str, live: nn.Parameter) -> Tensor:
    """A fresh meta tensor with the shape, dtype, class and weight loader of the parameter at creation."""
    recorded = get_layerwise_info(module).restore_metadata[0].get(attribute)
    template = live if recorded is None else recorded
    # vLLM does not record biases, and some CPU kernels widen them after loading.
    dtype = getattr(module, "params_dtype", template.dtype) if recorded is None else template.dtype
    meta = torch.empty(template.shape, dtype=dtype, device="meta")
    meta.__class__ = template.__class__
    meta.__dict__ = template.__dict__.copy()
    return restore_layer_refs(meta, module)  # type: ignore[no-any-return]  # vLLM is not type-checked here


@contextmanager
def _on_meta(holders: Iterable[Holder]) -> Iterator[None]:
    live = [(holder, holder.live) for holder in holders]
    try:
        for holder, _ in live:
            holder.module._parameters[holder.attribute] = holder.meta  # type: ignore[assignment]  # a parameter class, on meta
        yield
    finally:
        for holder, parameter in live:
            holder.module._parameters[holder.attribute] = parameter
