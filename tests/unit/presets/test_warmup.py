"""Supervised warm-up, on a stub policy that fits in a line."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from shoal_trainer.presets.problems import Row
from shoal_trainer.presets.tokenizer import build_char_tokenizer
from shoal_trainer.presets.warmup import EncodedRows, WarmUpSettings, encode_rows, greedy_accuracy, warm_up
from torch import Tensor

ROWS: list[Row] = [{"prompt": f"{digit}=", "answer": str(digit)} for digit in range(10)]


class CopyPolicy(torch.nn.Module):
    """Predicts the next token from the one two places back; learns to copy a digit, then to stop."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(vocab_size, vocab_size)
        torch.nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        back = torch.nn.functional.pad(input_ids, (1, 0))[:, :-1]
        return SimpleNamespace(logits=self.table(back))


def encoded() -> EncodedRows:
    return encode_rows(ROWS, build_char_tokenizer())


def test_encode_rows_masks_the_answer_and_its_eos() -> None:
    tokenizer = build_char_tokenizer()
    rows = encode_rows([{"prompt": "1+2=", "answer": "3"}, {"prompt": "50+50=", "answer": "100"}], tokenizer)
    assert rows.input_ids.shape == (2, 10)
    assert tokenizer.decode(rows.input_ids[0][rows.answer_mask[0]]) == "3<eos>"
    assert tokenizer.decode(rows.input_ids[1][rows.answer_mask[1]]) == "100<eos>"
    assert rows.input_ids[0, 6:].tolist() == [tokenizer.pad_token_id] * 4


def test_greedy_accuracy_wants_every_token_right() -> None:
    policy = CopyPolicy(99)
    rows = encoded()
    with torch.no_grad():
        policy.table.weight.zero_()
        for row in ROWS[:4]:
            first, equals, digit, eos = encode_rows([row], build_char_tokenizer()).input_ids[0].tolist()
            policy.table.weight[first, digit] = 1.0
            policy.table.weight[equals, eos] = 1.0
    assert greedy_accuracy(policy, rows) == pytest.approx(0.4)


def test_warm_up_ends_inside_the_band() -> None:
    policy, rows = CopyPolicy(99), encoded()
    settings = WarmUpSettings(lr=0.01, lr_warm_up_steps=1, batch_size=4, evaluate_every=1, accuracy_low=0.5, accuracy_high=0.6)
    result = warm_up(policy, rows, rows, settings, seed=0)
    assert 0.5 <= result.validation_accuracy <= 0.6
    assert greedy_accuracy(policy, rows) == result.validation_accuracy


def test_warm_up_that_jumps_over_the_band_goes_back() -> None:
    rows = encoded()
    leap = WarmUpSettings(lr=2.0, lr_warm_up_steps=1, batch_size=64, evaluate_every=1, max_steps=1, accuracy_low=0.9, accuracy_high=1.0)
    assert warm_up(CopyPolicy(99), rows, rows, leap, seed=0).validation_accuracy == 1.0
    policy = CopyPolicy(99)
    result = warm_up(policy, rows, rows, dataclasses.replace(leap, max_steps=100, accuracy_low=0.3, accuracy_high=0.8), seed=0)
    assert result.steps > 1
    assert 0.3 <= result.validation_accuracy <= 0.8
    assert greedy_accuracy(policy, rows) == result.validation_accuracy


def test_warm_up_is_bounded() -> None:
    policy, rows = CopyPolicy(99), encoded()
    result = warm_up(policy, rows, rows, WarmUpSettings(lr=1e-6, max_steps=3, evaluate_every=2), seed=0)
    assert result.steps == 3
    assert result.validation_accuracy < 0.35


def test_warm_up_is_the_same_for_the_same_seed() -> None:
    settings = WarmUpSettings(lr=0.01, max_steps=5)
    rows = encoded()
    policies = [CopyPolicy(99) for _ in range(3)]
    for policy, seed in zip(policies, (1, 1, 2), strict=True):
        warm_up(policy, rows, rows, settings, seed)
    assert torch.equal(policies[0].table.weight, policies[1].table.weight)
    assert not torch.equal(policies[0].table.weight, policies[2].table.weight)
