"""Whether a model can be fed with sequences packed behind one another.

That depends on the model (its positions must restart, and nothing but attention to its own sequence may reach across) and, on a GPU, on a
kernel. Both are tried when a model is loaded, since no list of architectures would be right for long.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.config.gang import GangSection
from shoal.errors import ConfigError
from shoal.telemetry.logs import get_logger
from shoal_trainer.attention import SDPA_VARLEN, attend_by_kernel, may_pack
from shoal_trainer.distributed import RankContext
from shoal_trainer.inputs import pack_rows, pad_rows

log = get_logger(__name__)

_Backbone: TypeAlias = Any

_LENGTHS = [3, 1, 4, 2]
_MODEL_TOLERANCE = 1e-3
_KERNEL_TOLERANCE = 0.05
"""Relative errors; a position that sees another sequence, or counts from another one's start, is off by its own size."""


def choose_packing(backbone: _Backbone, gang: GangSection, context: RankContext) -> bool:
    """Whether this model is fed with packed sequences; the same on every rank. Enters a collective where packing may be used.

    Args:
        backbone: the model without its head, whole and in float32.
    Raises: ConfigError: `packing: on`, and it cannot be.
    """
    is_fused = backbone.config._attn_implementation == SDPA_VARLEN
    # Eager attention over a pack costs the square of it: only where it is asked for.
    if not may_pack(gang, context.device) or (gang.packing == "auto" and not is_fused):
        return False
    fault = _fault(backbone, gang, context.device)
    is_fine_everywhere = context.max_over_ranks(torch.tensor([float(fault is not None)], device=context.device)).item() == 0
    if is_fine_everywhere:
        return True
    reason = "another rank could not" if fault is None else fault
    if gang.packing == "on":
        raise ConfigError(f"packing is 'on', but {type(backbone).__name__} cannot be packed here: {reason}; set it to 'auto' or 'off'")
    log.warning("packing_not_used", model=type(backbone).__name__, reason=reason)
    return False


def model_fault(backbone: _Backbone) -> str | None:
    """Compare packed with padded sequences; None if the model makes the same of both."""
    vocab_size = int(backbone.config.get_text_config().vocab_size)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, vocab_size, length).astype(np.int32) for length in _LENGTHS]
    try:
        with torch.no_grad():
            packed, padded = (backbone(**layout(sequences).arguments()).last_hidden_state for layout in (pack_rows, pad_rows))
    except Exception as error:  # noqa: BLE001 - a model that cannot take borders may fail in any way; padding is still open to it
        return f"its forward fails ({type(error).__name__}: {str(error)[:200]})"
    expected = torch.cat([padded[row, :length] for row, length in enumerate(_LENGTHS)])
    distance = _relative_error(packed[0], expected)
    return None if distance <= _MODEL_TOLERANCE else f"a packed sequence comes out {distance:.1e} off, relative to itself alone"


def kernel_fault(config: Any, device: torch.device) -> str | None:  # noqa: ANN401 - a transformers config
    """Try the kernel forward and backward on random heads of a model; None if it works."""
    num_heads = int(config.num_attention_heads)
    num_key_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    borders = torch.tensor(np.cumsum([0, *_LENGTHS]), dtype=torch.int32, device=device)
    query, key, value = (_random(heads, size, device) for heads in (num_heads, num_key_heads, num_key_heads))
    try:
        output = attend_by_kernel(query, key, value, borders, max(_LENGTHS), scaling=None, window=None)
        output.float().square().sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except (RuntimeError, ValueError) as error:
        return f"the kernel fails ({str(error)[:200]})"
    parts = (torch.split(tensor, _LENGTHS, dim=2) for tensor in (query, key, value))
    expected = torch.cat([_plain(*part) for part in zip(*parts, strict=True)], dim=1)
    distance = _relative_error(output[0].flatten(1), expected[0].flatten(1))
    return None if distance <= _KERNEL_TOLERANCE else f"the kernel is {distance:.1e} off"


def _fault(backbone: _Backbone, gang: GangSection, device: torch.device) -> str | None:
    fault = model_fault(backbone)
    uses_kernel = device.type == "cuda" and gang.precision == "bf16_mixed" and backbone.config._attn_implementation == SDPA_VARLEN
    if fault is not None or not uses_kernel:
        return fault
    return kernel_fault(backbone.config.get_text_config(), device)


def _random(num_heads: int, size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(num_heads)
    values = torch.randn(1, num_heads, sum(_LENGTHS), size, generator=generator)
    return values.to(device, torch.bfloat16).requires_grad_()


def _plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    parts = (query.float(), key.float(), value.float())
    return torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest over positions, [L, H] each."""
    distance = (found.detach().float() - expected.detach().float()).norm(dim=-1)
    return float((distance / expected.detach().float().norm(dim=-1).clamp_min(1e-6)).max())
