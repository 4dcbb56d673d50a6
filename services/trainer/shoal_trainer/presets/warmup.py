"""Supervised warm-up of a policy until its greedy accuracy lies in a band.

Legend: B rows, W columns (prompt, answer, eos, right-padded), V vocabulary.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoal_trainer.presets.problems import Row

_log = logging.getLogger("shoal_trainer.presets")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpSettings:
    """How to warm up. Accuracies are shares of the validation rows answered exactly by greedy decoding."""

    lr: float = 1e-3
    lr_warm_up_steps: int = 50
    batch_size: int = 128
    evaluate_every: int = 10
    max_steps: int = 600
    accuracy_low: float = 0.35
    accuracy_high: float = 0.42


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpResult:
    """Where warm-up ended."""

    steps: int
    loss: float
    validation_accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """input_ids: [B, W] int64. answer_mask: [B, W] bool, True on the answer and its eos."""

    input_ids: Tensor
    answer_mask: Tensor


@dataclass(slots=True)
class _Snapshot:
    model: dict[str, Any]
    optimizer: dict[str, Any]

    @classmethod
    def take(cls, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> _Snapshot:
        """Copy the state of both."""
        return cls(copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give both their copied state again."""
        model.load_state_dict(self.model)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer))


def encode_rows(rows: Sequence[Row], tokenizer: Any) -> EncodedRows:  # noqa: ANN401 - transformers ships no usable types
    """Tokenise prompt + answer + eos of each row, right-padded to the longest."""
    prompts = tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
    answers = tokenizer([row["answer"] for row in rows], add_special_tokens=False)["input_ids"]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)) + 1
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    answer_mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer) + 1
        input_ids[index, :end] = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        answer_mask[index, len(prompt) : end] = True
    return EncodedRows(input_ids=input_ids, answer_mask=answer_mask)


@torch.no_grad()
def greedy_accuracy(model: torch.nn.Module, rows: EncodedRows) -> float:
    """Share of rows that greedy decoding answers exactly.

    One forward over the right answers says it: greedy decoding gives the answer if and only if each of its tokens is the
    most likely one after the tokens before it.
    """
    predicted = model(input_ids=rows.input_ids).logits[:, :-1].argmax(-1)
    right = (predicted == rows.input_ids[:, 1:]) | ~rows.answer_mask[:, 1:]
    return float(right.all(dim=1).float().mean())


def warm_up(model: torch.nn.Module, train: EncodedRows, validation: EncodedRows, settings: WarmUpSettings, seed: int) -> WarmUpResult:
    """Train next-token prediction of the answers until validation accuracy lies in the band.

    Accuracy can jump over the band between two evaluations; then the weights go back to the evaluation before and the
    learning rate is halved. Deterministic for a seed and a thread count; at most `max_steps` steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    below, scale, accuracy, loss = _Snapshot.take(model, optimizer), 1.0, 0.0, float("inf")
    for step in range(1, settings.max_steps + 1):
        lr = settings.lr * scale * min(1.0, step / settings.lr_warm_up_steps)
        loss = _train_step(model, optimizer, _sample(train, settings.batch_size, generator), lr)
        if step % settings.evaluate_every:
            continue
        accuracy = greedy_accuracy(model, validation)
        _log.info("warm-up step %d loss %.3f accuracy %.3f", step, loss, accuracy)
        if settings.accuracy_low <= accuracy <= settings.accuracy_high:
            return WarmUpResult(steps=step, loss=loss, validation_accuracy=accuracy)
        if accuracy > settings.accuracy_high:
            below.restore(model, optimizer)
            scale /= 2
        else:
            below = _Snapshot.take(model, optimizer)
    _log.warning("warm-up ended after %d steps at accuracy %.3f, outside the band", settings.max_steps, accuracy)
    return WarmUpResult(steps=settings.max_steps, loss=loss, validation_accuracy=greedy_accuracy(model, validation))


def _sample(rows: EncodedRows, batch_size: int, generator: torch.Generator) -> EncodedRows:
    index = torch.randint(len(rows.input_ids), (batch_size,), generator=generator)
    return EncodedRows(input_ids=rows.input_ids[index], answer_mask=rows.answer_mask[index])


def _train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: EncodedRows, lr: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = lr
    logits = model(input_ids=batch.input_ids).logits[:, :-1]
    mask = batch.answer_mask[:, 1:]
    loss = functional.cross_entropy(logits[mask], batch.input_ids[:, 1:][mask])
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())
