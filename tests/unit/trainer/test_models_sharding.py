"""Settings that save memory or time change no number: on one rank and on two, loss, gradients and the updated policy are the same."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
import torch

from tests.helpers.math_cases import math_case
from tests.helpers.sharding_jobs import SETTINGS, sharding_job
from tests.helpers.trainer_bench import run_config, run_ranks, save_policy

Results: TypeAlias = dict[int, dict[str, Any]]

EXACT = tuple(name for name in SETTINGS if "bf16" not in name)
ROUNDED = tuple(name for name in SETTINGS if "bf16" in name)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Number of ranks -> setting -> what it came to."""
    found: Results = {}
    policy = save_policy(tmp_path_factory.mktemp("policy") / "model")
    for world_size in (1, 2):
        folder = tmp_path_factory.mktemp(f"ranks-{world_size}")
        run_ranks(sharding_job, run_config(policy), world_size, folder)
        found[world_size] = torch.load(folder / "result.pt", weights_only=True)
    return found


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(1.0, float(tensor.abs().max()))
        assert (found[name] - tensor).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("setting", EXACT)
def test_loss_gradients_and_update_are_those_of_the_plain_setting(results: Results, setting: str, world_size: int) -> None:
    found, plain = results[world_size][setting], results[1]["plain"]
    assert found["before"] == pytest.approx(plain["loss"], rel=1e-6)
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert found["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-6)
    # Sums of float32 in another order: 1.8e-6 has been seen.
    assert_same_tensors(found["gradients"], plain["gradients"], 4e-6)
    assert found["after"] == pytest.approx(plain["after"], rel=1e-4)
    # The policy after the update is another one, also where parameters stayed gathered before it.
    assert abs(found["after"] / found["before"] - 1) > 0.01


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_with_activation_checkpointing_are_the_same_bit_for_bit(results: Results, world_size: int) -> None:
    found, plain = results[world_size]["checkpointed"], results[world_size]["plain"]
    assert found["loss"] == plain["loss"]
    assert all(torch.equal(found["gradients"][name], gradient) for name, gradient in plain["gradients"].items())
    assert all(torch.equal(found["parameters"][name], parameter) for name, parameter in plain["parameters"].items())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("setting", ROUNDED)
def test_mixed_precision_stays_close(results: Results, setting: str, world_size: int) -> None:
    found, plain = results[world_size][setting], results[1]["plain"]
    assert found["loss"] == pytest.approx(plain["loss"], rel=0.02)
    assert found["loss"] != plain["loss"]
    assert found["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.05)
    assert {gradient.dtype for gradient in found["gradients"].values()} == {torch.float32}


@pytest.mark.parametrize("world_size", [1, 2])
def test_value_model_is_the_same_with_every_setting_at_once(results: Results, world_size: int) -> None:
    found, plain = results[world_size]["value, all"], results[1]["value, plain"]
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    # Sums of float32 in another order: 1.8e-6 has been seen.
    assert_same_tensors(found["gradients"], plain["gradients"], 4e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_norm_and_clipped_gradient_are_those_of_the_case(results: Results, world_size: int) -> None:
    expected = math_case("M-GRD-01")["expected"]
    assert results[world_size]["norm"]["norm"] == pytest.approx(expected["global_norm"], rel=1e-12)
    used = results[world_size]["norm"]["used"].double()
    assert torch.allclose(used, torch.tensor(expected["clipped"]).flatten().double(), rtol=1e-6)
