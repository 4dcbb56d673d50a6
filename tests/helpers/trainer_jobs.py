"""What test ranks run: several scenarios in one gang, since starting ranks takes longer than all of them.

Rank 0 leaves `<folder>/result.pt` (tensors and numbers only).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from shoal_trainer.distributed import RankContext
from shoal_trainer.quantiles import over_all_ranks

from shoal.algo.gradients import clip_coefficient, global_grad_norm
from shoal.config.models import RunConfig
from shoal.errors import ShoalError
from shoal.types import Batch, ExperienceRecord, TokenSequence
from tests.helpers.trainer_bench import (
    Split,
    build_pair,
    even_split,
    make_batch,
    make_record,
    ppo_step,
    ragged_records,
    whole_gradients,
    whole_parameters,
)
from tests.helpers.trainer_splits import EVERYWHERE, ONCE, every_split, spy_on


def train_step_job(context: RankContext, config: RunConfig, folder: Path) -> None:
    """Run every scenario; on four ranks only the splits, and each scenario and aggregation once."""
    result: dict[str, Any] = {"splits": every_split(context, config, ONCE if context.world_size > 2 else EVERYWHERE)}
    if context.world_size <= 2:
        result |= {
            "passes": _pass_per_length(context, config),
            "uneven": _uneven_ranks(context, config),
            "norm": _norms(context),
            "nan": _bad_gradient(context, config),
            "lost": _lost_record(context, config),
            "scored": _scored(context, config),
        }
    if context.rank == 0:
        torch.save(result, folder / "result.pt")


def every_split_job(context: RankContext, config: RunConfig, folder: Path) -> None:
    """Every split of every scenario with every aggregation."""
    result = {"splits": every_split(context, config, EVERYWHERE)}
    if context.rank == 0:
        torch.save(result, folder / "result.pt")


def _one_step(
    context: RankContext, config: RunConfig, records: Sequence[ExperienceRecord], batch: Batch, *, overhead_tokens: float | None = None
) -> dict[str, Any]:
    """One step, with what the optimizers saw and how many forward passes of the policy this rank ran."""
    actor, critic, _ = build_pair(config, context, records, overhead_tokens=overhead_tokens)
    seen: dict[str, torch.Tensor] = {}
    passes: list[int] = []
    spy_on(actor, lambda: seen.update({f"actor.{name}": value for name, value in whole_gradients(actor.module).items()}))
    spy_on(critic, lambda: seen.update({f"critic.{name}": value for name, value in whole_gradients(critic.module).items()}))
    actor.module.register_forward_hook(lambda *_: passes.append(1))
    actor_metrics, critic_metrics = ppo_step(actor, critic, batch)
    return {
        "actor": actor_metrics,
        "critic": critic_metrics,
        "gradients": seen,
        "parameters": whole_parameters(actor.module),
        "num_passes": over_all_ranks(torch.tensor([float(len(passes))]), context).tolist(),
        "grad_norms": over_all_ranks(torch.tensor([actor_metrics["grad_norm"]], dtype=torch.float64), context).tolist(),
    }


def _pass_per_length(context: RankContext, config: RunConfig) -> dict[str, Any]:
    """A pass of its own for every length, or one for all."""
    records = ragged_records()
    split = even_split(6, context.world_size, 2)
    return _one_step(context, config, records, make_batch(records, split), overhead_tokens=0.0 if context.world_size == 2 else None)


def _uneven_ranks(context: RankContext, config: RunConfig) -> dict[str, Any]:
    """Token budget 32: three long records on rank 0 make three micro-batches, three short ones on rank 1 a single one."""
    records = [make_record(i, num_prompt=10, num_response=20, reward=float(i)) for i in range(3)]
    records += [make_record(3 + i, num_prompt=1, num_response=3, reward=-float(i)) for i in range(3)]
    split: Split = [[[[0], [1], [2]]], [[[3, 4, 5]]]] if context.world_size == 2 else [[[[0, 1, 2, 3, 4, 5]]]]
    return _one_step(context, config, records, make_batch(records, split))


def _norms(context: RankContext) -> list[float]:
    """Every rank's norm of a gradient of which it holds one element: 3 on rank 0, 4 on rank 1; and the clip coefficient."""
    norm = float(global_grad_norm([torch.tensor([3.0 + context.rank])], context.sum_over_ranks))
    return over_all_ranks(torch.tensor([norm, clip_coefficient(norm, 1.0)], dtype=torch.float64), context).tolist()


def _bad_gradient(context: RankContext, config: RunConfig) -> dict[str, Any]:
    """A gradient that is not finite on the last rank only."""
    records = ragged_records()
    actor, critic, _ = build_pair(config, context, records)
    ppo_step(actor, critic, make_batch(records, even_split(6, context.world_size, 1)))
    before = whole_parameters(actor.module)
    parameter = next(actor.module.parameters())
    moments = actor.optimizer._adamw.state[parameter]["exp_avg"].full_tensor().clone()
    original = actor.optimizer.step

    def poisoned() -> Any:  # noqa: ANN401
        if context.rank == context.world_size - 1:
            parameter.grad.to_local()[0] = float("nan")  # type: ignore[union-attr]
        return original()

    actor.optimizer.step = poisoned  # type: ignore[method-assign]
    metrics, _ = ppo_step(actor, critic, make_batch(records, even_split(6, context.world_size, 1), 2))
    return {
        "applied": metrics["num_updates"],
        "num_skipped": actor.optimizer.num_skipped,
        "unchanged": all(torch.equal(value, before[name]) for name, value in whole_parameters(actor.module).items()),
        "same_moments": torch.equal(actor.optimizer._adamw.state[parameter]["exp_avg"].full_tensor(), moments),
        "policy_version": actor.policy_version,
    }


def _lost_record(context: RankContext, config: RunConfig) -> dict[str, Any]:
    """A record that only the last rank needs is missing: every rank fails, then goes on with a good batch."""
    records = ragged_records()
    actor, critic, source = build_pair(config, context, records)
    batch = make_batch(records, even_split(6, context.world_size, 1))
    lost = batch.ranks[-1][0].micro_batches[0][0].key
    record = source.records.pop(lost)
    error = ""
    try:
        actor.forward_batch(batch)
    except ShoalError as failure:
        error = type(failure).__name__
    source.records[lost] = record
    metrics, _ = ppo_step(actor, critic, batch)
    return {"error_of_rank_0": error, "num_updates": metrics["num_updates"]}


def _scored(context: RankContext, config: RunConfig) -> dict[str, Any]:
    """Scores of rank 0 before and in the middle of a step, and what the step came to; other ranks answer nothing."""
    actor, critic, _ = build_pair(config, context, ragged_records())
    batch = make_batch(ragged_records(), even_split(6, context.world_size, 2))
    sequences = [TokenSequence(prompt_ids=(1, 2, 3), response_ids=(4, 5)), TokenSequence(prompt_ids=(6,), response_ids=(7, 8, 9))]
    before = actor.score_tokens(sequences)
    actor.forward_batch(batch)
    critic.forward_batch(batch)
    between = actor.score_tokens(sequences)
    actor.compute_advantages(1, 0.05, 0.0)
    updated = actor.update_batch(1)
    assert bool(between) == (context.rank == 0)
    assert before == between
    return {
        "logprobs": torch.tensor([logprob for score in between for logprob in score.logprobs]),
        "greedy_ids": torch.tensor([token for score in between for token in score.greedy_ids]),
        "grad_norm": updated.metrics["grad_norm"],
    }
