"""What a real engine must not do: sample the same on every server, or let numbers that are not finite out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from shoal_rollout.engine_seed import engine_seed

from shoal.config.models import RunSection
from shoal.types import Completion, SamplingParams
from tests.helpers.engine_rig import EngineRig
from tests.helpers.inprocess_engine import Ask, InProcessEngine
from tests.helpers.padded_models import NUM_KNOWN, VOCAB_SIZE, save_padded_model
from tests.helpers.staged_copies import stage_copies, trained_tensors
from tests.helpers.tiny_models import save_tiny_model
from tests.helpers.trainer_bench import run_config

SAMPLING = SamplingParams(max_new_tokens=16, ignore_eos=True)


def _ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.response_ids.tolist() for completion in completions]


def test_servers_sample_differently_and_explicit_seeds_repeat_on_any(tmp_path: Path, engine_environment: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2", tied=True)
    unseeded = [Ask(prompt_ids=[5, 6, 7], sampling=SAMPLING)] * 4
    seeded = [Ask(prompt_ids=[5, 6, 7], sampling=SAMPLING, seed=seed) for seed in range(4)]
    free, fixed = [], []
    for service_id in ("rollout-0", "rollout-1"):
        engine = InProcessEngine(folder, extension="", seed=engine_seed(RunSection.model_fields["seed"].default, service_id))
        try:
            free += _ids(engine.complete(unseeded))
            fixed.append(_ids(engine.complete(seeded)))
            assert _ids(engine.complete(seeded)) == fixed[-1]
        finally:
            engine.close()
    assert len({tuple(ids) for ids in free}) == 8
    assert fixed[0] == fixed[1]
    assert len({tuple(ids) for ids in fixed[0]}) == 4


def test_samples_of_a_broken_model_are_left_out_and_broken_padding_changes_nothing(
    tmp_path: Path, start_rig: Callable[..., EngineRig]
) -> None:
    from shoal_rollout.sampled_ids import restrict_logits

    folder = save_padded_model(tmp_path / "model", "llama", tied=False)
    rig = start_rig(folder)
    restrict_logits(rig.engine.model, NUM_KNOWN)
    good = trained_tensors(folder)
    asks = [Ask(prompt_ids=[5, 6, index], sampling=SAMPLING, seed=index) for index in range(8)]
    expected = rig.engine.complete(asks)
    for broken in (torch.nan, torch.inf):
        rig.swap(stage_copies(rig.model, good | {"model.norm.weight": good["model.norm.weight"] * broken}))
        for completion in rig.engine.complete(asks):
            assert completion.response_ids.size == completion.rollout_logprobs.size == 0
        head = good["lm_head.weight"].clone()
        head[NUM_KNOWN:] = broken
        rig.swap(stage_copies(rig.model, good | {"lm_head.weight": head}))
        found = rig.engine.complete(asks)
        assert _ids(found) == _ids(expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one.rollout_logprobs, other.rollout_logprobs)


def test_ends_that_are_never_sampled_are_left_out(tmp_path: Path) -> None:
    from shoal_rollout.engine_start import model_facts
    from vllm.transformers_utils.config import get_config

    folder = save_padded_model(tmp_path / "model", "qwen2", tied=True)
    # The engine refuses ends outside of the logits, and such are common: configurations are copied from larger models.
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 62, 50256]}')
    facts = model_facts(str(folder), run_config(folder), get_config(str(folder), False))
    assert (facts.vocab_size, facts.sampled_vocab_size, facts.eos_ids) == (VOCAB_SIZE, NUM_KNOWN, (2,))
