"""What test ranks run: several scenarios in one gang, since starting ranks takes longer than all of them.

Rank 0 leaves `<folder>/result.pt` (tensors and numbers only).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from shoal_trainer.distributed import RankContext

from shoal.config.models import RunConfig
from shoal.errors import ShoalError
from shoal.types import ExperienceRecord, TokenSequence
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

WORLD_SPLITS: dict[int, tuple[Split, ...]] = {
    1: (even_split(6, 1, 1),),
    2: (even_split(6, 2, 1), even_split(6, 2, 2), even_split(6, 2, 4)),
}


def train_step_job(context: RankContext, config: RunConfig, folder: Path) -> None:
    """Run every scenario."""
    result = {
        "splits": _every_split(context, config),
        "uneven": _uneven_ranks(context, config),
        "nan": _bad_gradient(context, config),
        "lost": _lost_record(context, config),
        "scored": _scored(context, config),
    }
    if context.rank == 0:
        torch.save(result, folder / "result.pt")


def _one_step(
    context: RankContext, config: RunConfig, records: Sequence[ExperienceRecord], split: Split, *, overhead_tokens: float | None = None
) -> dict[str, Any]:
    """One step, with what the optimizers saw."""
    actor, critic, _ = build_pair(config, context, records, overhead_tokens=overhead_tokens)
    seen: dict[str, torch.Tensor] = {}
    for name, trainer in (("actor", actor), ("critic", critic)):
        original = trainer.optimizer.step

        def step(name: str = name, trainer: Any = trainer, original: Any = original) -> Any:  # noqa: ANN401
            seen.update({f"{name}.{key}": value for key, value in whole_gradients(trainer.module).items()})
            return original()

        trainer.optimizer.step = step  # type: ignore[method-assign]
    actor_metrics, critic_metrics = ppo_step(actor, critic, make_batch(records, split))
    return {"actor": actor_metrics, "critic": critic_metrics, "gradients": seen, "parameters": whole_parameters(actor.module)}


def _every_split(context: RankContext, config: RunConfig) -> list[dict[str, Any]]:
    """The same records in every split of this number of ranks; on two ranks also with a pass of its own for every length."""
    overheads = (None, 0.0) if context.world_size == 2 else (None,)
    return [
        _one_step(context, config, ragged_records(), split, overhead_tokens=overhead)
        for split in WORLD_SPLITS[context.world_size]
        for overhead in overheads
    ]


def _uneven_ranks(context: RankContext, config: RunConfig) -> dict[str, Any]:
    """Three long records on rank 0, short ones on rank 1 with empty micro-batches (token budget 32); or all of them on one rank."""
    records = [make_record(i, num_prompt=10, num_response=20, reward=float(i)) for i in range(3)]
    records += [make_record(3 + i, num_prompt=1, num_response=3, reward=-float(i)) for i in range(3)]
    split: Split = [[[[0], [1], [2]]], [[[3, 4, 5], [], []]]] if context.world_size == 2 else [[[[0, 1, 2, 3, 4, 5]]]]
    return _one_step(context, config, records, split)


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
