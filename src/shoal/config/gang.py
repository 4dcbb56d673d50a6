"""Settings of a trainer gang."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from shoal.config.base import Section


class LoraSection(Section):
    """Low-rank adapters: W + alpha / rank * B A, A and B trained, W frozen.

    There is no dropout: it would make the first ratio differ from 1.
    """

    rank: int = Field(default=16, ge=1)
    """Inner dimension of an adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of an adapter, divided by the rank."""
    target_modules: tuple[str, ...] = ()
    """Names of linear layers that get an adapter, such as q_proj; empty: all linear layers of the decoder blocks."""


class GangSection(Section):
    """One trainer gang (actor or critic)."""

    ranks: int = Field(default=1, ge=1)
    """Processes of the gang."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay at the peak, or fall to lr x min_lr_share at the end of the run."""
    min_lr_share: float = Field(default=0.0, ge=0, le=1)
    """Where a falling rate ends, as a part of the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW moment decay."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm is clipped to this."""
    precision: Literal["float32", "bf16_mixed"] = "float32"
    """Compute dtype; master weights and moments stay float32."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Most padded tokens (prompt + response) in a forward pass of one rank."""
    retain_graph_tokens: int = Field(default=32768, ge=0)
    """Up to this many tokens per rank, the graph of the first forward is kept for the update: no second forward, ratio exactly 1."""
    reshard_after_forward: bool = True
    """Drop gathered parameters after a forward and gather them again for the backward (ZeRO-3); off keeps them (ZeRO-2)."""
    activation_checkpointing: bool = False
    """Keep only the inputs of decoder blocks and compute the rest again in the backward."""
    offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory; for a GPU."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention kernel: auto is the fused one; eager for models whose attention no fused kernel computes."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Put sequences behind one another without padding; auto: on a GPU, where the kernel takes borders. Off pads rows of similar
    length."""
    lora: LoraSection | None = None
    """Train low-rank adapters in place of the weights (actor only)."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per rank; ignored on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ranks compute."""
    collective_timeout_s: float = Field(default=120.0, gt=0)
    """A collective that waits longer fails the gang."""
    command_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one forward or update command."""

    @field_validator("packing", mode="before")
    @classmethod
    def _unquoted(cls, value: object) -> object:
        """YAML reads a bare on or off as a bool."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value
