"""One step's metrics put together."""

from __future__ import annotations

from collections.abc import Mapping

from shoal_coordinator.collected import CollectedExperience
from shoal_coordinator.stage_clock import StageClock
from shoal_coordinator.step_metrics import step_metrics


def metrics_of(gangs: Mapping[str, Mapping[str, float]], settings: Mapping[str, float] | None = None) -> dict[str, float]:
    return step_metrics(
        step=3,
        policy_version=2,
        collected=CollectedExperience(),
        groups=[],
        gangs=gangs,
        settings=settings or {},
        push=None,
        times=StageClock().read(),
    )


def test_step_metrics_name_each_kl_term_and_its_coefficient() -> None:
    """R68."""
    actor = {"kl_reward_penalty": 0.1, "kl_loss": 0.2, "kl_per_response": 3.0}
    metrics = metrics_of({"actor": actor}, {"kl_coef": 0.01, "kl_loss_coef": 0.001})
    assert {name: metrics[name] for name in (*actor, "kl_coef", "kl_loss_coef")} == actor | {"kl_coef": 0.01, "kl_loss_coef": 0.001}
    assert "kl_loss" not in metrics_of({"actor": {"kl_reward_penalty": 0.1}})


def test_step_metrics_tell_the_gangs_apart() -> None:
    metrics = metrics_of({"actor": {"actor_loss": 1.0, "lr": 0.1, "frac_zero_std": 0.5}, "critic": {"critic_loss": 2.0, "lr": 0.2}})
    assert (metrics["actor_loss"], metrics["critic_loss"]) == (1.0, 2.0)
    assert (metrics["actor_lr"], metrics["critic_lr"], metrics["lr"]) == (0.1, 0.2, 0.1)
    # Of what the trainer has made of the rewards; without the prefix it is that of the rewards as scored.
    assert metrics["actor_frac_zero_std"] == 0.5
    assert "frac_zero_std" not in metrics
