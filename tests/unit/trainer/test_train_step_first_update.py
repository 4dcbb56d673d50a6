"""The first update on fresh data: the ratio is 1, however the sequences lie in the model's input, and the layout changes no gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_trainer.distributed import RankContext
from shoal_trainer.inputs import Layout, pack_rows, pad_rows

from tests.helpers.left_padding import pad_rows_left
from tests.helpers.trainer_bench import Split, ragged_records, save_policy
from tests.helpers.trainer_step import Step

ONE: Split = [[[[0, 1, 2], [3, 4, 5]]]]
MINI_BATCHES: Split = [[[[0], [1, 2]], [[3, 4], [5]]]]
LAYOUTS: dict[str, Layout] = {"right": pad_rows, "left": pad_rows_left, "packed": pack_rows}


@pytest.fixture(scope="module", params=["qwen2", "gpt2"])
def dropout_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with dropout configured, with rotary or learned positions."""
    return save_policy(tmp_path_factory.mktemp(request.param) / "model", request.param, dropout=0.1)


def gang(layout: str, retain_graph_tokens: int = 10_000, **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    packing = "on" if layout == "packed" else "off"
    return {"packing": packing, "retain_graph_tokens": retain_graph_tokens, **settings}


@pytest.mark.parametrize(
    ("retain_graph_tokens", "split"), [(10_000, ONE), (0, ONE), (0, MINI_BATCHES)], ids=["kept graph", "second forward", "mini-batches"]
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_train_step_ratio_is_one_in_the_first_update(
    dropout_folder: Path, context: RankContext, layout: str, temperature: float, retain_graph_tokens: int, split: Split
) -> None:
    """R14, M-PPO-04."""
    num_mini = len(split[0])
    settings = gang(layout, retain_graph_tokens)
    step = Step(
        dropout_folder, context, ragged_records(), layout=LAYOUTS[layout], rollout={"temperature": temperature}, actor=settings,
        critic=settings, algorithm={"mini_batches": num_mini},
    )  # fmt: skip
    metrics, _ = step.run(split)
    assert metrics["ratio_first_deviation"] <= 1e-5
    assert metrics["num_updates"] == num_mini
    if num_mini == 1:
        assert metrics["ratio_max_deviation"] <= 1e-5
        assert metrics["clip_fraction"] == 0.0
        assert abs(metrics["approx_kl"]) <= 1e-6
        assert abs(metrics["kl_k3"]) <= 1e-6
    else:
        assert metrics["ratio_max_deviation"] > 1e-3


@pytest.mark.parametrize(("layout", "attention"), [("left", "sdpa"), ("left", "eager"), ("packed", "sdpa")])
def test_train_step_gradient_does_not_depend_on_the_layout(dropout_folder: Path, context: RankContext, layout: str, attention: str) -> None:
    """R31 through both train steps: padding on the other side, or neighbours in the same row."""
    algorithm = {"old_logprobs": "rollout", "entropy_coef": 0.01}
    steps = []
    for name in ("right", layout):
        settings = gang(name, attention=attention)
        step = Step(dropout_folder, context, ragged_records(), layout=LAYOUTS[name], algorithm=algorithm, actor=settings, critic=settings)
        step.run(ONE)
        steps.append(step)
    assert steps[0].gradients.keys() == steps[1].gradients.keys()
    for name, value in steps[0].gradients.items():
        assert torch.allclose(steps[1].gradients[name], value, atol=1e-5, rtol=1e-4), name
