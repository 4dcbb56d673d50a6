"""A real engine and the trainer's real model agree: on which ids there are, and on the log-probability of each sampled one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from shoal_trainer.batching import build_micro_batch

from shoal.types import Completion, FinishReason, SamplingParams
from shoal.vocabulary import sampled_vocab_size
from tests.helpers.engine_agreement import TrainerScores, record_of
from tests.helpers.engine_rig import EngineRig
from tests.helpers.inprocess_engine import Ask
from tests.helpers.padded_models import NUM_KNOWN, VOCAB_SIZE, save_padded_model
from tests.helpers.staged_copies import folder_tensors, stage_copies, trained_tensors
from tests.helpers.tiny_models import EOS_ID, Architecture
from tests.helpers.trainer_bench import ref_of

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_SAMPLES = 64
TEMPERATURES = (1.0, 0.7, 0.6)
STOP_IDS = (7, 11, 30)
PROMPTS = ([5, 6, 7], [1], [59, 3, 17, 17, 2, 40, 8], list(range(20, 32)))
LENGTHS = (1, 5, 12, 20)
FAMILIES = [("qwen2", True), ("llama", False), ("gpt2", True), pytest.param("gemma", True, marks=pytest.mark.slow)]
"""Tied heads and one of its own; GPT-2 loads through the engine's reload."""


def _asks(temperature: float) -> list[Ask]:
    """Several prompts and lengths; every second response may end at EOS or a stop token."""
    asks = []
    for index in range(NUM_SAMPLES):
        stops = {"stop_token_ids": STOP_IDS} if index % 2 else {"ignore_eos": True}
        sampling = SamplingParams(temperature=temperature, max_new_tokens=LENGTHS[index % 4], **stops)
        asks.append(Ask(prompt_ids=PROMPTS[index // 4 % 4], sampling=sampling, seed=index))
    return asks


def _second_turns(asks: list[Ask], completions: list[Completion]) -> list[Ask]:
    """A request whose prompt contains the first answer."""
    return [
        replace(ask, prompt_ids=[*ask.prompt_ids, *completion.response_ids.tolist(), 9], seed=1000 + index)
        for index, (ask, completion) in enumerate(zip(asks, completions, strict=True))
    ]


def _check_ends(ask: Ask, completion: Completion) -> None:
    """A response ends with its stop token, which is part of it, or is cut and keeps its own last token."""
    ids, stops = completion.response_ids.tolist(), set() if ask.sampling.ignore_eos else {EOS_ID, *STOP_IDS}
    assert not stops.intersection(ids[:-1])
    if ids[-1] in stops:
        assert completion.finish_reason is FinishReason.STOP
    else:
        assert (completion.finish_reason, len(ids)) == (FinishReason.LENGTH, ask.sampling.max_new_tokens)


def _sample(rig: EngineRig) -> list[tuple[Ask, Completion]]:
    """Two turns at every temperature, and greedily."""
    found = []
    for temperature in (*TEMPERATURES, 0.0):
        first = _asks(temperature)
        answers = rig.engine.complete(first, (EOS_ID,))
        second = _second_turns(first[:8], answers[:8])
        found += list(zip([*first, *second], [*answers, *rig.engine.complete(second, (EOS_ID,))], strict=True))
    return found


@pytest.mark.parametrize(("architecture", "tied"), FAMILIES)
def test_engine_and_trainer_agree_on_every_sampled_token(
    tmp_path: Path, start_rig: Callable[..., EngineRig], architecture: Architecture, tied: bool
) -> None:
    from shoal_rollout.sampled_ids import restrict_logits

    folders = [save_padded_model(tmp_path / f"v{seed}", architecture, tied=tied, seed=seed) for seed in (0, 1)]
    assert sampled_vocab_size(str(folders[0]), VOCAB_SIZE) == NUM_KNOWN
    rig = start_rig(folders[0])
    free = rig.engine.complete(_asks(1.0))
    assert sum(int((completion.response_ids >= NUM_KNOWN).any()) for completion in free) > NUM_SAMPLES // 2, "padding must be likely"
    restrict_logits(rig.engine.model, NUM_KNOWN)
    tensors = folder_tensors(folders[1]) if rig.model.mode == "reload" else trained_tensors(folders[1])
    samples = {folders[0]: _sample(rig)}
    rig.swap(stage_copies(rig.model, tensors))
    samples[folders[1]] = _sample(rig)
    rig.engine.close()
    for folder, pairs in samples.items():
        _check_agreement(folder, pairs)


def _check_agreement(folder: Path, pairs: list[tuple[Ask, Completion]]) -> None:
    trainer = TrainerScores(folder)
    try:
        assert trainer.policy.vocab_size == NUM_KNOWN
        for temperature in (*TEMPERATURES, 0.0):
            chosen = [(ask, completion) for ask, completion in pairs if ask.sampling.temperature == temperature]
            assert any(completion.finish_reason is FinishReason.STOP for _, completion in chosen)
            for ask, completion in chosen:
                assert completion.response_ids.max() < NUM_KNOWN
                _check_ends(ask, completion)
            records = [record_of(index, ask, completion) for index, (ask, completion) in enumerate(chosen)]
            # Greedy answers come with untempered values.
            old, new = (trainer.logprobs(records, temperature or 1.0, with_gradient=training) for training in (False, True))
            for record, first, second in zip(records, old, new, strict=True):
                np.testing.assert_allclose(record.rollout_logprobs, first, atol=1e-4)
                np.testing.assert_allclose(np.exp(second - first), 1.0, atol=1e-5)
    finally:
        trainer.close()


def test_a_record_with_padding_is_dropped_and_counted(tmp_path: Path) -> None:
    ask = Ask(prompt_ids=[5], sampling=SamplingParams(max_new_tokens=3))
    answers = [
        Completion(
            sample_index=index,
            response_ids=np.array([3, token_id, 4], np.int32),
            rollout_logprobs=np.full(3, -1.0, np.float32),
            finish_reason=FinishReason.LENGTH,
            policy_version_spans=(),
            latency_ms=0.0,
            engine_id="engine",
        )
        for index, token_id in enumerate((59, 60, 62, 63))
    ]
    records = [record_of(index, ask, answer) for index, answer in enumerate(answers)]
    micro = build_micro_batch([ref_of(record) for record in records], records, NUM_KNOWN)
    assert micro.num_dropped == 3
    assert micro.response_mask.sum(dim=1).tolist() == [3, 0, 0, 0]
