"""Random numeric cases of every family, with what the conventions expect: family -> makers of (inputs, expected)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from tests.helpers import case_reference as reference
from tests.helpers.case_numbers import Bools, Floats, Rng, dirty, random_mask, random_shape, random_uids, singles

Made: TypeAlias = tuple[dict[str, Any], dict[str, Any]]
BACKWARD = "backward_scalar_per_rank_and_microbatch_for_token_mean_when_dp_averages_gradients"


def _normal(rng: Rng, shape: tuple[int, ...] | int) -> Floats:
    return singles(rng.normal(size=shape))


def _share(chosen: Bools, mask: Bools) -> float:
    return float((chosen & mask).sum() / max(1, mask.sum()))


def _mean(values: Floats, mask: Bools) -> float:
    return float(values[mask].mean()) if mask.any() else 0.0


def gae(rng: Rng) -> Made:
    """Both settings of truncation, or the one that the inputs name."""
    shape = random_shape(rng)
    mask, rewards, values = random_mask(rng, shape), _normal(rng, shape), _normal(rng, shape)
    gamma, lam = float(rng.uniform(0.5, 1)), float(rng.uniform(0, 1))
    ended = rng.choice(["terminated", "truncated"], shape[0])
    after = dirty(rng, _normal(rng, shape[0]), ended == "truncated")
    both = [
        dict(zip(("advantages", "returns"), reference.gae(rewards, values, mask, gamma, lam, bootstrap), strict=True))
        for bootstrap in (np.zeros(shape[0]), np.where(ended == "truncated", after, 0.0))
    ]
    inputs = {"rewards": dirty(rng, rewards, mask), "values": dirty(rng, values, mask), "mask": mask, "gamma": gamma, "lam": lam}
    inputs |= {"ended": ended.tolist(), "bootstrap_value": after}
    if rng.random() < 0.5:
        return inputs, {"bootstrap_on_truncation_true": both[1], "bootstrap_on_truncation_false": both[0]}
    flag = bool(rng.random() < 0.5)
    return inputs | {"bootstrap_on_truncation": flag}, both[flag]


def gae_without_optional_keys(rng: Rng) -> Made:
    """Undiscounted and finished."""
    shape = random_shape(rng)
    mask, rewards, values = random_mask(rng, shape), _normal(rng, shape), _normal(rng, shape)
    advantages, returns = reference.gae(rewards, values, mask, 1.0, 1.0, np.zeros(shape[0]))
    return {"rewards": rewards, "values": values, "mask": mask}, {"advantages": advantages, "returns": returns}


def token_rewards(rng: Rng) -> Made:
    """With and without a penalty; the pad id is also the EOS id."""
    rows, width = random_shape(rng)
    lengths = rng.integers(0, width + 1, rows)
    mask = np.arange(width) < lengths[:, None]
    scores, coef = _normal(rng, rows), float(rng.uniform(0, 0.5))
    inputs = {"response_ids": rng.integers(0, 9, (rows, width)), "response_length": lengths, "eos_token_id": 2, "pad_token_id": 2}
    rewards = reference.on_last(scores, mask)
    if rng.random() < 0.7:
        logprobs, ref = -np.abs(_normal(rng, mask.shape)), -np.abs(_normal(rng, mask.shape))
        rewards = np.where(mask, rewards - coef * (logprobs - ref), 0.0)
        inputs |= {"logprobs": dirty(rng, logprobs, mask), "ref_logprobs": dirty(rng, ref, mask), "kl_coef": coef}
    return inputs | {"score": scores}, {"mask": mask, "token_rewards": rewards}


def overlong_shaping(rng: Rng) -> Made:
    """Lengths on all sides of the buffer."""
    longest = int(rng.integers(5, 50))
    buffer = int(rng.integers(1, longest))
    lengths = rng.integers(0, longest + 5, int(rng.integers(1, 9)))
    penalty = [-min(1.0, max(0.0, (length - (longest - buffer)) / buffer)) for length in lengths]
    return {"length": lengths, "max_len": longest, "buffer": buffer}, {"penalty": penalty}


def masked_whitening(rng: Rng) -> Made:
    """Plain, or sub-batches a and b; now and then constant."""
    eps = float(rng.choice([1e-8, 1e-5, 1e-3]))
    inputs: dict[str, Any] = {"eps": eps}
    expected: dict[str, Any] = {}
    for part in ["", "b_"] if rng.random() < 0.5 else ["a_", "b_"]:
        shape = random_shape(rng)
        mask = random_mask(rng, shape)
        values = np.full(shape, singles(rng.normal(size=1) * 7)[0]) if rng.random() < 0.2 else _normal(rng, shape) * 3 + 1
        batch = {"values": dirty(rng, values, mask), "mask": mask}
        inputs |= {part[0]: batch} if part else batch
        for ddof in (0, 1):
            for suffix, shift in (("", True), ("_shiftTrue", True), ("_shiftFalse", False)):
                expected[f"{part}ddof{ddof}{suffix}"] = reference.whiten(values, mask, ddof, shift, eps)
    return inputs, expected


def kl_estimators(rng: Rng) -> Made:
    """A list, or rows with a mask."""
    shape: tuple[int, ...] = (int(rng.integers(1, 9)),) if rng.random() < 0.5 else random_shape(rng)
    logprobs, ref = -np.abs(_normal(rng, shape)), -np.abs(_normal(rng, shape)) * 2
    estimates = reference.k_estimates(logprobs - ref)
    inputs: dict[str, Any] = {"logprobs": logprobs, "ref_logprobs": ref}
    if len(shape) == 2:
        mask = random_mask(rng, shape)
        inputs = {"logprobs": dirty(rng, logprobs, mask), "ref_logprobs": dirty(rng, ref, mask), "mask": mask}
        estimates = {name: np.where(mask, value, 0.0) for name, value in estimates.items()}
    through = {"k3_straight_through": estimates["k3"], "grad_k3_straight_through": estimates["grad_k2"]}
    return inputs, {**estimates, **through}


def kl_of_distributions(rng: Rng) -> Made:
    """Expectations over the policy; it may never sample an id."""
    size = int(rng.integers(2, 7))
    policy, ref = rng.dirichlet(np.ones(size)), rng.dirichlet(np.ones(size))
    if rng.random() < 0.4:
        policy = np.append(policy, 0.0)
        ref = np.append(ref * 0.9, 0.1)
    sampled = policy > 0
    p, q = policy[sampled], ref[sampled]
    gap = np.log(p) - np.log(q)
    expected = {f"E_{name}": float((p * reference.k_estimates(gap)[name]).sum()) for name in ("k1", "k2", "k3")}
    return {"policy": policy, "ref": ref}, expected | {"kl_p_q": float((p * gap).sum())}


def adaptive_kl(rng: Rng) -> Made:
    """A few steps on both sides of the target."""
    coef, target, horizon = float(rng.uniform(0.01, 1)), float(rng.uniform(1, 10)), int(rng.integers(100, 20000))
    steps = [{"current": float(rng.uniform(0, 20)), "n": int(rng.integers(1, 512))} for _ in range(int(rng.integers(1, 6)))]
    after: list[float] = []
    for step in steps:
        error = min(0.2, max(-0.2, step["current"] / target - 1))
        after.append((after[-1] if after else coef) * (1 + error * step["n"] / horizon))
    return {"kl_coef": coef, "target": target, "horizon": horizon, "steps": steps}, {"kl_coef_after": after}


def loss_aggregation(rng: Rng) -> Made:
    """Any ranks and micro-batches, of any width; a rank may have none."""
    width, ranks, losses, masks = int(rng.integers(1, 6)), [], [], []
    for _ in range(int(rng.integers(1, 5))):
        micro_batches = []
        for _ in range(int(rng.integers(0, 4))):
            shape = (int(rng.integers(1, 4)), width + int(rng.integers(0, 3)))
            mask, loss = random_mask(rng, shape), _normal(rng, shape)
            losses.append(loss)
            masks.append(mask)
            micro_batches.append({"loss": dirty(rng, loss, mask), "mask": mask})
        ranks.append(micro_batches)
    norm_length = int(rng.integers(1, 20))
    expected: dict[str, Any] = reference.aggregates(losses, masks, norm_length)
    expected["valid_tokens"] = sum(int(mask.sum()) for mask in masks)
    expected["valid_sequences"] = sum(int(mask.any(axis=1).sum()) for mask in masks)
    scale = len(ranks) / max(1, expected["valid_tokens"])
    parts = iter([float(loss[mask].sum()) * scale for loss, mask in zip(losses, masks, strict=True)])
    expected[BACKWARD] = [[next(parts) for _ in micro_batches] for micro_batches in ranks]
    is_skipped = expected["valid_tokens"] == 0
    expected["optimizer_step"] = "skipped, counted and logged" if is_skipped else "applied"
    return {"ranks": ranks, "norm_length": norm_length}, expected


def empty_aggregation(rng: Rng) -> Made:
    """No valid token at all, and garbage everywhere."""
    shapes = [random_shape(rng) for _ in range(int(rng.integers(1, 5)))]
    ranks = [[{"loss": rng.choice((*GARBAGE_AND_ONE,), shape), "mask": np.zeros(shape, dtype=bool)}] for shape in shapes]
    zeros = dict.fromkeys(("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"), 0.0)
    sentences = {"gradients": "all exactly 0", "optimizer_step": "skipped, counted and logged; the schedule stays"}
    return {"ranks": ranks, "norm_length": 8}, zeros | sentences


GARBAGE_AND_ONE = (1.0, float("nan"), float("inf"))


def ppo_clip(rng: Rng) -> Made:
    """Ratios or their logarithms, in and outside of the range and on its border; a list or rows."""
    shape: tuple[int, ...] = (int(rng.integers(1, 12)),) if rng.random() < 0.5 else random_shape(rng)
    low, high = float(rng.choice([0.1, 0.2, 0.3])), float(rng.choice([0.2, 0.28, 0.5]))
    dual = float(rng.choice([2.0, 3.0])) if rng.random() < 0.5 else None
    mask = random_mask(rng, shape)
    advantages = _normal(rng, shape)
    inputs: dict[str, Any] = {"advantages": dirty(rng, advantages, mask), "clip_low": low, "clip_high": high}
    if rng.random() < 0.6:
        ratio = np.where(rng.random(shape) < 0.3, rng.choice([1 - low, 1.0, 1 + high], shape), np.exp(_normal(rng, shape)))
        inputs["ratio"] = dirty(rng, ratio, mask)
    else:
        log_ratio = np.where(rng.random(shape) < 0.3, 0.0, _normal(rng, shape))
        ratio = np.exp(log_ratio)
        inputs["log_ratio"] = dirty(rng, log_ratio, mask)
    inputs |= {"mask": mask} if rng.random() < 0.8 or not mask.all() else {}
    inputs |= {} if dual is None else {"dual_clip_c": dual}
    return inputs, _ppo_expected(ratio, advantages, mask, reference.ppo(ratio, advantages, low, high, dual))


def _ppo_expected(ratio: Floats, advantages: Floats, mask: Bools, found: tuple[Floats, Floats, Bools, Bools]) -> dict[str, Any]:
    loss, gradient, clipped, bounded = found
    gradient = np.where(mask, gradient, 0.0)
    return {
        "per_token_loss": np.where(mask, loss, 0.0),
        "grad_logp_per_token": gradient,
        "token_mean": _mean(loss, mask),
        "grad_token_mean": gradient / max(1, mask.sum()),
        "clipfrac": _share(clipped, mask),
        "clipfrac_lower": _share(bounded, mask),
        "approx_kl_k1": _mean(-np.log(ratio), mask),
    }


def value_loss(rng: Rng) -> Made:
    """With and without a clip."""
    shape: tuple[int, ...] = (int(rng.integers(1, 12)),) if rng.random() < 0.5 else random_shape(rng)
    mask, clip = random_mask(rng, shape), float(rng.choice([0.1, 0.2, 1.0])) if rng.random() < 0.8 else None
    values, old, returns = (_normal(rng, shape) for _ in range(3))
    loss, clipped = reference.value_loss(values, old, returns, clip)
    arrays = {"values": values, "old_values": old, "returns": returns}
    inputs: dict[str, Any] = {name: dirty(rng, array, mask) for name, array in arrays.items()} | {"mask": mask}
    inputs |= {} if clip is None else {"clip_range": clip}
    expected = {"per_token": np.where(mask, loss, 0.0), "token_mean": _mean(loss, mask), "clipfrac": _share(clipped, mask)}
    return inputs, expected


def _outcomes(rng: Rng) -> tuple[Floats, list[str]]:
    """Interleaved groups, some unscored samples, some groups without spread."""
    size = int(rng.integers(1, 16))
    rewards = rng.choice([0.0, 1.0], size) if rng.random() < 0.5 else _normal(rng, size)
    return np.where(rng.random(size) < 0.1, np.nan, rewards), random_uids(rng, size)


def grpo(rng: Rng) -> Made:
    """All conventions side by side."""
    rewards, uids = _outcomes(rng)
    eps = float(rng.choice([1e-6, 1e-4]))
    expected = {
        "ddof0": reference.group_advantages(rewards, uids, 0, eps),
        "ddof1": reference.group_advantages(rewards, uids, 1, eps),
        "no_std": reference.group_advantages(rewards, uids, None, eps),
        "unnormalised": reference.group_advantages(rewards, uids, None, eps, leave_out=True),
        "frac_zero_std_groups": reference.flat_share(rewards, uids),
        "bound_when_normalised": "abs(advantage) <= 10 for every sample",
    }
    return {"rewards": rewards, "uid": uids, "eps": eps}, expected


def grpo_without_spread(rng: Rng) -> Made:
    """Every group of equal rewards."""
    uids = random_uids(rng, int(rng.integers(1, 12)))
    values = {uid: float(_normal(rng, 1)[0]) for uid in uids}
    rewards = [values[uid] for uid in uids]
    return {"rewards": rewards, "uid": uids}, {"any_ddof": [0.0] * len(uids), "frac_zero_std_groups": 1.0}


def rloo(rng: Rng) -> Made:
    """Leave-one-out baseline."""
    rewards, uids = _outcomes(rng)
    return {"rewards": rewards, "uid": uids}, {"advantages": reference.group_advantages(rewards, uids, None, 0.0, leave_out=True)}


def reinforce_pp(rng: Rng) -> Made:
    """With and without a penalty."""
    shape = random_shape(rng)
    mask, scores = random_mask(rng, shape), _normal(rng, shape[0])
    gamma, coef = float(rng.uniform(0.5, 1)), float(rng.uniform(0, 0.5))
    rewards = reference.on_last(scores, mask)
    inputs: dict[str, Any] = {"mask": mask, "score": scores, "gamma": gamma}
    if rng.random() < 0.7:
        logprobs, ref = -np.abs(_normal(rng, shape)), -np.abs(_normal(rng, shape))
        rewards = np.where(mask, rewards - coef * (logprobs - ref), 0.0)
        inputs |= {"logprobs": dirty(rng, logprobs, mask), "ref_logprobs": dirty(rng, ref, mask), "kl_coef": coef}
    returns = reference.discounted(rewards, mask, gamma)
    mean = _mean(returns, mask)
    var = _mean((returns - mean) ** 2, mask)
    advantages = np.where(mask, (returns - mean) / np.sqrt(max(var, 1e-8)), 0.0)
    return inputs, {"returns": returns, "mean": mean, "var": var, "advantages": advantages}


def truncated_is(rng: Rng) -> Made:
    """A cap, or two bounds."""
    shape = random_shape(rng)
    mask = random_mask(rng, shape)
    old, rollout = -np.abs(_normal(rng, shape)), -np.abs(_normal(rng, shape))
    loss, ratio = _normal(rng, shape), np.exp(old - rollout)
    cap, low, high = float(rng.uniform(1, 3)), float(rng.uniform(0.1, 1)), float(rng.uniform(1, 3))
    is_capped = bool(rng.random() < 0.5)
    weights = np.minimum(ratio, cap) if is_capped else np.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    inputs: dict[str, Any] = {"train_old_logprobs": dirty(rng, old, mask), "rollout_logprobs": dirty(rng, rollout, mask), "mask": mask}
    inputs |= {"cap": cap} if is_capped else {"low": low, "high": high}
    inputs["per_token_policy_loss"] = dirty(rng, loss, mask)
    expected = {"weights": np.where(mask, weights, 0.0), "weighted_token_mean": _mean(weights * loss, mask)}
    return inputs, expected | {"dropped_fraction": _share(weights == 0, mask)}


def entropy(rng: Rng) -> Made:
    """Rows of any length, with entries of probability 0."""
    rows = [_normal(rng, int(rng.integers(1, 8))) * 3 for _ in range(int(rng.integers(1, 5)))]
    rows = [np.where((rng.random(len(row)) < 0.3) & (np.arange(len(row)) > 0), -np.inf, row) for row in rows]
    found = [reference.entropy(row) for row in rows]
    return {"logits": rows}, {"entropy": [value for value, _ in found], "grad_logits": [gradient for _, gradient in found]}


def temperature(rng: Rng) -> Made:
    """One position, or several."""
    size, scale = int(rng.integers(2, 9)), float(rng.uniform(0.3, 2))
    logits, tokens = _normal(rng, (int(rng.integers(1, 4)), size)), rng.integers(0, size, 3)
    logprobs = [float(np.log(reference.softmax(row / scale)[token])) for row, token in zip(logits, tokens, strict=False)]
    if len(logits) == 1:
        expected: dict[str, Any] = {"logprob": logprobs[0], "ratio_trainer_over_rollout": 1.0}
        return {"logits": logits[0], "temperature": scale, "token": int(tokens[0])}, expected
    expected = {"logprob": logprobs, "ratio_trainer_over_rollout": [1.0] * len(logits)}
    return {"logits": logits, "temperature": scale, "token": tokens[: len(logits)]}, expected


def grad_norm(rng: Rng) -> Made:
    """Shards of any size on any number of ranks, also empty ones."""
    shards = [_normal(rng, int(rng.integers(0, 5))) for _ in range(int(rng.integers(1, 5)))]
    largest = float(rng.uniform(0.1, 5))
    norm = float(np.sqrt(sum(float((shard**2).sum()) for shard in shards)))
    coefficient = min(1.0, largest / (norm + 1e-6))
    expected = {"global_norm": norm, "clip_coefficient": coefficient, "clipped": [shard * coefficient for shard in shards]}
    return {"shards": shards, "max_norm": largest}, expected


def staleness_gate(rng: Rng) -> Made:
    """Any state."""
    limits = {"max_concurrent": 30, "running": 20, "eta": 4, "version": 9, "batch": 8, "accepted": 60}
    states = [{name: int(rng.integers(0, limit)) for name, limit in limits.items()} for _ in range(int(rng.integers(1, 8)))]
    capacity = [
        max(0, min(s["max_concurrent"] - s["running"], (s["eta"] + s["version"] + 1) * s["batch"] - s["accepted"] - s["running"]))
        for s in states
    ]
    return {"states": states}, {"capacity": capacity}


def lr_schedule(rng: Rng) -> Made:
    """With and without warm-up and decay."""
    base, warmup = float(rng.uniform(1e-6, 1e-2)), int(rng.integers(0, 6))
    total = warmup + int(rng.integers(1, 30)) if rng.random() < 0.8 else None
    checkpoint = int(rng.integers(0, 40))
    inputs: dict[str, Any] = {"base_lr": base, "warmup": warmup, "checkpoint_after_updates": checkpoint}
    inputs |= {} if total is None else {"total": total}
    rates = {str(index): reference.rate(int(index), base, warmup, total) for index in rng.integers(0, 40, 5)}
    resumed = reference.rate(checkpoint, base, warmup, total)
    return inputs, {"lr_used_for_update_index": rates, "lr_of_first_update_after_resume": resumed}


MAKERS: Mapping[str, tuple[Callable[[Rng], Made], ...]] = {
    "gae": (gae, gae_without_optional_keys),
    "token_rewards": (token_rewards,),
    "overlong_shaping": (overlong_shaping,),
    "masked_whitening": (masked_whitening,),
    "kl_estimators": (kl_estimators, kl_of_distributions),
    "adaptive_kl": (adaptive_kl,),
    "loss_aggregation": (loss_aggregation, empty_aggregation),
    "ppo_clip": (ppo_clip,),
    "value_loss": (value_loss,),
    "grpo": (grpo, grpo_without_spread),
    "rloo": (rloo,),
    "reinforce_pp": (reinforce_pp,),
    "truncated_is": (truncated_is,),
    "entropy": (entropy,),
    "temperature": (temperature,),
    "grad_norm": (grad_norm,),
    "staleness_gate": (staleness_gate,),
    "lr_schedule": (lr_schedule,),
}
