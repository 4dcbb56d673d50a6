"""The conventions of numeric cases in plain NumPy and loops, float64, without torch and shoal.algo."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.helpers.case_numbers import Bools, Floats


def gae(rewards: Floats, values: Floats, mask: Bools, gamma: float, lam: float, bootstrap: Floats) -> tuple[Floats, Floats]:
    """Double sum over the trained tokens of each row; bootstrap: value after the last one."""
    advantages, returns = np.zeros_like(rewards), np.zeros_like(rewards)
    for b in range(len(rewards)):
        kept = [t for t in range(rewards.shape[1]) if mask[b, t]]
        following = [*(values[b, t] for t in kept[1:]), bootstrap[b]]
        deltas = [rewards[b, t] + gamma * after - values[b, t] for t, after in zip(kept, following, strict=True)] if kept else []
        for i, t in enumerate(kept):
            advantages[b, t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
            returns[b, t] = advantages[b, t] + values[b, t]
    return advantages, returns


def whiten(values: Floats, mask: Bools, ddof: int, shift: bool, eps: float) -> Floats:
    """(x - mean) / sqrt(var + eps), plus the mean without shift."""
    valid = [float(value) for value in values[mask]]
    if not valid:
        return np.zeros_like(values)
    mean = valid[0] if len(set(valid)) == 1 else sum(valid) / len(valid)
    squares = sum((value - mean) ** 2 for value in valid)
    variance = squares / (len(valid) - ddof) if len(valid) > ddof else 0.0
    scaled = np.array([(value - mean) / np.sqrt(variance + eps) + (0.0 if shift else mean) for value in valid])
    result = np.zeros_like(values)
    result[mask] = scaled
    return result


def k_estimates(gap: Floats) -> dict[str, Floats]:
    """Estimators and their gradients for gap = log policy - log reference."""
    return {
        "k1": gap,
        "k2": gap**2 / 2,
        "k3": np.exp(-gap) + gap - 1,
        "grad_k1": np.ones_like(gap),
        "grad_k2": gap,
        "grad_k3": 1 - np.exp(-gap),
    }


def aggregates(losses: Sequence[Floats], masks: Sequence[Bools], norm_length: float) -> dict[str, float]:
    """All aggregations over the rows of all micro-batches of all ranks."""
    rows = [loss[b][mask[b]] for loss, mask in zip(losses, masks, strict=True) for b in range(len(loss)) if mask[b].any()]
    if not rows:
        return dict.fromkeys(("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"), 0.0)
    total = float(np.mean([row.sum() for row in rows]))
    return {
        "token_mean": float(np.concatenate(rows).mean()),
        "seq_mean_token_mean": float(np.mean([row.mean() for row in rows])),
        "seq_mean_token_sum": total,
        "seq_mean_token_sum_norm": total / norm_length,
    }


def ppo(ratio: Floats, advantages: Floats, low: float, high: float, dual: float | None) -> tuple[Floats, Floats, Bools, Bools]:
    """Loss and gradient by the log-probability of each token; where the clipped branch is larger; where the dual clip acts."""
    loss, gradient = np.zeros_like(ratio), np.zeros_like(ratio)
    clipped, bounded = np.zeros(ratio.shape, dtype=bool), np.zeros(ratio.shape, dtype=bool)
    for i in np.ndindex(ratio.shape):
        kept = min(max(float(ratio[i]), 1 - low), 1 + high)
        plain, inside = -advantages[i] * ratio[i], -advantages[i] * kept
        loss[i], gradient[i] = (inside, 0.0) if inside > plain else (plain, plain)
        clipped[i] = inside > plain
        if dual is not None and advantages[i] < 0 and loss[i] > -dual * advantages[i]:
            loss[i], gradient[i], bounded[i] = -dual * advantages[i], 0.0, True
    return loss, gradient, clipped, bounded


def value_loss(values: Floats, old: Floats, returns: Floats, clip: float | None) -> tuple[Floats, Bools]:
    """Half the larger squared error; where the clipped one is larger."""
    plain = (values - returns) ** 2
    if clip is None:
        return plain / 2, np.zeros(values.shape, dtype=bool)
    inside = (np.clip(values, old - clip, old + clip) - returns) ** 2
    moved = np.abs(values - old) > clip
    return np.maximum(plain, inside) / 2, moved & (inside > plain)


def group_advantages(rewards: Floats, uids: Sequence[str], ddof: int | None, eps: float, leave_out: bool = False) -> Floats:
    """Reward minus the mean of the group (or of its other members), divided by its standard deviation if ddof is given."""
    result = np.zeros_like(rewards)
    for i, reward in enumerate(rewards):
        members = [rewards[j] for j in range(len(rewards)) if uids[j] == uids[i] and not np.isnan(rewards[j])]
        if np.isnan(reward) or len(set(members)) < 2:
            continue
        mean = sum(members) / len(members)
        others = (sum(members) - reward) / (len(members) - 1)
        deviation = 1.0
        if ddof is not None:
            deviation = np.sqrt(sum((member - mean) ** 2 for member in members) / (len(members) - ddof)) + eps
        result[i] = (reward - (others if leave_out else mean)) / deviation
    return result


def flat_share(rewards: Floats, uids: Sequence[str]) -> float:
    """Share of the groups with a scored member whose scored members are all equal."""
    groups = [{rewards[j] for j in range(len(rewards)) if uids[j] == uid and not np.isnan(rewards[j])} for uid in sorted(set(uids))]
    scored = [group for group in groups if group]
    return sum(len(group) == 1 for group in scored) / max(1, len(scored))


def discounted(rewards: Floats, mask: Bools, gamma: float) -> Floats:
    """Reward to go over trained tokens."""
    zeros = np.zeros_like(rewards)
    return gae(rewards, zeros, mask, gamma, 1.0, zeros[:, 0])[0]


def on_last(scores: Floats, mask: Bools) -> Floats:
    """Each score on its row's last trained token."""
    result = np.zeros(mask.shape)
    for b, score in enumerate(scores):
        if mask[b].any():
            result[b, np.flatnonzero(mask[b])[-1]] = score
    return result


def softmax(logits: Floats) -> Floats:
    """Probabilities over the last axis."""
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def entropy(logits: Floats) -> tuple[float, Floats]:
    """Entropy in nats and its gradient; entries of probability 0 count 0."""
    probs = softmax(logits)
    logs = np.log(np.where(probs > 0, probs, 1.0))
    value = -float((probs * logs).sum())
    return value, -probs * (logs + value)


def rate(index: int, base: float, warmup: int, total: int | None) -> float:
    """Learning rate of the update after `index` updates."""
    if index < warmup:
        return base * index / warmup
    if total is None:
        return base
    return base * max(0, total - index) / max(1, total - warmup)
