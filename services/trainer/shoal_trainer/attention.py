"""Which attention implementation a model is loaded with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.config.gang import GangSection

FLOAT32_ON_CPU = "sdpa_float32"


def attention_implementation(gang: GangSection, device: torch.device) -> str:
    """Name for `attn_implementation`; a fused one, which needs no mask for causal attention.

    The CPU's fused backward in bfloat16 is 3 to 10 times slower than in float32 for sequences of up to some hundred tokens, so there
    attention itself is computed in float32.
    """
    if device.type != "cpu" or gang.precision == "float32":
        return "sdpa"
    _register()
    return FLOAT32_ON_CPU


def _register() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,  # noqa: ANN401 - whatever the model passes on
    ) -> tuple[Tensor, None]:
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
        output, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, **options)
        return output.to(query.dtype), None

    ALL_ATTENTION_FUNCTIONS.register(FLOAT32_ON_CPU, forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(FLOAT32_ON_CPU, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
