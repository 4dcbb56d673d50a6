"""One loss for every split over micro-batches and ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from shoal.algo.aggregation import LOSS_AGGREGATIONS, aggregate, count_trained, token_weights
from shoal.errors import ConfigError
from tests.helpers.math_cases import assert_close, mask_of, math_case, numbers


def split_loss(parts: list[tuple[Tensor, Tensor]], name: str, norm_length: float) -> Tensor:
    counts = count_trained([mask for _, mask in parts])
    terms = [aggregate(loss, mask, counts, loss_aggregation=name, norm_length=norm_length) for loss, mask in parts]
    return torch.stack(terms).sum()


@pytest.mark.parametrize("case_id", ["M-AGG-01", "M-AGG-04"])
@pytest.mark.parametrize("name", LOSS_AGGREGATIONS)
def test_aggregate_equals_given_numbers(case_id: str, name: str) -> None:
    case = math_case(case_id)
    pieces = [piece for rank in case["inputs"]["ranks"] for piece in rank]
    parts = [(numbers(piece["loss"]).requires_grad_(), mask_of(piece["mask"])) for piece in pieces]
    total = split_loss(parts, name, case["inputs"]["norm_length"])
    torch.autograd.backward(total)
    assert_close(total.detach(), case["expected"][name])
    for loss, mask in parts:
        assert loss.grad is not None
        assert bool((loss.grad[~mask] == 0).all())
        assert bool(loss.grad.isfinite().all())


def test_counts_and_backward_scalars_equal_given_numbers() -> None:
    case = math_case("M-AGG-01")
    ranks = case["inputs"]["ranks"]
    counts = count_trained([mask_of(piece["mask"]) for rank in ranks for piece in rank])
    assert (counts.num_tokens, counts.num_sequences) == (case["expected"]["valid_tokens"], case["expected"]["valid_sequences"])
    scalars = [
        [
            len(ranks) * aggregate(numbers(piece["loss"]), mask_of(piece["mask"]), counts, loss_aggregation="token_mean").item()
            for piece in rank
        ]
        for rank in ranks
    ]
    key = "backward_scalar_per_rank_and_microbatch_for_token_mean_when_dp_averages_gradients"
    assert_close(torch.tensor(scalars, dtype=torch.float64), case["expected"][key])


@pytest.mark.parametrize("name", LOSS_AGGREGATIONS)
def test_aggregate_does_not_depend_on_the_split(name: str) -> None:
    torch.manual_seed(0)
    loss = torch.randn(6, 7, dtype=torch.float64)
    mask = torch.rand(6, 7) < 0.6
    mask[2] = False
    expected = split_loss([(loss, mask)], name, 7.0)
    for cuts in itertools.combinations(range(7), 2):
        rows = [slice(0, cuts[0]), slice(cuts[0], cuts[1]), slice(cuts[1], 6)]  # some parts are empty
        torch.testing.assert_close(split_loss([(loss[part], mask[part]) for part in rows], name, 7.0), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOSS_AGGREGATIONS)
def test_weights_of_a_mean_add_up_to_one(name: str) -> None:
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    weights = token_weights(mask, count_trained([mask]), loss_aggregation=name, norm_length=3.0)
    assert float(weights.sum()) == pytest.approx({"seq_mean_token_sum": 1.5, "seq_mean_token_sum_norm": 0.5}.get(name, 1.0))


def test_count_adds_the_other_ranks() -> None:
    counts = count_trained([torch.ones(2, 3, dtype=torch.bool)], lambda local: local + torch.tensor([4.0, 2.0], dtype=torch.float64))
    assert (counts.num_tokens, counts.num_sequences) == (10.0, 4.0)


def test_aggregate_refuses_what_it_does_not_know() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    counts = count_trained([mask])
    with pytest.raises(ConfigError, match=r"loss_aggregation is 'mean'; use one of seq_mean_token_mean, .*token_mean"):
        aggregate(torch.zeros(1, 1), mask, counts, loss_aggregation="mean")
    with pytest.raises(ValueError, match="norm_length is None"):
        aggregate(torch.zeros(1, 1), mask, counts, loss_aggregation="seq_mean_token_sum_norm")
    with pytest.raises(ValueError, match="no response mask"):
        count_trained([])
