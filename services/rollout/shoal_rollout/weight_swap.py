"""Exchanges a model's weights for staged ones: all work that takes time happens before the pause.

On a CPU vLLM packs linear weights (oneDNN and other kernels) and drops the plain ones, therefore packed handles are built from the staged
weights beforehand and the swap sets references. What is not packed (embedding, norms, biases) gets a private copy whose storage replaces
the old one. On other devices the swap copies into the live parameters, since captured graphs hold their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from shoal.errors import ConfigError
from shoal_rollout.engine_parameters import EngineParameter, Holder

Apply = Callable[[], object]
"""Swaps one thing and answers what it replaced: freeing large weights takes milliseconds, so the caller does it after the pause."""

_UNIT_VECTORS = 256
"""Rows of a packed weight's input that are read at once."""


def use_live_embeddings(model: nn.Module) -> None:
    """Drop the packed copies of input embeddings: a look-up never uses them, and a swap would have to rebuild them."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.cpu_linear = torch.nn.functional.linear


def prepare_swap(parameters: Sequence[EngineParameter], staged: Callable[[str], Tensor]) -> Iterator[Apply]:
    """Do the slow part of a swap bit by bit; each step answers what to call at the commit.

    Args:
        staged: The staged elements of a parameter by name; read now, never after the step.
    """
    for parameter in parameters:
        source = staged(parameter.name)
        for holder in parameter.holders:
            if _is_packed(holder):
                yield partial(_set_linear, holder.module, _packed(source))
        live = parameter.holders[0].live
        if live.numel() > 0:
            yield _replace(live, source)


def live_values(parameter: EngineParameter) -> Tensor | None:
    """What the model computes with now: every packed linear applied to unit vectors, or the live tensor."""
    packed = [holder for holder in parameter.holders if _is_packed(holder)]
    if packed:
        return _unpacked(packed[0], parameter)
    live = parameter.holders[0].live
    return live.data.to(parameter.meta.dtype) if live.numel() == parameter.meta.numel() else None


def _unpacked(holder: Holder, parameter: EngineParameter) -> Tensor:
    """Read a packed weight: products with 0 and 1 and their sums are exact for finite weights."""
    num_outputs, num_inputs = parameter.meta.shape
    linear: Any = holder.module.cpu_linear
    weight = torch.empty((num_outputs, num_inputs), dtype=parameter.meta.dtype)
    for start in range(0, num_inputs, _UNIT_VECTORS):
        end = min(start + _UNIT_VECTORS, num_inputs)
        units = torch.zeros((end - start, num_inputs), dtype=parameter.meta.dtype)
        units[range(end - start), range(start, end)] = 1
        weight[:, start:end] = linear(units, holder.live, None).t()
    return weight


def check_swappable(parameters: Sequence[EngineParameter]) -> None:
    """Check that every parameter is either live as it was created, or packed in a way that can be built again.

    Raises: ConfigError: names the first parameter that is neither.
    """
    for parameter in parameters:
        live = parameter.holders[0].live
        is_plain = tuple(live.shape) == tuple(parameter.meta.shape) and live.is_contiguous()
        is_dropped = live.numel() == 0 and any(_is_packed(holder) for holder in parameter.holders)
        if parameter.meta.numel() > 0 and not is_plain and not is_dropped:
            msg = (
                f"engine parameter {parameter.name} was created as {list(parameter.meta.shape)} and is {list(live.shape)} now; "
                "weights that are changed after loading cannot be updated in place yet"
            )
            raise ConfigError(msg)


def _is_packed(holder: Holder) -> bool:
    linear = getattr(holder.module, "cpu_linear", None)
    return holder.attribute == "weight" and linear is not None and linear is not torch.nn.functional.linear


def _packed(weight: Tensor) -> Callable[..., Tensor]:
    """Build the linear that vLLM itself would choose for this weight."""
    if current_platform.is_zen_cpu():
        # Its kernel may keep the tensor it is given.
        weight = weight.clone()
    shadow = nn.Module()
    shadow.weight = nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(shadow, remove_weight=False)
    linear: Any = shadow.cpu_linear
    return linear  # type: ignore[no-any-return]  # an attribute that vLLM adds


def _replace(live: nn.Parameter, source: Tensor) -> Apply:
    if live.device.type == "cpu":
        return partial(_set_data, live, source.to(dtype=live.dtype, copy=True))
    return partial(_copy_data, live, source)


def _set_linear(module: nn.Module, linear: Callable[..., Tensor]) -> object:
    replaced = module.cpu_linear
    module.cpu_linear = linear  # type: ignore[assignment]  # an attribute that vLLM adds
    return replaced


def _set_data(live: nn.Parameter, data: Tensor) -> object:
    replaced = live.data
    live.data = data
    return replaced


def _copy_data(live: nn.Parameter, source: Tensor) -> object:
    live.data.copy_(source)
    return None
