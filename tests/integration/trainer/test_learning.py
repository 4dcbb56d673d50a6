"""Every family of algorithms solves a bandit through the real actor and critic, from three seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shoal_trainer.distributed import RankContext

from tests.helpers.bandit import ACHIEVABLE_REWARD, Bandit, save_bandit_policy
from tests.helpers.trainer_bench import one_rank, run_config

Sections = Mapping[str, Mapping[str, Any]]

NUM_STEPS = 80
# Without the warm-up the first updates, which rest on few samples, make a response certain before the right one was ever seen.
_GANG = {"lr": 5e-3, "warmup_steps": 20, "lr_schedule": "linear", "betas": [0.9, 0.999]}
_SHARED = {"entropy_coef": 0.05, "kl_in": "none"}

ALGORITHMS: dict[str, Sections] = {
    "ppo": {"algorithm": {"estimator": "gae", "lam": 0.95, **_SHARED}},
    "grpo": {"algorithm": {"estimator": "grpo", "loss_aggregation": "seq_mean_token_mean", **_SHARED}},
    "rloo": {"algorithm": {"estimator": "rloo", **_SHARED}},
    "reinforce_pp": {"algorithm": {"estimator": "reinforce_pp", **_SHARED, "kl_in": "reward", "kl_coef": 1e-3}},
    "gspo": {
        "algorithm": {
            "estimator": "grpo",
            "policy_loss": "gspo",
            "clip_low": 3e-2,
            "clip_high": 4e-2,
            "loss_aggregation": "seq_mean_token_mean",
            "mini_batches": 2,
            **_SHARED,
            "entropy_coef": 0.01,
        }
    },
}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankContext]:
    """The context of a gang of one."""
    torch.set_num_threads(1)
    with one_rank(run_config(save_bandit_policy(tmp_path_factory.mktemp("context") / "policy", 0))) as rank_context:
        yield rank_context


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_learns_the_bandit(tmp_path: Path, context: RankContext, name: str, seed: int) -> None:
    sections: Sections = {"run": {"steps": NUM_STEPS}, "actor": _GANG, "critic": _GANG, **ALGORITHMS[name]}
    rewards = Bandit(tmp_path, context, seed, sections).train(NUM_STEPS)
    assert np.mean(rewards[:3]) < 0.25, "it starts without knowledge"
    assert np.mean(rewards[-10:]) > 0.9 * ACHIEVABLE_REWARD
