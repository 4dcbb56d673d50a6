"""Names to functions, settings to parameters."""

from __future__ import annotations

import pytest
import torch

from shoal.algo import registry
from shoal.algo.advantages import AdvantageInputs
from shoal.algo.lookup import lookup
from shoal.config.algorithm import AlgorithmSection
from shoal.config.functions import ESTIMATORS
from shoal.errors import ConfigError


def test_lookup_lists_the_valid_names() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.estimator is 'ppo'; use one of dr_grpo, gae, "):
        lookup(ESTIMATORS, "estimator", "ppo")


def test_bind_fills_settings_from_fields_of_the_same_name() -> None:
    def function(x: int, *, clip_low: float, dual_clip: float | None, extra: int = 7) -> tuple[int, float, float | None, int]:
        return x, clip_low, dual_clip, extra

    assert registry.bind(function, AlgorithmSection(clip_low=0.3, dual_clip=4.0))(1) == (1, 0.3, 4.0, 7)


def test_bind_refuses_a_setting_that_does_not_exist() -> None:
    def needy(*, sharpness: float) -> float:
        return sharpness

    with pytest.raises(ConfigError, match="needy needs the setting 'sharpness'"):
        registry.bind(needy, AlgorithmSection())


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_every_configurable_estimator_runs(estimator: str) -> None:
    algorithm = AlgorithmSection.model_validate({"estimator": estimator})
    inputs = AdvantageInputs(
        rewards=torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        response_mask=torch.ones(2, 2, dtype=torch.bool),
        values=torch.zeros(2, 2),
        group_index=torch.zeros(2, dtype=torch.long),
        num_groups=1,
    )
    advantages, _ = registry.advantage_estimator(algorithm)(inputs)
    assert bool((advantages[0] > advantages[1]).all())


def test_losses_take_their_bounds_from_the_configuration() -> None:
    one = torch.ones(1, 1)
    algorithm = AlgorithmSection(clip_high=0.5, value_clip=None)
    policy = registry.policy_loss(algorithm)(one, torch.zeros(1, 1), one, one.bool())
    assert float(policy.per_token) == pytest.approx(-1.5)
    value = registry.value_loss(algorithm)(3 * one, 0 * one, one, one.bool())
    assert float(value.per_token) == pytest.approx(2.0)
