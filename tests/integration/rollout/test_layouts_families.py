"""Layouts found on real engines of several model families: what is staged by them and swapped is what the model then computes with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.engine_rig import PROMPT, EngineRig, fresh_greedy
from tests.helpers.staged_copies import as_bytes, live_bytes, stage_copies, trained_tensors
from tests.helpers.tiny_models import Architecture, reference_choices, reference_logprobs, save_tiny_model


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    architecture: Architecture
    tied: bool
    overrides: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.architecture}{'-tied' if self.tied else ''}{''.join('-' + key for key in self.overrides)}"


def _family(architecture: Architecture, *, tied: bool = False, **overrides: object) -> _Family:
    return _Family(architecture=architecture, tied=tied, overrides=overrides)


FAMILIES = [
    _family("qwen2", tied=True),
    _family("mixtral"),
    _family("qwen3_moe"),
    _family("llama"),
    _family("llama", tied=True, attention_bias=True, mlp_bias=True),
    _family("gemma3", tied=True),
]
"""All with a vocabulary of 101, which the engine pads to 128."""
ALIKE = [_family("gemma", tied=True), _family("qwen3"), _family("opt", tied=True), _family("phi3"), _family("gemma2", tied=True)]
"""They fuse and keep their parameters as some of the others do."""


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in ALIKE)], ids=str)
def test_layout_of_a_family_serves_what_was_staged(tmp_path: Path, start_rig: Callable[..., EngineRig], family: _Family) -> None:
    first, second = (
        save_tiny_model(tmp_path / f"v{seed}", family.architecture, tied=family.tied, seed=seed, **family.overrides) for seed in (0, 1)
    )
    expected = fresh_greedy(second)
    rig = start_rig(first)
    assert rig.model.mode == "copies", rig.model.reason
    old, new = (stage_copies(rig.model, trained_tensors(folder)) for folder in (first, second))
    before, greedy_before = live_bytes(rig.model), rig.greedy()
    assert before == {name: as_bytes(tensor) for name, tensor in old.items()}
    assert greedy_before != expected, "the new weights must differ, else this test shows nothing"

    rig.swap(new)
    assert rig.greedy() == expected
    ids, logprobs = expected
    assert ids == reference_choices(second, PROMPT, ids)
    np.testing.assert_allclose(logprobs, reference_logprobs(second, PROMPT, ids), atol=1e-4)

    changed = set(sorted(new)[::2])
    rig.swap(old, changed)
    mixed = {name: as_bytes((old if name in changed else new)[name]) for name in new}
    assert live_bytes(rig.model) == mixed
    rig.swap(old, set(new) - changed)
    assert live_bytes(rig.model) == before
    assert rig.greedy() == greedy_before
