"""Which attention a model is loaded with, and attention over packed sequences.

Legend: L positions of a pack, Hq query heads, Hk key and value heads, D size of a head.

A model calls attention by a name that is registered with transformers, and hands on the borders of packed sequences that it was called
with. Half precision on a GPU goes to torch's kernel for sequences of different lengths; everything else, float32 on a GPU as well, is
computed sequence by sequence, so that no position costs more than its own sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from shoal.config.gang import GangSection
from shoal.errors import ConfigError

SDPA_FLOAT32 = "sdpa_float32"
SDPA_VARLEN = "sdpa_varlen"
"""Names of the own implementations; with sdpa in the name, transformers refuses models that sdpa is wrong for."""

_UNSUPPORTED = ("softcap", "s_aux", "sinks")
"""What some models ask of their attention beyond masks, and neither sdpa nor the kernel computes."""
_UNSUPPORTED_PACKED = (*_UNSUPPORTED, "position_bias")
_HALF = (torch.bfloat16, torch.float16)


def attention_implementation(
    gang: GangSection,
    device: torch.device,
    config: Any,  # noqa: ANN401 - transformers is untyped
    *,
    has_sdpa: bool = True,
) -> str:
    """Name for `attn_implementation`.

    auto is the fused attention, except for models that cap the logits of their attention or have sinks: only eager does that.
    The CPU's fused backward in bfloat16 is 3 to 10 times slower than in float32 for sequences of up to some hundred tokens, so there
    attention itself is computed in float32.

    Args:
        config: the model's text configuration.
        has_sdpa: the model's class allows fused attention.
    Raises: ConfigError: sdpa for a model that needs eager.
    """
    softcap = getattr(config, "attn_logit_softcapping", None)
    needs_eager = softcap is not None or not has_sdpa
    if softcap is not None and gang.attention == "sdpa":
        raise ConfigError(
            f"attention is 'sdpa', which leaves out the model's attn_logit_softcapping={softcap}; set it to 'eager' or 'auto'"
        )
    if gang.attention == "eager" or (gang.attention == "auto" and needs_eager):
        return "eager"
    _register()
    if may_pack(gang, device):
        return SDPA_VARLEN
    return SDPA_FLOAT32 if device.type == "cpu" and gang.precision != "float32" else "sdpa"


def may_pack(gang: GangSection, device: torch.device) -> bool:
    """Whether packing is asked for, or automatic and worth while: where the kernel may work."""
    if gang.packing == "auto":
        return gang.attention != "eager" and device.type == "cuda" and gang.precision == "bf16_mixed"
    return gang.packing == "on"


def attend_by_kernel(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, max_length: int, *, scaling: float | None, window: int | None
) -> Tensor:
    """Causal attention within each of the packed sequences by one kernel.

    Args:
        query: [1, Hq, L, D], half precision, on a GPU; key and value: [1, Hk, L, D].
        borders: [B + 1] int32.
        max_length: longest sequence.
        window: positions that one sees, itself included; None is all before it.
    Returns: [1, L, Hq, D].
    """
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = varlen_attn(
        query,
        key,
        value,
        borders,
        borders,
        max_length,
        max_length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor), "no auxiliary output was asked for"  # noqa: S101
    return output[None]


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401 - whatever the model passes on
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [1, Hq, L, D] and borders, or [R, Hq, L, D] and a mask, to [R, L, Hq, D]."""
    _check(options, query, value)
    borders = options.pop("cu_seq_lens_q", None)
    if borders is None:
        return _attend_rows(module, query, key, value, attention_mask, **options)
    window = options.pop("sliding_window", None)
    _check_window(attention_mask, window, borders)
    if query.is_cuda and query.dtype in _HALF:
        longest, scaling = options["max_length_q"], options.get("scaling")
        return attend_by_kernel(query, key, value, borders, longest, scaling=scaling, window=window), None
    lengths = borders.diff().tolist()
    # Splitting, not slicing: the gradient of a slice is as large as the pack, for every sequence of it.
    parts = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [_attend_rows(module, q, k, v, _window_mask(q, window), **options)[0] for q, k, v in parts]
    return torch.cat(outputs, dim=1), None


def _attend_rows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401 - whatever the model passes on
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    dtype = query.dtype
    if not query.is_cuda:
        query, key, value = query.float(), key.float(), value.float()
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output.to(dtype), None


def _window_mask(query: Tensor, window: int | None) -> Tensor | None:
    """[1, 1, n, n] bool for a sequence that is longer than the window; None where causal attention needs no mask."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=query.device)
    distance = places[:, None] - places[None, :]
    return ((distance >= 0) & (distance < window))[None, None]


def _check(options: Mapping[str, Any], query: Tensor, value: Tensor) -> None:
    is_packed = options.get("cu_seq_lens_q") is not None
    asked = [name for name in (_UNSUPPORTED_PACKED if is_packed else _UNSUPPORTED) if options.get(name) is not None]
    if asked:
        raise ConfigError(f"the model's attention needs {', '.join(asked)}, which fused attention leaves out; set attention to 'eager'")
    if is_packed and query.shape[-1] != value.shape[-1]:
        raise ConfigError(f"query heads have size {query.shape[-1]}, value heads {value.shape[-1]}; packing needs equal ones")


def _check_window(attention_mask: Tensor | None, window: int | None, borders: Tensor) -> None:
    """The window of the mask, which `_mask` answers in place of a mask, must be the one that attention is told of."""
    is_marker = attention_mask is not None and attention_mask.ndim == 0
    masked = int(attention_mask) if is_marker else None  # type: ignore[arg-type]  # is_marker excludes None
    if borders.numel() > 2 and masked != window:
        raise ConfigError(f"the model masks a window of {masked} but tells its attention of {window}; packing needs the same")


def _mask(
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    local_size: int | None = None,
    **options: Any,  # noqa: ANN401 - whatever transformers passes on
) -> Tensor | None:
    """The mask of transformers; for packed sequences, which have borders, none of [L, L] but at most the size of a window.

    transformers knows packed sequences by position ids that restart, and forbids to skip their mask.
    """
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None and not allow_is_causal_skip and not use_vmap:
        return None if local_size is None else torch.tensor(local_size)
    own = {"attention_mask": attention_mask, "allow_is_causal_skip": allow_is_causal_skip, "use_vmap": use_vmap, "local_size": local_size}
    mask: Tensor | None = sdpa_mask(**own, **options)
    return mask


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(SDPA_FLOAT32, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(SDPA_FLOAT32, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    ALL_ATTENTION_FUNCTIONS.register(SDPA_VARLEN, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(SDPA_VARLEN, _mask)
