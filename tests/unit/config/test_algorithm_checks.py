"""Rules of the algorithm and the reward: each refusal with its reason, each border that is still fine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.config.functions import ESTIMATORS, POLICY_LOSSES
from shoal.config.load import dump_config, load_config
from shoal.errors import ConfigError
from tests.helpers.run_configs import checked_config

GDPO: dict[str, Any] = {"algorithm": {"estimator": "gdpo", "kl_in": "none"}, "reward": {"weights": {"a": 1.0}}}
OWN = {"entrypoint": "my_pkg.my_function"}


@pytest.mark.parametrize("estimator", [name for name, function in ESTIMATORS.items() if "groups" in function.needs])
def test_group_estimator_with_groups_of_one_is_refused(estimator: str) -> None:
    with pytest.raises(ConfigError, match=f"estimator {estimator} compares the samples of one prompt, but rollout.group_size is 1"):
        checked_config(algorithm={"estimator": estimator, "kl_in": "none"}, reward={"weights": {"a": 1.0}}, rollout={"group_size": 1})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"algorithm": {"estimator": OWN | {"needs": ["groups"]}}, "rollout": {"group_size": 1}},
            "estimator my_pkg.my_function compares the samples of one prompt",
        ),
        ({"rollout": {"group_size": 1, "dynamic_sampling": True}}, r"dynamic_sampling drops groups .* every group would be dropped"),
        ({"algorithm": {"policy_loss": OWN | {"needs": ["critic"]}}}, r"policy_loss\.needs is \['critic'\], but only an estimator"),
        (
            {"algorithm": {"policy_loss": OWN | {"settings": {"clip_low": 0.1, "alpha": 1}}}},
            r"policy_loss\.settings has 'clip_low', which is a field of the section algorithm; set algorithm\.clip_low",
        ),
        ({"algorithm": {"kl_in": "loss", "kl_loss_estimator": "k1"}}, r"kl_loss_estimator is k1, whose gradient is 0 in expectation"),
        ({"algorithm": {"kl_in": "both", "kl_loss_estimator": "k1"}}, r"kl_loss_estimator is k1"),
        ({"algorithm": {"kl_in": "both", "kl_coef": 0}}, r"kl_in is both but algorithm\.kl_coef is 0; .* or set kl_in to loss"),
        ({"algorithm": {"kl_in": "both", "kl_loss_coef": 0}}, r"kl_in is both but algorithm\.kl_loss_coef is 0; .* or set kl_in to reward"),
        ({"algorithm": {"kl_controller": "adaptive"}}, r"kl_controller is adaptive but algorithm\.kl_target is not set"),
        (
            {"algorithm": {"kl_controller": "adaptive", "kl_target": 6, "kl_coef": 0}},
            r"kl_controller is adaptive but algorithm\.kl_coef is 0, which no factor changes",
        ),
        (
            {"algorithm": {"old_logprobs": "rollout", "importance_weights": "token_truncate"}},
            r"importance_weights is token_truncate but algorithm\.old_logprobs is rollout: .* would be 1 everywhere",
        ),
        (
            {"algorithm": {"old_logprobs": "rollout", "rejection": "geometric"}},
            r"rejection is geometric but algorithm\.old_logprobs is rollout: .* would be 1 everywhere",
        ),
        (
            {"algorithm": {"importance_weights": "token_mask", "importance_low": 2.0, "importance_high": 2.0}},
            r"importance_low is 2, not below algorithm\.importance_high 2",
        ),
        (
            {"algorithm": {"importance_weights": "sequence_mask", "importance_low": 1.1}},
            r"importance_low and importance_high are 1\.1 and 2: a ratio of 1, .* would be dropped",
        ),
        ({"algorithm": {"rejection": "sequence", "rejection_low": 3}}, r"rejection_low is 3, not below algorithm\.rejection_high 2"),
        ({"algorithm": {"rejection": "sequence", "rejection_high": 0.9}}, r"a ratio of 1, .* would be dropped"),
        ({"reward": {"weights": {"a": 0.0, "b": 0}}}, r"reward\.weights are all 0 \(a, b\)"),
        ({"reward": {"weights": {"a": float("nan")}}}, r"reward\.weights\.a is nan, but should be a finite number"),
        ({"reward": {"clip": [1.0, 1.0]}}, r"reward\.clip is \[1\.0, 1\.0\]; the lower bound must be below"),
        ({"reward": {"clip": [0.0, float("nan")]}}, r"reward\.clip\.1 is nan, but should be a finite number"),
        (
            {"algorithm": {"mask_truncated": True, "bootstrap_truncated": True}},
            r"bootstrap_truncated continues responses that were cut, and algorithm\.mask_truncated leaves these out",
        ),
        (
            {"algorithm": {"kl_controller": "adaptive", "kl_target": 6.0, "kl_horizon": 50}},
            r"kl_horizon is 50, at most a fifth of the \d+ samples of a step: .* negative",
        ),
        ({"actor": {"lr": float("inf")}}, r"actor\.lr is inf"),
        (
            {"algorithm": {"mask_truncated": True}, "rollout": {"ignore_eos": True}},
            r"mask_truncated leaves out .* nothing would be trained",
        ),
        ({"reward": {"overlong_buffer_tokens": 9}}, r"overlong_buffer_tokens is 9, above rollout\.max_new_tokens 8"),
        (GDPO | {"reward": {}}, r"gdpo normalises each component of the reward by itself, but reward\.weights is empty"),
        (GDPO | {"algorithm": {"estimator": "gdpo"}}, r"gdpo compares components of the reward, and algorithm\.kl_in is reward"),
    ],
)
def test_check_refuses_with_the_reason(sections: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_config(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"group_size": 2, "dynamic_sampling": True, "max_refills": 3}},
        {"algorithm": {"estimator": "remax"}, "rollout": {"group_size": 1}},
        {"algorithm": {"estimator": "remax"}, "reward": {"normalise": "batch", "clip": [-1, 1]}},
        {"algorithm": {"estimator": OWN | {"needs": ["critic"]}, "lam": 0.9, "value_clip": None, "critic_warmup_steps": 2}},
        {"algorithm": {"policy_loss": OWN | {"settings": {"alpha": 0.3, "name": "x", "on": True, "none": None}}, "dual_clip": 2.0}},
        {"algorithm": {"kl_in": "both", "kl_coef": 0.1, "kl_loss_coef": 0.1}},
        # Without a weight the reference still measures.
        {"algorithm": {"kl_in": "loss", "kl_loss_coef": 0}},
        {"algorithm": {"kl_in": "loss", "kl_loss_estimator": "k3_straight_through"}},
        {"algorithm": {"kl_controller": "adaptive", "kl_target": 6.0, "kl_horizon": 100}},
        {"algorithm": {"importance_weights": "token_mask", "importance_low": 0.9, "importance_high": 1.0}},
        # Only the cap of truncating weights counts.
        {"algorithm": {"importance_weights": "token_truncate", "importance_high": 0.5}},
        {"algorithm": {"rejection": "geometric", "rejection_low": 0.99, "rejection_high": 1.01, "importance_weights": "token_truncate"}},
        {"reward": {"clip": [-5.0, 5.0], "overlong_buffer_tokens": 8, "overlong_penalty": 0.5}},
        {"reward": {"weights": {"a": 1.0, "b": -0.5, "c": 0}}},
        GDPO,
        GDPO | {"algorithm": {"estimator": "gdpo", "kl_in": "loss", "group_std": "population"}},
    ],
)
def test_check_accepts_the_border(sections: dict[str, dict[str, Any]]) -> None:
    assert checked_config(**sections).run.id == "demo"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_builds_is_recorded_and_loads_again(name: str, tmp_path: Path) -> None:
    reward = {"weights": {"a": 1.0}} if name == "gdpo" else {}
    config = checked_config(algorithm={"estimator": name, "kl_in": "none"}, reward=reward)
    dump_config(config, tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml") == config


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_is_recorded_and_loads_again(name: str, tmp_path: Path) -> None:
    config = checked_config(algorithm={"policy_loss": name})
    dump_config(config, tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml") == config


def test_own_function_is_recorded_and_loads_again(tmp_path: Path) -> None:
    config = checked_config(algorithm={"estimator": OWN | {"needs": ["groups"]}, "policy_loss": OWN | {"settings": {"alpha": 0.3}}})
    dump_config(config, tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml") == config
