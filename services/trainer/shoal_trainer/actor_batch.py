"""What the actor keeps of a batch between its commands.

Legend: B records of a micro-batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal.types import Batch
from shoal_trainer.batching import MicroBatch
from shoal_trainer.loading import MiniBatches


@dataclass(slots=True, kw_only=True)
class ActorMicroBatch:
    """A micro-batch and what was computed for it; all [B, T] unless said.

    loss_mask: tokens whose loss counts; a part of the trained ones.
    logprobs, entropies: of the policy at the forward; with a graph only if it is kept.
    old_logprobs: what the ratio is measured against.
    ref_logprobs: of the reference, if there is one.
    importance: weights of the policy loss; None is 1.
    kept: [B] bool, responses that are not rejected; None is all.
    advantages: None until they are computed.
    """

    batch: MicroBatch
    loss_mask: Tensor
    logprobs: Tensor
    entropies: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    importance: Tensor | None = None
    kept: Tensor | None = None
    advantages: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class ActorStep:
    """The current step. kl_loss_coef: of this step's update. metrics: of the forward."""

    batch: Batch
    mini_batches: MiniBatches
    micro_batches: Sequence[ActorMicroBatch]
    has_graph: bool
    kl_loss_coef: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def batches(self) -> list[MicroBatch]:
        """The micro-batches as they were read."""
        return [micro.batch for micro in self.micro_batches]
