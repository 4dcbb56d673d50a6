"""Weights of a mixture's experts on a CPU, which vLLM reorders for its grouped matrix product after loading."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

_WEIGHTS = ("w13_weight", "w2_weight")
_DIGIT = 128
"""Base of the digits that numbers are packed in; bfloat16 holds integers up to 256 exactly."""


def is_packed_experts(module: nn.Module, attribute: str) -> bool:
    """Whether this is an expert weight in the CPU's order, which `pack_experts` can make again."""
    experts = _experts(module)
    return experts is not None and attribute in _WEIGHTS


def pack_experts(module: nn.Module, attribute: str, weight: Tensor) -> Tensor:
    """Do what vLLM does after loading: pad the intermediate size and reorder.

    Args:
        weight: [E, M, N] as it was loaded; stays as it is.
    Returns: the new packed weight, in memory of its own.
    """
    experts = _experts(module)
    assert experts is not None  # noqa: S101 - asked after is_packed_experts
    return cpu_prepack_moe_weight(_padded(experts, attribute, weight), experts.isa)  # type: ignore[no-any-return]


def unpack_experts(module: nn.Module, attribute: str, meta: Tensor, first: int, count: int) -> Tensor | None:
    """Read some experts' packed weights back; None if they are not in an order that `pack_experts` makes.

    Args:
        meta: Shape [E, M, N] and dtype at creation.
        first, count: Which experts.
    Returns: [count, M, N], new.
    """
    experts, live = _experts(module), module._parameters[attribute]
    assert experts is not None  # noqa: S101 - asked after is_packed_experts
    assert live is not None  # noqa: S101 - as above
    order = _order(experts.isa, tuple(live.shape[1:]), meta.dtype)
    weight = torch.empty((count, *meta.shape[1:]), dtype=meta.dtype)
    # One after another, so that no second copy of all experts is held.
    for expert in range(count):
        packed = live.data[first + expert : first + expert + 1]
        flat = torch.empty(order.numel(), dtype=packed.dtype)
        flat[order] = packed.reshape(-1)
        one = _unpadded(attribute, flat.view(packed.shape), meta)
        if not _same_bits(pack_experts(module, attribute, one), packed):
            return None
        weight[expert] = one[0]
    return weight


def forget_orders() -> None:
    """Free what unpacking remembers of the kernel's order: 8 bytes for each element of an expert."""
    _order.cache_clear()


@lru_cache(maxsize=2)
def _order(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Where each element of one packed expert comes from: digits of the positions, packed."""
    positions = torch.arange(math.prod(shape))
    order, scale = torch.zeros_like(positions), 1
    while scale < positions.numel():
        digits = (positions // scale % _DIGIT).to(dtype).view(1, *shape)
        order += cpu_prepack_moe_weight(digits, isa).view(-1).to(torch.int64) * scale
        scale *= _DIGIT
    return order


def _padded(experts: Any, attribute: str, weight: Tensor) -> Tensor:  # noqa: ANN401 - vLLM is not type-checked here
    """The weight with its intermediate size padded by vLLM's own code, which wants both weights of a layer."""
    shadow = nn.Module()
    num_experts, hidden_size = weight.shape[0], weight.shape[2 if attribute == "w13_weight" else 1]
    intermediate_size = weight.shape[1] // 2 if attribute == "w13_weight" else weight.shape[2]
    shapes = {"w13_weight": (num_experts, 2 * intermediate_size, hidden_size), "w2_weight": (num_experts, hidden_size, intermediate_size)}
    for name, shape in shapes.items():
        tensor = weight if name == attribute else torch.empty(shape, dtype=weight.dtype, device="meta")
        shadow.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    experts._pad_moe_intermediate(shadow)
    padded: Tensor = getattr(shadow, attribute).data
    return padded


def _unpadded(attribute: str, padded: Tensor, meta: Tensor) -> Tensor:
    """Undo `_padded`."""
    if padded.shape == meta.shape:
        return padded
    if attribute == "w2_weight":
        return padded[..., : meta.shape[2]].contiguous()
    half, wide = meta.shape[1] // 2, padded.shape[1] // 2
    return torch.cat([padded[:, :half], padded[:, wide : wide + half]], dim=1)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _experts(module: nn.Module) -> CPUUnquantizedExperts | None:
    """The kernel of a layer of experts, if it does to the weights what is known here."""
    method: Any = getattr(module, "quant_method", None)
    if not isinstance(module, RoutedExperts) or type(method) is not UnquantizedFusedMoEMethod or method.moe_kernel is None:
        return None
    experts = method.moe_kernel.fused_experts
    is_known = type(experts).process_weights_after_loading is CPUUnquantizedExperts.process_weights_after_loading
    return experts if is_known and not getattr(experts, "_use_zentorch", True) else None
