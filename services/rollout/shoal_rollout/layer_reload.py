"""Exchanges weights through vLLM's own layerwise reload, for models whose loading is more than copies of boxes.

All of the checkpoint's tensors are staged as they are, on every worker: with tensor parallelism each worker gets whole tensors, so
staging and the bytes sent grow with the number of workers. Loading and packing happen during the pause.

vLLM's reload leaves some layers as they were (a tied head's packed form; on a CPU the order of a mixture's experts). What is known is
mended here; and `prove_reload` tries the reload on the engine itself before anything relies on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from shoal.errors import ConfigError
from shoal.weights.transports.pieces import digest_of
from shoal_rollout.checkpoint_shapes import read_tensors
from shoal_rollout.engine_parameters import EngineParameter, Holder
from shoal_rollout.weight_swap import is_packed_linear, kept_tensors, use_live_embeddings

_NUM_PROBES = 4


def reload_layers(model: nn.Module, model_config: Any, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:  # noqa: ANN401 - vLLM is untyped here
    """Load checkpoint tensors into a live model; nothing may run on it meanwhile.

    Returns: names of the engine parameters that were loaded.
    Raises: whatever the model's loading raises; the model is then unusable.
    """
    _narrow_biases(model)
    initialize_layerwise_reload(model)
    loaded: set[str] | None = model.load_weights(tensors)  # type: ignore[operator]  # every vLLM model has it
    finalize_layerwise_reload(model, model_config)
    finish: Callable[[], None] | None = getattr(model, "process_weights_after_loading", None)
    if finish is not None:
        finish()
    _repack_embeddings(model)
    return set() if loaded is None else set(loaded)


def prove_reload(
    model: nn.Module,
    model_config: Any,  # noqa: ANN401 - vLLM is untyped here
    parameters: Sequence[EngineParameter],
    folder: Path,
    names: Iterable[str],
) -> None:
    """Reload other values and then the checkpoint's own: everything must change, and come back bit by bit.

    Raises: ConfigError: names what did not; the model is unusable then.
    """
    before = _state(model, parameters)
    chosen = set(names)
    try:
        loaded = reload_layers(model, model_config, ((name, _altered(tensor)) for name, tensor in read_tensors(folder) if name in chosen))
        altered = _state(model, parameters)
        reload_layers(model, model_config, ((name, tensor) for name, tensor in read_tensors(folder) if name in chosen))
    except Exception as error:  # a model's own code may raise anything
        msg = f"the engine's layerwise reload fails ({type(error).__name__}: {error})"
        raise ConfigError(msg) from error
    after = _state(model, parameters)
    _check_all_loaded(parameters, loaded)
    for name, digest in before.items():
        if after.get(name) != digest:
            msg = f"{name} is not restored by the engine's layerwise reload"
            raise ConfigError(msg)
    for parameter in parameters:
        stuck = [form for form in _forms(parameter) if altered[form] == before[form]]
        if stuck:
            msg = f"{stuck[0]} is not changed by the engine's layerwise reload"
            raise ConfigError(msg)


def _check_all_loaded(parameters: Sequence[EngineParameter], loaded: set[str]) -> None:
    for parameter in parameters:
        if loaded and not any(holder.path in loaded for holder in parameter.holders):
            msg = f"engine parameter {parameter.name} is not loaded from the checkpoint"
            raise ConfigError(msg)


def _narrow_biases(model: nn.Module) -> None:
    """Some CPU kernels widen a layer's bias after loading; load it with the precision that it was created with."""
    for module in model.modules():
        bias = module._parameters.get("bias") if isinstance(module, LinearBase) else None
        if bias is not None and bias.dtype != module.params_dtype:
            bias.data = bias.data.to(module.params_dtype)


def _repack_embeddings(model: nn.Module) -> None:
    """vLLM repacks what it loaded; a tied head is loaded through the embedding and keeps its old form."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
    use_live_embeddings(model)


def _altered(tensor: Tensor) -> Tensor:
    """Other values of a similar size, everywhere, in no simple relation to the old ones."""
    if not tensor.is_floating_point():
        return tensor
    wave = torch.arange(tensor.numel(), dtype=torch.float32).mul_(math.e).sin_().view(tensor.shape)
    return (tensor.float() * 0.75 + 0.125 + 0.0625 * wave).to(tensor.dtype)


def _state(model: nn.Module, parameters: Sequence[EngineParameter]) -> dict[str, int]:
    """Digests of everything that comes from weights: parameters, buffers, tensors kept beside them, packed forms."""
    state: dict[str, int] = {}
    for parameter in parameters:
        state.update({form: _digest(read()) for form, read in _forms(parameter).items()})
    for path, module in model.named_modules():
        for name, tensor in kept_tensors(module).items():
            state[f"tensor {path}.{name}"] = _digest(tensor)
    return state


def _forms(parameter: EngineParameter) -> Mapping[str, Callable[[], Tensor]]:
    """The forms in which an engine keeps a parameter; a packed one is told by what it makes of fixed vectors."""
    first = parameter.holders[0]
    packed = [holder for holder in parameter.holders if is_packed_linear(holder)]
    forms: dict[str, Callable[[], Tensor]] = {
        f"packed form of engine parameter {holder.path}": partial(_probe, holder) for holder in packed
    }
    if first.live.numel() > 0:
        forms[f"engine parameter {parameter.name}"] = lambda: first.live.data
    return forms


def _probe(holder: Holder) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn((_NUM_PROBES, holder.meta.shape[1]), generator=generator).to(holder.meta.dtype)
    linear: Any = holder.module.cpu_linear
    return linear(vectors, holder.live, None)  # type: ignore[no-any-return]  # a callable that vLLM adds


def _digest(tensor: Tensor) -> int:
    return digest_of([tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)], "uint8")
