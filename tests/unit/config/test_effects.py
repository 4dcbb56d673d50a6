"""Settings without an effect are refused where they are written out; what a switch set to false means."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from shoal.config.effects import CHOICES, EFFECTS
from shoal.config.functions import ESTIMATORS
from shoal.config.models import RunConfig
from shoal.config.signatures import keyword_settings
from shoal.errors import ConfigError
from tests.helpers.run_configs import checked_config

NO_EFFECT: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"algorithm": {"kl_in": "loss", "kl_coef": 0.01}}, r"kl_coef is 0\.01 but algorithm\.kl_in is loss, .*kl_loss_coef is the coeff"),
    ({"algorithm": {"kl_loss_coef": 0.1}}, r"kl_loss_coef is 0\.1 but algorithm\.kl_in is reward"),
    ({"algorithm": {"kl_in": "none", "kl_loss_coef": 0.1}}, r"kl_loss_coef is 0\.1 but algorithm\.kl_in is none"),
    ({"algorithm": {"kl_in": "loss", "kl_estimator": "k2"}}, r"kl_estimator is k2 but algorithm\.kl_in is loss"),
    ({"algorithm": {"kl_loss_estimator": "k2"}}, r"kl_loss_estimator is k2 but algorithm\.kl_in is reward"),
    (
        {"algorithm": {"kl_in": "none", "kl_controller": "adaptive", "kl_target": 6}},
        r"kl_controller is adaptive but algorithm\.kl_in is none",
    ),
    ({"algorithm": {"kl_in": "none"}, "model": {"reference_path": "r"}}, r"reference_path is r but algorithm\.kl_in is none"),
    ({"algorithm": {"kl_target": 6}}, r"kl_target is 6 but algorithm\.kl_controller is fixed"),
    ({"algorithm": {"kl_horizon": 5}}, r"kl_horizon is 5 but algorithm\.kl_controller is fixed"),
    ({"algorithm": {"estimator": "grpo", "bootstrap_truncated": True}}, r"bootstrap_truncated is true but .*grpo has no critic"),
    ({"algorithm": {"estimator": "rloo", "value_clip": None}}, r"value_clip is None but .*rloo has no critic"),
    ({"algorithm": {"estimator": "grpo", "critic_warmup_steps": 5}}, r"critic_warmup_steps is 5 but .*grpo has no critic"),
    (
        {"algorithm": {"estimator": "grpo"}, "critic": {"lr": 1e-3, "ranks": 2}},
        r"critic\.ranks, critic\.lr: .*grpo has no critic, .*critic=null",
    ),
    ({"algorithm": {"estimator": "grpo", "lam": 0.95}}, r"lam is 0\.95 but algorithm\.estimator grpo does not use it, .* or at 1, .*: gae"),
    ({"algorithm": {"estimator": "grpo", "whiten_advantages": True}}, r"whiten_advantages is true but algorithm\.estimator grpo does not"),
    ({"algorithm": {"estimator": "reinforce_pp", "whiten_advantages": False}}, r"whiten_advantages is false but .* always normalises"),
    ({"algorithm": {"estimator": "rloo", "gamma": 0.9}}, r"gamma is 0\.9 but algorithm\.estimator rloo does not use it"),
    (
        {"algorithm": {"group_std": "sample"}},
        r"group_std is sample but algorithm\.estimator gae does not use it, .* or at none, .*: grpo, gdpo",
    ),
    ({"algorithm": {"estimator": "dr_grpo", "group_std": "population"}}, r"group_std is population but .* dr_grpo does not use it"),
    ({"algorithm": {"estimator": "rloo", "group_baseline": "leave_one_out"}}, r"group_baseline is leave_one_out but .* rloo does not"),
    ({"algorithm": {"policy_loss": "gspo", "dual_clip": 3}}, r"dual_clip is 3 but algorithm\.policy_loss gspo does not use it, .*: ppo"),
    ({"algorithm": {"policy_loss": "reinforce", "clip_low": 0.1}}, r"clip_low is 0\.1 but algorithm\.policy_loss reinforce does not use"),
    ({"algorithm": {"loss_norm_length": 5}}, r"loss_norm_length is 5 but algorithm\.loss_aggregation is token_mean"),
    ({"algorithm": {"importance_weights": "token_truncate", "importance_low": 0.1}}, r"importance_low is 0\.1 but .* is token_truncate"),
    ({"algorithm": {"importance_high": 3}}, r"importance_high is 3 but algorithm\.importance_weights is none"),
    ({"algorithm": {"rejection_low": 0.1}}, r"rejection_low is 0\.1 but algorithm\.rejection is none"),
    ({"rollout": {"max_refills": 3}}, r"max_refills is 3 but rollout\.dynamic_sampling is false"),
    ({"reward": {"overlong_penalty": 0.5}}, r"overlong_penalty is 0\.5 but reward\.overlong_buffer_tokens is 0"),
    ({"reward": {"sources": {"a": "x"}, "scorer": "y"}}, r"scorer is y but reward\.sources chooses the scorer of each row"),
    ({"reward": {"sources": {"a": "x"}, "version": "2"}}, r"version is 2 but reward\.sources names other scorers than .* arithmetic"),
    (
        {"algorithm": {"estimator": "gdpo", "kl_in": "none"}, "reward": {"weights": {"a": 1}, "normalise": "batch"}},
        r"normalise is batch but algorithm\.estimator gdpo normalises the raw components",
    ),
    ({"data": {"held_out": "h"}, "evaluation": {"top_p": 0.9}}, r"top_p is 0\.9 but evaluation\.temperature is 0, which is greedy"),
    ({"evaluation": {"max_prompts": 5}}, r"max_prompts is 5 but data\.held_out is not set"),
    ({"data": {"held_out_split": "test"}}, r"held_out_split is test but data\.held_out is not set"),
    ({"actor": {"min_lr_share": 0.1}}, r"actor\.min_lr_share is 0\.1 but actor\.lr_schedule is constant"),
    ({"critic": {"min_lr_share": 0.1}}, r"critic\.min_lr_share is 0\.1 but critic\.lr_schedule is constant"),
    ({"actor": {"offload": True, "device": "cpu"}}, r"actor\.offload is true but actor\.device is cpu"),
    ({"critic": {"offload": True, "device": "cpu"}}, r"critic\.offload is true but critic\.device is cpu"),
]


@pytest.mark.parametrize(("sections", "message"), NO_EFFECT)
def test_setting_without_effect_is_refused(sections: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_config(**sections)


def test_every_effect_names_fields_that_exist_and_is_tested() -> None:
    tested = " ".join(message.replace("\\", "") for _, message in NO_EFFECT)
    for effect in EFFECTS:
        for setting in effect.settings:
            section, _, field = setting.partition(".")
            annotation = RunConfig.model_fields[section].annotation
            assert annotation is not None
            assert field in annotation.model_fields
        assert any(setting.partition(".")[2] in tested for setting in effect.settings)


@pytest.mark.parametrize(
    "sections",
    [
        # The default's value, as a recorded configuration holds it.
        {"algorithm": {"estimator": "grpo", "lam": 1.0, "value_clip": 0.2}, "critic": {"lr": 1e-5}},
        {"algorithm": {"kl_in": "none", "kl_coef": 0, "kl_loss_coef": 0}},
        {"algorithm": {"estimator": "dr_grpo", "group_std": "none", "whiten_advantages": False}},
        {"algorithm": {"estimator": "reinforce_pp", "whiten_advantages": True, "gamma": 0.9}},
        {"algorithm": {"estimator": {"entrypoint": "my.estimator"}, "lam": 0.5, "group_std": "sample", "whiten_advantages": False}},
        {"reward": {"sources": {"a": "x", "b": "y"}, "scorer": "x", "version": "2"}},
        {"algorithm": {"estimator": "dr_grpo", "loss_aggregation": "seq_mean_token_sum_norm", "loss_norm_length": 5}},
        {"actor": {"min_lr_share": 0.1, "lr_schedule": "cosine", "offload": True, "device": "cuda"}},
    ],
)
def test_setting_with_effect_or_at_its_default_passes(sections: dict[str, dict[str, Any]]) -> None:
    assert checked_config(**sections).run.id == "demo"


@pytest.mark.parametrize(
    ("algorithm", "kl_coef", "kl_loss_coef"),
    [({}, 0.01, 0), ({"kl_in": "loss"}, 0, 0.001), ({"kl_in": "both"}, 0.01, 0.001), ({"kl_in": "none"}, 0, 0)],
)
def test_coefficient_of_a_kl_term_that_is_off_resolves_to_zero(algorithm: dict[str, Any], kl_coef: float, kl_loss_coef: float) -> None:
    resolved = checked_config(algorithm=algorithm).algorithm
    assert (resolved.kl_coef, resolved.kl_loss_coef) == (kl_coef, kl_loss_coef)


@pytest.mark.parametrize(
    ("estimator", "group_std", "whitens"),
    [
        ("gae", "none", True),
        ("grpo", "sample", False),
        ("dr_grpo", "none", False),
        ("rloo", "none", False),
        ("remax", "none", False),
        ("reinforce_pp", "none", True),
        ("reinforce_pp_baseline", "none", True),
    ],
)
def test_recorded_configuration_says_what_is_normalised(estimator: str, group_std: str, whitens: bool) -> None:
    resolved = checked_config(algorithm={"estimator": estimator}).algorithm
    assert (resolved.group_std, resolved.whiten_advantages) == (group_std, whitens)


@pytest.mark.parametrize("text", [False, "false", "False", "off", "no"])
def test_every_switch_set_to_false_is_off(text: object) -> None:
    """R05: as bool, and as text; the default is off too where there is a `none`."""
    gae = checked_config(
        algorithm={"whiten_advantages": text, "kl_in": text, "importance_weights": text, "rejection": text, "bootstrap_truncated": text},
        reward={"normalise": text},
        rollout={"dynamic_sampling": text},
    )
    algorithm = gae.algorithm
    assert (algorithm.whiten_advantages, algorithm.bootstrap_truncated, gae.rollout.dynamic_sampling) == (False, False, False)
    assert (algorithm.kl_in, algorithm.importance_weights, algorithm.rejection, gae.reward.normalise) == ("none",) * 4
    assert not algorithm.has_reference
    assert checked_config(algorithm={"estimator": "grpo", "group_std": text}).algorithm.group_std == "none"
    assert checked_config().reward.normalise == "none"


@pytest.mark.parametrize("sections", [{"algorithm": {"estimator": "grpo", "group_std": True}}, {"reward": {"normalise": "true"}}])
def test_switch_that_has_several_ways_to_be_on_is_not_true(sections: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"but should be 'sample', 'population' or 'none'|but should be 'none' or 'batch'"):
        checked_config(**sections)


@pytest.mark.parametrize("path", [function.path for registry in CHOICES.values() for function in registry.values()])
def test_settings_read_from_the_source_are_those_of_the_function(path: str) -> None:
    module, _, name = path.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
    assert keyword_settings(path) == frozenset(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def test_settings_of_a_function_without_source_are_unknown() -> None:
    assert keyword_settings("math.gcd") is None
    assert keyword_settings("shoal.algo.advantages.nothing_of_this_name") is None
    assert keyword_settings(ESTIMATORS["gae"].path) is not None
