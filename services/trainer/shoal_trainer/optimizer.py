"""AdamW on sharded parameters with global-norm clipping, and the rule for updates that must not happen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shoal.algo.gradients import clip_coefficient, global_grad_norm
from shoal.algo.schedule import learning_rate
from shoal.config.gang import GangSection
from shoal.telemetry.logs import get_logger
from shoal_trainer.distributed import RankContext

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one optimizer step did: the same on every rank. applied: False if it was skipped. grad_norm: before clipping."""

    applied: bool
    grad_norm: float
    lr: float


class Optimizer:
    """One gang's optimizer on one rank.

    A step whose gradient is not finite on any rank is skipped on all: parameters, moments and the schedule stay as they are. So is a
    step without any gradient at all (its norm is 0): old moments or weight decay would move the parameters for no reason.

    Args:
        parameters: of the module; frozen ones are left out.
        planned_updates: optimizer steps of the whole run, over which a falling learning rate falls.
    """

    def __init__(self, parameters: Iterable[Tensor], gang: GangSection, context: RankContext, *, planned_updates: int) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._planned_updates = planned_updates
        if gang.warmup_steps >= planned_updates and context.rank == 0:
            log.warning("warmup_is_whole_run", warmup_steps=gang.warmup_steps, planned_updates=planned_updates)
        self._gang = gang
        self._context = context
        # Fused is the fastest of the implementations on a CPU too.
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=gang.lr, betas=gang.betas, eps=gang.eps, weight_decay=gang.weight_decay, fused=True
        )
        self.num_updates = 0
        self.num_skipped = 0

    @property
    def lr(self) -> float:
        """Rate of the next update."""
        return learning_rate(
            self.num_updates,
            lr=self._gang.lr,
            warmup_steps=self._gang.warmup_steps,
            total_steps=self._planned_updates,
            schedule=self._gang.lr_schedule,
            min_share=self._gang.min_lr_share,
        )

    def step(self) -> StepOutcome:
        """Clip the gradients, update the parameters, drop the gradients."""
        gradients = [_local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        norm = float(global_grad_norm(gradients, self._context.sum_over_ranks))
        outcome = StepOutcome(applied=math.isfinite(norm) and norm > 0, grad_norm=norm, lr=self.lr)
        if outcome.applied:
            self._update(gradients, clip_coefficient(norm, self._gang.max_grad_norm), outcome.lr)
        else:
            self.num_skipped += 1
        self.zero_grad()
        return outcome

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def warm_up(self) -> None:
        """Drop all gradients, and make one update of a throw-away parameter that is sharded like the real ones."""
        self.zero_grad()
        scratch = torch.nn.Parameter(distribute_tensor(torch.zeros(self._context.world_size), self._context.mesh, [Shard(0)]))
        scratch.grad = torch.zeros_like(scratch)
        torch.optim.AdamW([scratch], lr=0.0, fused=True).step()

    def _update(self, gradients: list[Tensor], coefficient: float, lr: float) -> None:
        if coefficient < 1.0:
            torch._foreach_mul_(gradients, coefficient)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.num_updates += 1


def _local(tensor: Tensor) -> Tensor:
    """This rank's part; arithmetic on it skips DTensor's dispatch."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
