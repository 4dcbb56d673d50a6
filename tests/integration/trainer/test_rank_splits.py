"""Two and four gloo ranks compute what one computes, and agree when something fails on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config.models import RunConfig
from tests.helpers.trainer_bench import RankJob, run_config, run_ranks, save_policy
from tests.helpers.trainer_jobs import every_split_job, train_step_job
from tests.helpers.trainer_splits import AGGREGATIONS, EVERYWHERE, ONCE, SCENARIOS

# Starting ranks and a few hundred steps take half a minute, and several times that beside other work.
pytestmark = pytest.mark.timeout(400)

Results = dict[str, Any]

WORLD_SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A policy, and another model as reference."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    model, reference = save_policy(folder / "model"), save_policy(folder / "reference", seed=1)
    return run_config(
        model,
        model={"reference_path": str(reference)},
        rollout={"temperature": 0.7, "max_new_tokens": 8},
        actor={"collective_timeout_s": 60.0},
        algorithm={"entropy_coef": 0.01, "loss_norm_length": 7},
    )


@pytest.fixture(scope="module")
def results(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """Every scenario on every number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return {world_size: _run(train_step_job, config, world_size, folder / str(world_size)) for world_size in WORLD_SIZES}


def _run(job: RankJob, config: RunConfig, world_size: int, folder: Path) -> Results:
    folder.mkdir()
    run_ranks(job, config, world_size, folder)
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


def assert_independent_of_split(found: dict[str, Results], expected: Results) -> None:
    for place, result in found.items():
        for role, gradient in expected["gradients"].items():
            difference = (result["gradients"][role] - gradient).abs().max().item()
            assert difference <= 1e-6 * max(1.0, gradient.abs().max().item()), (place, role)
        for role in ("actor", "critic"):
            assert result[role] == pytest.approx(expected[role], rel=2e-6, abs=1e-6), (place, role)


def of_place(results: Results, scenario: str, aggregation: str) -> dict[str, Results]:
    """Results by split."""
    prefix = f"{scenario}/{aggregation}/"
    return {name.removeprefix(prefix): result for name, result in results["splits"].items() if name.startswith(prefix)}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_train_step_gives_one_loss_gradient_and_metrics_for_every_split(
    results: dict[int, Results], scenario: str, aggregation: str
) -> None:
    expected = of_place(results[1], scenario, aggregation)["1"]
    assert expected["gradients"].keys() == ({"actor", "critic"} if scenario == "gae_ppo" else {"actor"})
    for world_size, of_world in results.items():
        found = of_place(of_world, scenario, aggregation)
        if world_size <= 2 or (scenario, aggregation) in ONCE:
            assert len(found) == (3 if world_size == 1 else 4)
        assert_independent_of_split(found, expected)


@pytest.mark.slow
def test_train_step_on_four_ranks_gives_the_same_for_every_scenario_and_aggregation(
    results: dict[int, Results], config: RunConfig, tmp_path: Path
) -> None:
    on_four = _run(every_split_job, config, 4, tmp_path / "four")
    for scenario, aggregation in EVERYWHERE:
        found = of_place(on_four, scenario, aggregation)
        assert len(found) == 4
        assert_independent_of_split(found, of_place(results[1], scenario, aggregation)["1"])


def test_train_step_splits_look_at_gradients_that_are_not_zero(results: dict[int, Results]) -> None:
    for name, result in results[1]["splits"].items():
        for role, gradient in result["gradients"].items():
            assert gradient.abs().max() > 1e-3, (name, role)


def test_train_step_with_a_pass_per_length_on_two_ranks_equals_one_pass(results: dict[int, Results]) -> None:
    found, expected = results[2]["passes"], results[1]["passes"]
    assert_same(found, expected)
    for name, value in found["parameters"].items():
        assert torch.allclose(value, expected["parameters"][name], atol=1e-5), name


def test_train_step_with_very_uneven_ranks_ends_with_equally_many_passes_and_equals_the_unsplit_one(results: dict[int, Results]) -> None:
    assert_same(results[2]["uneven"], results[1]["uneven"])
    assert results[2]["uneven"]["num_passes"] == [3.0, 3.0]


def test_gradient_norm_of_shards_is_the_global_one_on_every_rank(results: dict[int, Results]) -> None:
    """M-GRD-01."""
    assert results[2]["norm"] == pytest.approx([5.0, 0.199999960000008] * 2, abs=1e-12)
    of_ranks = results[2]["uneven"]["grad_norms"]
    assert of_ranks[0] == of_ranks[1]


def test_train_step_with_a_bad_gradient_on_one_rank_is_skipped_on_all(results: dict[int, Results]) -> None:
    assert results[2]["nan"] == {"applied": 0.0, "num_skipped": 1, "unchanged": True, "same_moments": True, "policy_version": 1}


def test_train_step_with_a_lost_record_on_one_rank_fails_on_all_and_can_be_repeated(results: dict[int, Results]) -> None:
    assert results[2]["lost"] == {"error_of_rank_0": "PeerError", "num_updates": 1.0}


def test_scores_of_two_ranks_are_those_of_one_and_leave_the_step_as_it_is(results: dict[int, Results]) -> None:
    ours, theirs = results[2]["scored"], results[1]["scored"]
    assert torch.allclose(ours["logprobs"], theirs["logprobs"], atol=1e-5)
    assert torch.equal(ours["greedy_ids"], theirs["greedy_ids"])
    for world_size in (1, 2):
        assert results[world_size]["scored"]["grad_norm"] == pytest.approx(results[1]["passes"]["actor"]["grad_norm"], rel=1e-5)
