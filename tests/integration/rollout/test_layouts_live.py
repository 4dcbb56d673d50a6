"""Packed weights read back through unit vectors are the weights, bit by bit, for every kernel that vLLM may choose on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.staged_copies import as_bytes

_SHAPES = [(64, 32), (8, 64), (16, 32), (101, 128), (128, 101), (1, 64), (33, 7), (48, 2100)]


def _weights(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Random weights of usual, tiny and huge size, and some that make sums inexact."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mixed = torch.where(drawn > 0, drawn * 1e30, drawn * 1e-30)
    return [(drawn * scale).to(dtype) for scale in (1.0, 1e-30, 1e30)] + [mixed.to(dtype)]


def _read_back(weight: Tensor) -> Tensor:
    from shoal_rollout.engine_parameters import EngineParameter, Holder
    from shoal_rollout.live_weights import live_values
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    module = nn.Module()
    module.weight = nn.Parameter(weight.clone(), requires_grad=False)
    module.bias = nn.Parameter(torch.ones(weight.shape[0], dtype=weight.dtype), requires_grad=False)
    dispatch_cpu_unquantized_gemm(module, remove_weight=True)
    live = live_values(EngineParameter("w", (Holder("w", module, "weight", weight.to("meta")),)))
    assert live is not None
    return live


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_live_reads_what_onednn_packed(engine_environment: None, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for weight in _weights(shape, dtype):
        assert as_bytes(_read_back(weight)) == as_bytes(weight)


@pytest.mark.parametrize("shape", [shape for shape in _SHAPES if shape[0] < 16 or (shape[0] % 16 == 0 and shape[1] % 32 == 0)])
def test_live_reads_what_the_kernel_for_small_weights_packed(
    engine_environment: None, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    from vllm.model_executor.layers import utils

    if not hasattr(torch.ops._C, "convert_weight_packed"):
        pytest.skip("this build of vLLM lacks the kernel")
    # vLLM takes it only on processors with AMX; it runs on others as well.
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *arguments: True)
    for weight in _weights(shape, torch.bfloat16):
        assert as_bytes(_read_back(weight)) == as_bytes(weight)


def test_live_shows_where_the_forms_of_a_tied_weight_differ(engine_environment: None) -> None:
    from shoal_rollout.engine_parameters import EngineParameter, Holder
    from shoal_rollout.live_weights import live_values
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head, embedding = nn.Module(), nn.Module()
    shared = nn.Parameter(torch.arange(12.0).view(4, 3), requires_grad=False)
    head.weight = embedding.weight = shared
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    parameter = EngineParameter("w", tuple(Holder("w", module, "weight", shared.to("meta")) for module in (embedding, head)))
    first = live_values(parameter)
    assert first is not None
    assert torch.equal(first, shared.data)
    shared.data[2, 1] = -1.0
    second = live_values(parameter)
    assert second is not None
    assert second.isnan().nonzero().tolist() == [[2, 1]]
