"""Adapters on several gloo ranks: trained as on one, pushed without a collective, exported whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.helpers.adapter_jobs import NUM_STEPS, SCENARIOS, adapters_job
from tests.helpers.adapters import lora_config, peft_model, token_logprobs
from tests.helpers.trainer_bench import VOCAB_SIZE, run_ranks, save_policy

pytestmark = pytest.mark.timeout(240)

Results = dict[str, Any]
GANGS = [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    save_policy(folder / "model")
    return folder


@pytest.fixture(scope="module")
def result_of(root: Path) -> Callable[[int], Results]:
    """Everything that a gang of some ranks did; each gang runs once."""
    found: dict[int, Results] = {}

    def run(world_size: int) -> Results:
        if world_size not in found:
            torch.set_num_threads(1)
            folder = root / str(world_size)
            folder.mkdir()
            actor = {"collective_timeout_s": 60.0, "lr": 1e-2}
            config = lora_config(root / "model", actor=actor, algorithm={"estimator": "grpo", "kl_in": "loss"})
            run_ranks(adapters_job, config, world_size, folder)
            found[world_size] = torch.load(folder / "result.pt", weights_only=True)
        return found[world_size]

    return run


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_one_rank_trains_alike_in_every_setting(result_of: Callable[[int], Results], scenario: str) -> None:
    check_alike(result_of(1)["trained"][scenario], result_of(1)["trained"]["float32"], scenario)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world_size", GANGS)
def test_ranks_train_as_one(result_of: Callable[[int], Results], world_size: int, scenario: str) -> None:
    check_alike(result_of(world_size)["trained"][scenario], result_of(1)["trained"][scenario], scenario)


def check_alike(found: Results, expected: Results, scenario: str) -> None:
    narrow = scenario.startswith("bf16")
    for step in range(NUM_STEPS):
        assert found["gradients"][step].keys() == expected["gradients"][step].keys()
        assert all("lora_" in name for name in found["gradients"][step])
        for name, value in found["gradients"][step].items():
            other = expected["gradients"][step][name]
            scale = float(other.abs().max())
            assert torch.allclose(value, other, atol=0.1 * scale + 2e-3 if narrow else 1e-6, rtol=1e-5), (step, name)
        metrics, others = found["metrics"][step], expected["metrics"][step]
        assert metrics["grad_norm"] == pytest.approx(others["grad_norm"], rel=0.1 if narrow else 1e-5)
        assert metrics["kl"] == pytest.approx(others["kl"], abs=2e-2 if narrow else 1e-6)
        assert metrics["ratio_max_deviation"] < 1e-5
    assert found["metrics"][0]["kl"] == 0.0
    assert found["base_sum"] == expected["base_sum"]
    for name, value in found["adapters"].items():
        assert torch.allclose(value, expected["adapters"][name], atol=3e-2 if narrow else 1e-5), name


@pytest.mark.parametrize("world_size", [1, *GANGS])
def test_push_brings_the_exported_weights_without_a_collective(result_of: Callable[[int], Results], root: Path, world_size: int) -> None:
    pushed = result_of(world_size)["pushed"]
    for push in (pushed["first"], pushed["second"]):
        assert push["errors"] == [""] * world_size
        assert push["collectives"] == 0
    files = load_file(root / str(world_size) / "export" / "model.safetensors")
    assert pushed["staged"].keys() == files.keys()
    for name, tensor in files.items():
        assert torch.equal(pushed["staged"][name], tensor), name
    base = load_file(root / "model" / "model.safetensors")
    frozen_bytes = sum(tensor.nbytes for name, tensor in base.items() if torch.equal(tensor, files[name]))
    assert pushed["first"]["sent_bytes"] == pushed["first"]["dense_bytes"]
    assert frozen_bytes > 0
    assert pushed["second"]["sent_bytes"] == pushed["second"]["dense_bytes"] - frozen_bytes


@pytest.mark.parametrize("world_size", [1, *GANGS])
def test_export_and_its_adapter_answer_alike(result_of: Callable[[int], Results], root: Path, world_size: int) -> None:
    result_of(world_size)
    folder = root / str(world_size) / "export"
    ids = torch.randint(0, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(0))
    merged = token_logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ids)
    assert torch.allclose(token_logprobs(peft_model(root / "model", folder / "adapter"), ids), merged, atol=1e-5)
    base = token_logprobs(AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32), ids)
    assert not torch.allclose(base, merged, atol=1e-2)
