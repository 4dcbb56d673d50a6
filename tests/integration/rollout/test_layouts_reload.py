"""Models whose loading is not copies of boxes: GPT-2 keeps its matrices transposed, so the engine itself loads what was staged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from shoal.errors import ConfigError
from tests.helpers.engine_rig import PROMPT, EngineRig, fresh_greedy
from tests.helpers.staged_copies import folder_tensors, stage_copies
from tests.helpers.tiny_models import reference_choices, reference_logprobs, save_tiny_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reload_serves_what_was_staged(tmp_path: Path, start_rig: Callable[..., EngineRig], dtype: str) -> None:
    first, second = (save_tiny_model(tmp_path / f"v{seed}", "gpt2", tied=True, seed=seed) for seed in (0, 1))
    expected = fresh_greedy(second, dtype)
    rig = start_rig(first, dtype)
    assert rig.model.mode == "reload"
    assert "c_attn.weight is written from" in rig.model.reason
    assert {name: (shape, kind) for name, shape, kind in rig.model.parameters} == {
        name: (tuple(tensor.shape), "float32") for name, tensor in folder_tensors(first).items()
    }
    assert rig.model.live(rig.model.parameters[0][0]) is None
    old, new = (stage_copies(rig.model, folder_tensors(folder)) for folder in (first, second))
    before = rig.greedy()
    assert before != expected, "the new weights must differ, else this test shows nothing"

    rig.swap(new, {rig.model.parameters[3][0]})
    assert rig.greedy() == expected, "any change reloads everything"
    rig.swap(old, set())
    assert rig.greedy() == expected, "no change reloads nothing"
    if dtype == "float32":
        assert expected[0] == reference_choices(second, PROMPT, expected[0])
        np.testing.assert_allclose(expected[1], reference_logprobs(second, PROMPT, expected[0]), atol=1e-4)
    rig.swap(old)
    assert rig.greedy() == before


def test_reload_that_fails_half_way_raises(tmp_path: Path, start_rig: Callable[..., EngineRig]) -> None:
    folder = save_tiny_model(tmp_path / "model", "gpt2", tied=True)
    rig = start_rig(folder)
    staged = stage_copies(rig.model, folder_tensors(folder))
    names = [name for name, _, _ in rig.model.parameters]

    def broken(name: str) -> Tensor:
        if name == names[len(names) // 2]:
            raise OSError("staging is gone")
        return staged[name]

    (apply,) = rig.model.prepare_swap(broken, names)
    assert apply is not None
    with pytest.raises(OSError, match="staging is gone"):
        apply()


def test_model_that_neither_way_fits_is_refused(
    tmp_path: Path, start_rig: Callable[..., EngineRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal_rollout import engine_model

    def not_swappable(*arguments: object) -> None:
        raise ConfigError("its experts are packed")

    # The engine's own reload leaves experts in the order of the checkpoint, while the kernel wants its own.
    monkeypatch.setattr(engine_model, "check_swappable", not_swappable)
    folder = save_tiny_model(tmp_path / "model", "mixtral")
    with pytest.raises(ConfigError, match=r"MixtralForCausalLM cannot be pushed.*its experts are packed; and .*w13_weight is not restored"):
        start_rig(folder)


def test_engine_that_was_started_on_other_weights_is_refused(tmp_path: Path, start_rig: Callable[..., EngineRig]) -> None:
    from shoal_rollout.engine_model import EngineModel

    first, second = (save_tiny_model(tmp_path / f"v{seed}", "llama", seed=seed) for seed in (0, 1))
    rig = start_rig(first)
    with pytest.raises(
        ConfigError, match=r"model\.embed_tokens\.weight does not hold what loading copied into it from model\.embed_tokens\.weight"
    ):
        EngineModel(rig.engine.model, second, rig.engine.worker.vllm_config)
