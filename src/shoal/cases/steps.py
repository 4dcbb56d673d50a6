"""Families of what surrounds a loss: distributions over ids, gradient norms, learning rates, admission."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from shoal.algo.gradients import clip_coefficient, global_grad_norm
from shoal.algo.logprobs import logits_to_logprobs, token_logprobs
from shoal.algo.schedule import learning_rate
from shoal.algo.steering import admission_capacity
from shoal.cases.comparing import ByKey
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


def _rows(inputs: Inputs) -> list[Tensor]:
    """Logits of each position; rows may differ in length."""
    return [to_tensor(row, inputs.dtype, f"inputs.logits[{number}]") for number, row in enumerate(inputs.items("logits"))]


def _entropies(inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    temperature = inputs.number("temperature", 1.0)
    runs = [_chunked(row, torch.zeros(1, dtype=torch.int64), temperature) for row in _rows(inputs)]
    return [entropy[0] for _, entropy, _ in runs], [head for _, _, head in runs]


def _entropy_gradients(inputs: Inputs) -> list[object]:
    entropies, heads = _entropies(inputs)
    pairs = zip(entropies, heads, strict=True)
    return [torch.autograd.grad(entropy, head)[0][:, 0].tolist() for entropy, head in pairs]


ENTROPY = Family(
    required=("logits",),
    optional=("temperature",),
    outputs={"entropy": lambda inputs: [entropy.item() for entropy in _entropies(inputs)[0]], "grad_logits": _entropy_gradients},
)


def _sampled(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Logits [N, V] and ids [N]; a plain list is one position."""
    logits, tokens = inputs.rows("logits"), inputs.integers("token").reshape(-1)
    if tokens.shape != logits.shape[:1] or not bool(((tokens >= 0) & (tokens < logits.shape[1])).all()):
        raise DataError(f"inputs.token is {tokens.tolist()}; it needs one id in [0, {logits.shape[1]}) for each of {len(logits)} positions")
    return logits, tokens


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
