"""One step's metrics, as in metrics.jsonl.

A gang's metrics get its role as prefix (`actor_loss`, `critic_grad_norm`, ...); those in SHARED are the actor's and appear
without it as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from shoal.queue.entries import QueuedGroup
from shoal_coordinator.collected import CollectedExperience
from shoal_coordinator.push_history import PushEntry
from shoal_coordinator.stage_clock import StepTimes

SHARED = (
    "kl",
    "kl_k3",
    "kl_per_response",
    "kl_reward_penalty",
    "kl_loss",
    "entropy",
    "clip_fraction",
    "clip_fraction_lower",
    "ratio_max_deviation",
    "ratio_p01",
    "ratio_p50",
    "ratio_p99",
    "mismatch_kl",
    "mismatch_ratio_p01",
    "mismatch_ratio_p50",
    "mismatch_ratio_p99",
    "logprob_max_difference",
    "importance_capped_fraction",
    "importance_dropped_fraction",
    "rejected_fraction",
    "lr",
)


def step_metrics(
    *,
    step: int,
    policy_version: int,
    collected: CollectedExperience,
    groups: Sequence[QueuedGroup],
    gangs: Mapping[str, Mapping[str, float]],
    settings: Mapping[str, float],
    push: PushEntry | None,
    times: StepTimes,
) -> dict[str, float]:
    """Put a step's metrics together.

    Args:
        step: from 1.
        policy_version: that the step ended with.
        collected: scalars of the rollouts.
        groups: what was trained.
        gangs: metrics of each role ("actor", "critic"), of all commands.
        settings: what was steered in this step, such as the KL coefficients.
        push: the step's weight push, if one was committed.
        times: of the whole step.
    """
    num_tokens = sum(group.num_tokens for group in groups)
    metrics: dict[str, float] = {"step": step, "policy_version": policy_version, "num_tokens": num_tokens}
    metrics |= collected.metrics()
    metrics |= settings
    for role, values in gangs.items():
        metrics |= {key if key.startswith(f"{role}_") else f"{role}_{key}": value for key, value in values.items()}
    metrics |= {key: value for key, value in gangs.get("actor", {}).items() if key in SHARED}
    metrics |= times.as_metrics()
    metrics["rollout_policy_version"] = min(collected.policy_versions, default=policy_version)
    metrics["tokens_per_s"] = num_tokens / times.step_s if times.step_s > 0 else 0.0
    metrics |= push_metrics(push)
    metrics["timestamp_unix_s"] = time.time()
    return metrics


def push_metrics(push: PushEntry | None) -> dict[str, float]:
    """Longest pause, bytes sent to all servers, the bytes that these stand for, and their ratio."""
    if push is None:
        return {"push_pause_ms": 0.0, "push_bytes": 0, "push_sent_bytes": 0, "push_delta_share": 0.0}
    report = push.report
    return {
        "push_pause_ms": report.max_pause_ms,
        "push_bytes": report.dense_bytes,
        "push_sent_bytes": report.sent_bytes,
        "push_delta_share": report.delta_share,
    }
