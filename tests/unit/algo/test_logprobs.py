"""Chunked log-probabilities and entropies against the dense ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.algo.logprobs import logits_to_entropy, logits_to_logprobs, token_logprobs
from tests.helpers.math_cases import assert_close, math_case, numbers


def weighted(logprobs: Tensor, entropies: Tensor) -> Tensor:
    steps = torch.arange(1.0, 1.0 + logprobs.shape[0], dtype=logprobs.dtype)
    return (logprobs * steps).sum() + (entropies * steps.flip(0)).sum()


@pytest.mark.parametrize("chunk_elements", [1, 40, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab_size", [None, 11])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_chunked_equals_dense(chunk_elements: int, temperature: float, vocab_size: int | None, with_entropy: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 5, dtype=torch.float64, requires_grad=True)
    token_ids = torch.randint(0, 11, (9,))
    logits = (hidden @ weight.T)[:, :vocab_size]
    dense = logits_to_logprobs(logits, token_ids, temperature=temperature), logits_to_entropy(logits, temperature=temperature)
    if not with_entropy:
        dense = dense[0], torch.zeros_like(dense[1])
    expected_grads = torch.autograd.grad(weighted(*dense), (hidden, weight))
    chunked = token_logprobs(
        hidden,
        weight,
        token_ids,
        temperature=temperature,
        vocab_size=vocab_size,
        with_entropy=with_entropy,
        chunk_elements=chunk_elements,
    )
    grads = torch.autograd.grad(weighted(*chunked), (hidden, weight))
    for actual, expected in zip((*chunked, *grads), (*dense, *expected_grads), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_chunked_passes_gradcheck() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)

    def function(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(h, w, torch.tensor([0, 5, 2, 2]), temperature=0.8, chunk_elements=12)

    assert torch.autograd.gradcheck(function, (hidden, weight))


@pytest.mark.parametrize("output", [0, 1])
def test_chunked_gradient_of_one_output_alone_equals_dense(output: int) -> None:
    torch.manual_seed(4)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 1, 2, 3, 5])
    logits = hidden @ weight.T
    dense = (logits_to_logprobs(logits, ids), logits_to_entropy(logits))[output]
    chunked = token_logprobs(hidden, weight, ids, chunk_elements=12)[output]
    expected = torch.autograd.grad(dense.sum(), (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(chunked.sum(), (hidden, weight)), expected, rtol=1e-10, atol=1e-10)


def test_chunked_works_with_a_tied_embedding_in_float32() -> None:
    torch.manual_seed(2)
    ids = torch.tensor([1, 4, 2])

    def gradient(chunked: bool) -> Tensor:
        torch.manual_seed(3)
        embedding = torch.randn(7, 4, requires_grad=True)
        hidden = embedding[ids].tanh()
        logprobs = token_logprobs(hidden, embedding, ids, chunk_elements=7)[0] if chunked else logits_to_logprobs(hidden @ embedding.T, ids)
        torch.autograd.backward(logprobs.sum())
        assert embedding.grad is not None
        return embedding.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-6, atol=1e-6)


def test_chunked_bfloat16_gives_float32_logprobs_and_bfloat16_gradients() -> None:
    hidden = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True)
    logprobs, entropies = token_logprobs(hidden, weight, torch.tensor([0, 1, 2]), chunk_elements=5)
    torch.autograd.backward(logprobs.sum() + entropies.sum())
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logprobs, logits_to_logprobs((hidden @ weight.T).float(), torch.tensor([0, 1, 2])))


def test_chunked_of_no_position_is_empty_with_zero_gradient() -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long))
    torch.autograd.backward(logprobs.sum())
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(5, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"vocab_size": 9}, "vocab_size is 9"),
        ({"token_ids": torch.zeros(2, dtype=torch.long)}, "shapes do not fit"),
    ],
)
def test_chunked_refuses_bad_input(changes: dict[str, object], message: str) -> None:
    arguments = {"hidden": torch.zeros(3, 2), "head_weight": torch.zeros(5, 2), "token_ids": torch.zeros(3, dtype=torch.long)}
    with pytest.raises(ValueError, match=message):
        token_logprobs(**(arguments | changes))  # type: ignore[arg-type]


def test_temperature_divides_the_logits_before_the_softmax() -> None:
    case = math_case("M-TMP-01")
    inputs = case["inputs"]
    logits, token = numbers(inputs["logits"]), torch.tensor(inputs["token"])
    assert_close(logits_to_logprobs(logits, token, temperature=inputs["temperature"]), case["expected"]["logprob"])
    chunked, _ = token_logprobs(torch.ones(1, 1, dtype=torch.float64), logits[:, None], token[None], temperature=inputs["temperature"])
    assert_close(chunked, [case["expected"]["logprob"]])


@pytest.mark.parametrize("row", [0, 1, 2])
def test_entropy_of_zero_probability_entries(row: int) -> None:
    case = math_case("M-ENT-01")
    logits = numbers(case["inputs"]["logits"][row]).requires_grad_()
    entropy = logits_to_entropy(logits)
    torch.autograd.backward(entropy)
    assert logits.grad is not None
    assert_close(entropy.detach(), case["expected"]["entropy"][row])
    assert_close(logits.grad, case["expected"]["grad_logits"][row])


def test_chunked_entropy_is_finite_when_probabilities_underflow() -> None:
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [-500.0]], requires_grad=True)
    _, entropies = token_logprobs(hidden, weight, torch.tensor([0]))
    torch.autograd.backward(entropies.sum())
    assert hidden.grad is not None
    assert weight.grad is not None
    assert float(entropies.detach()) == 0.0
    assert torch.equal(hidden.grad, torch.zeros(1, 1))
    assert torch.equal(weight.grad, torch.zeros(2, 1))
