"""Exchanges a model's weights for staged ones: all work that takes time happens before the pause.

On a CPU vLLM packs linear weights (oneDNN and other kernels) and drops the plain ones, and packs the experts of a mixture. Therefore packed
weights are built from the staged ones beforehand and the swap sets references. What is not packed (embedding, norms, biases) gets a
private copy whose storage replaces the old one. On other devices the swap copies into the live parameters, since captured graphs hold
their addresses.

Memory on a CPU, beside staging: the weights that are served and, from `prepare_swap` until the swap, the new form of the changed
parameters; both until the caller drops what the swap answered. A tied embedding has two forms, its own and the head's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform

from shoal.errors import ConfigError
from shoal_rollout.engine_parameters import EngineParameter, Holder
from shoal_rollout.expert_weights import is_packed_experts, pack_experts

Apply = Callable[[], object]
"""Swaps one thing and answers what it replaced: freeing large weights takes milliseconds, so the caller does it after the pause."""

_SCALES = ("_k_scale_cpu", "_v_scale_cpu", "_q_scale_cpu")
"""Scales of a quantised key-value cache, which an unquantised model never loads."""


def use_live_embeddings(model: nn.Module) -> None:
    """Drop the packed copies of input embeddings: a look-up never uses them, and a swap would have to rebuild them.

    Where a model has no output head of its own its logits are computed with the embedding, which stays packed then.
    """
    if not any(isinstance(module, ParallelLMHead) for module in model.modules()):
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.cpu_linear = torch.nn.functional.linear


def prepare_swap(parameters: Sequence[EngineParameter], staged: Callable[[str], Tensor]) -> Iterator[Apply]:
    """Do the slow part of a swap bit by bit; each step answers what to call at the commit.

    Args:
        staged: The staged elements of a parameter by name; on a CPU read now, never after the step.
    """
    for parameter in parameters:
        source = staged(parameter.name).view(parameter.meta.shape)
        for holder in parameter.holders:
            if is_packed_linear(holder):
                yield partial(_set_linear, holder.module, _packed(source))
        live = parameter.holders[0].live
        if is_packed_experts(parameter.holders[0].module, parameter.holders[0].attribute):
            yield partial(_set_data, live, pack_experts(parameter.holders[0].module, parameter.holders[0].attribute, source))
        elif live.numel() > 0:
            yield _replace(live, source)


def is_packed_linear(holder: Holder) -> bool:
    """Whether the module computes with a packed form of this parameter."""
    linear = getattr(holder.module, "cpu_linear", None)
    return holder.attribute == "weight" and linear is not None and linear is not torch.nn.functional.linear


def check_swappable(model: nn.Module, parameters: Sequence[EngineParameter]) -> None:
    """Check that every parameter is either live as it was created, or packed in a way that can be built again, and kept nowhere else.

    Raises: ConfigError: names the first layer or parameter of which that is not so.
    """
    if hasattr(model, "process_weights_after_loading"):
        msg = f"{type(model).__name__} derives tensors from its weights after loading"
        raise ConfigError(msg)
    for path, module in model.named_modules():
        if not _is_known(module):
            kind = type(getattr(module, "quant_method", None) or module).__name__
            msg = f"layer {path} ({kind}) transforms its weights after loading"
            raise ConfigError(msg)
    _check_kept_once(model, parameters)
    for parameter in parameters:
        _check_form(parameter)


def _is_known(module: nn.Module) -> bool:
    """Whether it is known what vLLM does to the module's weights after loading."""
    method = getattr(module, "quant_method", None)
    if isinstance(module, QuantizeMethodBase):
        # Methods of experts are modules; what they do is judged at the layer that they serve.
        return True
    if method is None:
        return type(module) is Attention or not hasattr(module, "process_weights_after_loading")
    if isinstance(module, GateLinear):
        return isinstance(method, UnquantizedLinearMethod) and not module.allow_rocm_bf16x3_router_gemm
    if isinstance(module, LinearBase):
        return type(method) is UnquantizedLinearMethod
    if isinstance(module, VocabParallelEmbedding):
        return type(method) is UnquantizedEmbeddingMethod
    return is_packed_experts(module, "w13_weight")


def _check_kept_once(model: nn.Module, parameters: Sequence[EngineParameter]) -> None:
    """Refuse weights that share memory with another tensor, and tensors that a module keeps beside its parameters and buffers."""
    owners: dict[int, str] = {}
    for parameter in parameters:
        live = parameter.holders[0].live
        if live.numel() > 0:
            other = owners.setdefault(live.untyped_storage().data_ptr(), parameter.name)
            if other != parameter.name:
                msg = f"engine parameters {other} and {parameter.name} share memory"
                raise ConfigError(msg)
    for path, module in model.named_modules():
        for name, tensor in kept_tensors(module).items():
            owner = owners.get(tensor.untyped_storage().data_ptr())
            if type(module) is Attention and name in _SCALES:
                continue
            if owner is not None or name not in module._buffers:
                what = f"a view of {owner}" if owner is not None else f"a tensor of {list(tensor.shape)}"
                msg = f"layer {path} ({type(module).__name__}) keeps {what} as {name}, which may come from its weights"
                raise ConfigError(msg)


def kept_tensors(module: nn.Module) -> Mapping[str, Tensor]:
    """Buffers, and floating tensors that a module or its attention keeps in plain attributes; key-value caches are left out."""
    impl = getattr(module, "impl", None)
    plain = {**vars(module), **{f"impl.{name}": value for name, value in (vars(impl) if hasattr(impl, "__dict__") else {}).items()}}
    found = {name: value for name, value in plain.items() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)}
    buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
    return {name: value for name, value in {**found, **buffers}.items() if value.is_floating_point() and name != "kv_cache"}


def _check_form(parameter: EngineParameter) -> None:
    """Raise ConfigError if the parameter is not live as created and in no packed form that can be built again."""
    first = parameter.holders[0]
    live, meta = first.live, first.meta
    is_plain = tuple(live.shape) == tuple(meta.shape) and live.is_contiguous()
    is_dropped = live.numel() == 0 and any(is_packed_linear(holder) for holder in parameter.holders)
    is_linear = all(
        meta.dim() == 2 for holder in parameter.holders if isinstance(holder.module, LinearBase) and holder.attribute == "weight"
    )
    if is_packed_experts(first.module, first.attribute) or ((is_plain or is_dropped) and is_linear):
        return
    msg = f"engine parameter {parameter.name} was created as {list(meta.shape)} and is {list(live.shape)} now"
    raise ConfigError(msg)


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
