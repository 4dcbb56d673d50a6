"""One train step of actor and critic on one rank, with what the optimizers and the estimator saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shoal_trainer.actor import Actor
from shoal_trainer.critic import Critic
from shoal_trainer.distributed import RankContext
from shoal_trainer.inputs import Layout

from shoal.algo.advantages import AdvantageInputs
from shoal.types import ExperienceRecord
from tests.helpers.trainer_bench import Split, build_pair, even_split, key_of, make_batch, ppo_step, run_config, whole_gradients
from tests.helpers.trainer_splits import spy_on


class Step:
    """Runs steps of one batch of records.

    gradients: of the last optimizer step of each role, as "actor.<parameter>". inputs: of the estimator.
    """

    inputs: AdvantageInputs

    def __init__(
        self,
        folder: Path,
        context: RankContext,
        records: Sequence[ExperienceRecord],
        *,
        overhead_tokens: float | None = None,
        layout: Layout | None = None,
        **sections: Any,  # noqa: ANN401 - a mapping of fields each
    ) -> None:
        self.config = run_config(folder, **sections)
        self.actor, self.critic, self.source = build_pair(self.config, context, records, overhead_tokens=overhead_tokens)
        if layout is not None:
            for loader in (self.actor._loader, self.critic._loader):
                loader._passes = replace(loader._passes, layout=layout)
        self.records = records
        self.gradients: dict[str, torch.Tensor] = {}
        spy_on(self.actor, lambda: self._keep("actor", self.actor))
        spy_on(self.critic, lambda: self._keep("critic", self.critic))
        self._estimate, self.actor._estimate = self.actor._estimate, self._estimate_and_keep

    def run(
        self, split: Split | None = None, step: int = 1, *, kl_coef: float = 0.05, kl_loss_coef: float = 0.05
    ) -> tuple[dict[str, float], dict[str, float]]:
        """One step of both roles, or of the actor alone where nothing needs a critic; all records in one micro-batch unless split."""
        batch = make_batch(self.records, even_split(len(self.records), 1, 1) if split is None else split, step)
        critic = self.critic if self.config.algorithm.has_critic else None
        return ppo_step(self.actor, critic, batch, kl_coef, kl_loss_coef)

    def use(self, records: Sequence[ExperienceRecord]) -> None:
        """Run later steps with these records."""
        self.records = records
        self.source.records |= {key_of(record): record for record in records}

    def _keep(self, name: str, trainer: Actor | Critic) -> None:
        self.gradients |= {f"{name}.{key}": value for key, value in whole_gradients(trainer.module).items()}

    def _estimate_and_keep(self, inputs: AdvantageInputs, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        self.inputs = inputs
        return self._estimate(inputs, *arguments)
