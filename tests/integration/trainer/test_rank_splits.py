"""Two gloo ranks compute what one computes, and agree when something fails on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config.models import RunConfig
from tests.helpers.trainer_bench import run_config, run_ranks, save_policy
from tests.helpers.trainer_jobs import train_step_job

Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """Every scenario on one rank and on two."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ranks")
    model = save_policy(folder / "model")
    config = run_config(model, actor={"collective_timeout_s": 60.0}, algorithm={"entropy_coef": 0.01})
    return {world_size: _run(config, world_size, folder / str(world_size)) for world_size in (1, 2)}


def _run(config: RunConfig, world_size: int, folder: Path) -> Results:
    folder.mkdir()
    run_ranks(train_step_job, config, world_size, folder)
    result: Results = torch.load(folder / "result.pt", weights_only=True)
    return result


def assert_same(found: Results, expected: Results) -> None:
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, value in found["gradients"].items():
        assert torch.allclose(value, expected["gradients"][name], atol=1e-6, rtol=1e-5), name
    for role, names in {
        "actor": ("actor_loss", "grad_norm", "entropy", "kl", "num_tokens"),
        "critic": ("critic_loss", "grad_norm"),
    }.items():
        for name in names:
            assert found[role][name] == pytest.approx(expected[role][name], abs=1e-6, rel=1e-5), name


def test_train_step_on_two_ranks_gives_the_loss_and_gradient_of_one(results: dict[int, Results]) -> None:
    (expected,) = results[1]["splits"]
    for found in results[2]["splits"]:
        assert_same(found, expected)
        for name, value in found["parameters"].items():
            assert torch.allclose(value, expected["parameters"][name], atol=1e-5), name


def test_train_step_with_very_uneven_ranks_ends_and_equals_the_unsplit_one(results: dict[int, Results]) -> None:
    assert_same(results[2]["uneven"], results[1]["uneven"])


def test_train_step_with_a_bad_gradient_on_one_rank_is_skipped_on_all(results: dict[int, Results]) -> None:
    assert results[2]["nan"] == {"applied": 0.0, "num_skipped": 1, "unchanged": True, "same_moments": True, "policy_version": 1}


def test_train_step_with_a_lost_record_on_one_rank_fails_on_all_and_can_be_repeated(results: dict[int, Results]) -> None:
    assert results[2]["lost"] == {"error_of_rank_0": "PeerError", "num_updates": 1.0}


def test_scores_of_two_ranks_are_those_of_one_and_leave_the_step_as_it_is(results: dict[int, Results]) -> None:
    ours, theirs = results[2]["scored"], results[1]["scored"]
    assert torch.allclose(ours["logprobs"], theirs["logprobs"], atol=1e-5)
    assert torch.equal(ours["greedy_ids"], theirs["greedy_ids"])
    for world_size in (1, 2):
        assert results[world_size]["scored"]["grad_norm"] == pytest.approx(results[1]["splits"][0]["actor"]["grad_norm"], rel=1e-5)
