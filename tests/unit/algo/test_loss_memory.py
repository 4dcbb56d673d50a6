"""Memory of the loss: it grows with the tokens and with the vocabulary, never with their product."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.algo.aggregation import aggregate, count_trained
from shoal.algo.kl import token_kl
from shoal.algo.logprobs import CHUNK_ELEMENTS, token_logprobs
from shoal.algo.losses import ppo_loss
from tests.helpers.largest_tensor import LargestTensor

VOCAB_SIZE = 49_152
HIDDEN_SIZE = 8


def run_loss(num_tokens: int, *, vocab_size: int = VOCAB_SIZE, chunk_elements: int = CHUNK_ELEMENTS) -> None:
    """Forward and backward of all that a policy update computes from hidden states on: policy loss, KL and entropy bonus."""
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, requires_grad=True)
    weight = torch.randn(vocab_size, HIDDEN_SIZE, requires_grad=True)
    token_ids = torch.randint(0, vocab_size, (num_tokens,))
    logprobs, entropies = token_logprobs(hidden, weight, token_ids, temperature=0.7, chunk_elements=chunk_elements)
    mask = torch.ones(1, num_tokens, dtype=torch.bool)
    rows, old = logprobs[None], logprobs.detach()[None] - 0.1
    terms = ppo_loss(rows, old, torch.ones(1, num_tokens), mask, clip_low=0.2, clip_high=0.2)
    per_token = terms.per_token + 0.1 * token_kl(rows, old, mask, kl_estimator="k3") - 0.01 * entropies[None]
    torch.autograd.backward(aggregate(per_token, mask, count_trained([mask]), loss_aggregation="token_mean"))
    assert weight.grad is not None
    assert hidden.grad is not None


@pytest.mark.parametrize("num_tokens", [64, 256])
def test_no_tensor_of_forward_or_backward_is_larger_than_a_chunk_or_the_head(num_tokens: int) -> None:
    vocab_size, chunk = 1000, 8
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]  # torch leaves it untyped
        run_loss(num_tokens, vocab_size=vocab_size, chunk_elements=chunk * vocab_size)
    assert largest.num_elements == max(chunk * vocab_size, HIDDEN_SIZE * vocab_size)
    with LargestTensor() as dense:  # type: ignore[no-untyped-call]  # torch leaves it untyped
        run_loss(num_tokens, vocab_size=vocab_size, chunk_elements=num_tokens * vocab_size)
    assert dense.num_elements == num_tokens * vocab_size


PEAKS = """
import resource, sys
from tests.unit.algo.test_loss_memory import run_loss
for num_tokens in (256, 1280):
    run_loss(num_tokens)
    sys.stdout.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}\\n")
"""


def test_peak_memory_of_the_process_does_not_grow_with_tokens_times_vocabulary() -> None:
    # glibc otherwise keeps freed chunks in a heap that fragments until it has found its size.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    child = subprocess.run(
        [sys.executable, "-c", PEAKS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[3],
    )
    assert child.returncode == 0, child.stderr
    few, many = (int(line) for line in child.stdout.split())
    # One dense [T, V] float32 tensor more would be 201 MB; a backward would hold several.
    assert many - few < (1280 - 256) * VOCAB_SIZE * 4 / 10
