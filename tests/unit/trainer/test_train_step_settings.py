"""Whole training steps, with scoring between the commands and an export after each, come out the same with every setting of the gangs.

Two steps with an update between them: a policy that computes with parameters gathered before the update would show in the second one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_trainer.distributed import RankContext
from shoal_trainer.export import Exporter
from shoal_trainer.merging import ServedWeights
from shoal_trainer.models import load_policy, named_shards

from shoal.types import TokenSequence
from tests.helpers.trainer_bench import build_pair, even_split, make_batch, ragged_records, run_config, save_policy, whole_parameters

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gathered": {"reshard_after_forward": False},
    "packed": {"packing": "on"},
    "all": {"reshard_after_forward": False, "activation_checkpointing": True, "offload": True, "packing": "on"},
}
SEQUENCES = [TokenSequence(prompt_ids=(1, 2, 3), response_ids=(4, 5)), TokenSequence(prompt_ids=(6,), response_ids=(7, 8, 9))]


def run_steps(folder: Path, context: RankContext, target: Path, gang: dict[str, Any], *, epochs: int) -> dict[str, Any]:
    """Two steps of actor and critic; what they reported and what the policy is at the end."""
    config = run_config(folder, actor=gang, critic=gang, algorithm={"epochs": epochs}, rollout={"temperature": 0.7})
    actor, critic, _ = build_pair(config, context, ragged_records())
    assert critic is not None
    found: dict[str, Any] = {"ratio": [], "norms": [], "scores": []}
    for step in (1, 2):
        batch = make_batch(ragged_records(), even_split(6, 1, 2), step)
        actor.forward_batch(batch)
        critic.forward_batch(batch)
        found["scores"] += [logprob for score in actor.score_tokens(SEQUENCES) for logprob in score.logprobs]
        actor.compute_advantages(step, 0.05, 0.0)
        metrics = (critic.update_batch(step).metrics, actor.update_batch(step).metrics)
        found["norms"] += [of_gang["grad_norm"] for of_gang in metrics]
        found["ratio"].append(metrics[1]["ratio_max_deviation"])
        served = ServedWeights(named_shards(actor.module), None, context.device, lambda: actor.policy_version)
        Exporter(actor.module, served, str(folder), context).export(str(target), actor.policy_version)
    exported = load_policy(str(target), config.model, run_config(folder).actor, context, trainable=False)
    return {**found, "parameters": whole_parameters(actor.module), "exported": whole_parameters(exported)}


@pytest.mark.parametrize("epochs", [1, 2])
def test_two_steps_are_the_same_with_every_setting(tmp_path: Path, context: RankContext, epochs: int) -> None:
    folder = save_policy(tmp_path / "model", dropout=0.2)
    results = {name: run_steps(folder, context, tmp_path / "export", gang, epochs=epochs) for name, gang in SETTINGS.items()}
    plain = results["plain"]
    for name, found in results.items():
        assert found["norms"] == pytest.approx(plain["norms"], rel=1e-3), name
        assert found["scores"] == pytest.approx(plain["scores"], abs=1e-4), name
        assert found["parameters"].keys() == found["exported"].keys() == plain["parameters"].keys()
        for parameter, value in found["parameters"].items():
            assert torch.equal(value, found["exported"][parameter]), (name, parameter)
        if epochs == 1:
            assert max(found["ratio"]) <= 1e-5, name
    assert plain["scores"][:5] != pytest.approx(plain["scores"][5:], abs=1e-3)
