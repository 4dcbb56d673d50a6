"""Numbers that the coordinator steers from step to step. Plain Python: the coordinator runs without torch."""

from __future__ import annotations


def adapted_kl_coef(kl_coef: float, *, current_kl: float, target_kl: float, num_samples: int, horizon: int) -> float:
    """Move the KL coefficient in proportion to the relative error of the KL, bounded to 20 %.

    Args:
        kl_coef: current coefficient; it is state, so it belongs in a checkpoint.
        current_kl, target_kl: KL per sequence.
        num_samples: samples of the step.
        horizon: samples over which a constant error of 1 would double the coefficient.
    Source: Ziegler et al. 2019, section 2.2.
    """
    error = min(max(current_kl / target_kl - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * num_samples / horizon)


def admission_capacity(
    *, max_concurrent: int, running: int, max_staleness: int, policy_version: int, batch_size: int, accepted: int
) -> int:
    """How many new samples may start, so that none is older than max_staleness versions when it is trained.

    Args:
        max_concurrent: most that may run at once.
        running: started and not finished.
        max_staleness: versions that a sample may be behind; 0 is on-policy.
        policy_version: versions made so far, each of which trained a batch.
        batch_size: samples per version.
        accepted: finished samples that were or will be trained.
    Source: Fu et al. 2025 (AReaL), section 4.
    """
    admissible = (max_staleness + policy_version + 1) * batch_size - (accepted + running)
    return max(0, min(max_concurrent - running, admissible))
