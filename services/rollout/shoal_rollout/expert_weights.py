"""Weights of a mixture's experts on a CPU, which vLLM reorders for its grouped matrix product after loading."""

from __future__ import annotations

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
    return cpu_prepack_moe_weight(_padded(module, experts, attribute, weight), experts.isa)  # type: ignore[no-any-return]


def unpack_experts(module: nn.Module, attribute: str, meta: Tensor) -> Tensor | None:
    """Read a packed weight back; None if it is not in an order that `pack_experts` makes.

    Args:
        meta: Shape [E, M, N] and dtype at creation.
    """
    packed = module._parameters[attribute]
    assert packed is not None  # noqa: S101 - asked after is_packed_experts
    order = _order(module, attribute, meta)
    flat = torch.empty((packed.shape[0], order.numel()), dtype=packed.dtype)
    flat[:, order] = packed.data.view(packed.shape[0], -1)
    padded = flat.view(packed.shape)
    weight = _unpadded(module, attribute, padded, meta)
    return weight if _same_bits(pack_experts(module, attribute, weight), packed.data) else None


def _order(module: nn.Module, attribute: str, meta: Tensor) -> Tensor:
    """Where each element of one packed expert comes from: digits of the positions, packed."""
    experts = _experts(module)
    packed = module._parameters[attribute]
    assert experts is not None  # noqa: S101 - as above
    assert packed is not None  # noqa: S101 - as above
    shape = (1, *packed.shape[1:])
    rest = torch.arange(packed[0].numel())
    order, scale = torch.zeros_like(rest), 1
    while scale < packed[0].numel():
        digits = (rest // scale % _DIGIT).to(meta.dtype).view(shape)
        order += cpu_prepack_moe_weight(digits, experts.isa).view(-1).to(torch.int64) * scale
        scale *= _DIGIT
    return order


def _padded(module: nn.Module, experts: Any, attribute: str, weight: Tensor) -> Tensor:  # noqa: ANN401 - vLLM is not type-checked here
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


def _unpadded(module: nn.Module, attribute: str, padded: Tensor, meta: Tensor) -> Tensor:
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
