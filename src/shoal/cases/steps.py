"""Families of what surrounds a loss: distributions over ids, gradient norms, learning rates, admission."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from shoal.algo.gradients import clip_coefficient, global_grad_norm
from shoal.algo.logprobs import logits_to_logprobs, token_logprobs
from shoal.algo.schedule import learning_rate
from shoal.algo.steering import admission_capacity
from shoal.cases.comparing import ByKey, step_claim
from shoal.cases.family import Family
from shoal.cases.inputs import Inputs, to_tensor
from shoal.cases.ranks import on_every_rank
from shoal.errors import DataError


def _chunked(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The trainer's own function for given logits of one position: a hidden state of 1 and the logits as the head.

    Returns: log-probability and entropy, each [N] of the same position; the head, whose gradient is that of the logits.
    """
    head = logits[:, None].clone().requires_grad_()
    hidden = torch.ones(len(token_ids), 1, dtype=logits.dtype)
    logprobs, entropies = token_logprobs(hidden, head, token_ids, temperature=temperature)
    return logprobs, entropies, head


def _at_positions(logits: object, dtype: torch.dtype, read: Callable[[Tensor], object], path: str = "inputs.logits") -> object:
    """Read the logits of each position; lists of any depth, whose innermost may differ in length."""
    if isinstance(logits, list) and any(isinstance(row, list) for row in logits):
        return [_at_positions(row, dtype, read, f"{path}[{number}]") for number, row in enumerate(logits)]
    return read(to_tensor(logits, dtype, path).reshape(-1))


def _entropy(inputs: Inputs, *, gradient: bool) -> object:
    temperature = inputs.number("temperature", 1.0)

    def read(logits: Tensor) -> object:
        _, entropies, head = _chunked(logits, torch.zeros(1, dtype=torch.int64), temperature)
        return torch.autograd.grad(entropies[0], head)[0][:, 0].tolist() if gradient else entropies[0].item()

    return _at_positions(inputs.get("logits"), inputs.dtype, read)


ENTROPY = Family(
    required=("logits",),
    optional=("temperature",),
    outputs={
        "entropy": lambda inputs: _entropy(inputs, gradient=False),
        "grad_logits": lambda inputs: _entropy(inputs, gradient=True),
    },
)


def _sampled(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Logits [N, V] and ids [N] of all positions; a plain list of logits is one position."""
    logits, tokens = inputs.tensor("logits"), inputs.integers("token")
    shape, size = list(tokens.shape), logits.shape[-1] if logits.ndim else 0
    if list(logits.shape) != [*shape, size] or not bool(((tokens >= 0) & (tokens < size)).all()):
        raise DataError(f"inputs.token is {tokens.tolist()}; it needs an id in [0, {size}) for logits of shape {list(logits.shape)}")
    return logits.reshape(-1, size), tokens.reshape(-1)


def _trainer_logprobs(inputs: Inputs) -> Tensor:
    logits, tokens = _sampled(inputs)
    temperature = inputs.number("temperature", 1.0)
    found = [_chunked(row, token[None], temperature)[0][0] for row, token in zip(logits, tokens, strict=True)]
    return torch.stack(found).detach()


def _like_token(found: Tensor, inputs: Inputs) -> Tensor:
    return found.reshape(inputs.integers("token").shape)


def _trainer_over_rollout(inputs: Inputs) -> Tensor:
    """The trainer's chunked function against a whole softmax over divided logits, as the engine takes it."""
    logits, tokens = _sampled(inputs)
    rollout = logits_to_logprobs(logits, tokens, temperature=inputs.number("temperature", 1.0))
    return _like_token((_trainer_logprobs(inputs) - rollout).exp(), inputs)


TEMPERATURE = Family(
    required=("logits", "token"),
    optional=("temperature",),
    outputs={"logprob": lambda inputs: _like_token(_trainer_logprobs(inputs), inputs), "ratio_trainer_over_rollout": _trainer_over_rollout},
)


def _shards(inputs: Inputs) -> list[Tensor]:
    """What each rank holds."""
    shards = inputs.items("shards")
    if not shards:
        raise DataError("inputs.shards is empty; give a list for each rank")
    return [to_tensor(shard, inputs.dtype, f"inputs.shards[{number}]") for number, shard in enumerate(shards)]


def _global_norm(inputs: Inputs) -> float:
    """As every rank computes it from its own shard and a sum over ranks."""
    norms = on_every_rank(lambda shard, sum_over_ranks: global_grad_norm([shard], sum_over_ranks), _shards(inputs))
    return float(norms[0])


def _coefficient(inputs: Inputs) -> float:
    return clip_coefficient(_global_norm(inputs), inputs.number("max_norm"))


GRAD_NORM = Family(
    required=("shards", "max_norm"),
    outputs={
        "global_norm": _global_norm,
        "clip_coefficient": _coefficient,
        "clipped": lambda inputs: [(shard * _coefficient(inputs)).tolist() for shard in _shards(inputs)],
        "optimizer_step": lambda inputs: step_claim(is_skipped=not math.isfinite(_global_norm(inputs))),
    },
)


def _capacities(inputs: Inputs) -> list[int]:
    names = ("max_concurrent", "running", "eta", "version", "batch", "accepted")
    return [_capacity(state) for state in inputs.parts("states", required=names)]


def _capacity(state: Inputs) -> int:
    return admission_capacity(
        max_concurrent=state.integer("max_concurrent"),
        running=state.integer("running"),
        max_staleness=state.integer("eta"),
        policy_version=state.integer("version"),
        batch_size=state.integer("batch"),
        accepted=state.integer("accepted"),
    )


STALENESS_GATE = Family(required=("states",), outputs={"capacity": _capacities})


_SCHEDULES: Mapping[str, Literal["constant", "linear", "cosine"]] = {"constant": "constant", "linear": "linear", "cosine": "cosine"}


def _rate(inputs: Inputs, num_updates: int) -> float:
    total = inputs.integer("total") if inputs.has("total") else None
    warmup = inputs.integer("warmup") if inputs.has("warmup") else 0
    schedule = inputs.choice("schedule", _SCHEDULES, "linear")
    return learning_rate(
        num_updates,
        lr=inputs.number("base_lr"),
        warmup_steps=warmup,
        total_steps=total,
        schedule=_SCHEDULES[schedule],
        min_share=inputs.number("min_share", 0.0),
    )


def _rates(inputs: Inputs) -> ByKey:
    def compute(index: str) -> float:
        if not index.isdecimal():
            raise DataError(f"update index {index!r} is not a whole number")
        return _rate(inputs, int(index))

    return ByKey(compute)


LR_SCHEDULE = Family(
    required=("base_lr",),
    optional=("warmup", "total", "checkpoint_after_updates", "schedule", "min_share"),
    outputs={
        "lr_used_for_update_index": _rates,
        "lr_of_first_update_after_resume": lambda inputs: _rate(inputs, inputs.integer("checkpoint_after_updates")),
    },
)
"""Linear warm-up, then linear decay to 0 at `total` if the case names no schedule, or constant without a total."""
