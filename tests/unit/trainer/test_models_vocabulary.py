"""An embedding with more rows than the tokenizer has tokens: the rows behind them take no part in anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shoal_trainer.batching import build_micro_batch
from shoal_trainer.distributed import RankContext
from shoal_trainer.models import PolicyModel, load_policy

from shoal.types import ExperienceRecord
from tests.helpers.trainer_bench import VOCAB_SIZE, make_record, ref_of, run_config, save_policy, whole_gradients

NUM_KNOWN = 50
LOUD = 30.0


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def padded_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 61 rows and a tokenizer of 50 tokens; whatever the state, a row behind them has the largest logit."""
    folder = save_policy(tmp_path_factory.mktemp("padded") / "model", "llama", tied=request.param)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {f"w{index}": index for index in range(NUM_KNOWN)}}}))
    tensors = load_file(folder / "model.safetensors")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    for token_id in range(NUM_KNOWN, VOCAB_SIZE):
        head[token_id] = LOUD * (-1) ** token_id * head[0]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def known_record(index: int) -> ExperienceRecord:
    record = make_record(index, num_prompt=3, num_response=8)
    return make_record(index, num_prompt=3, num_response=8, prompt_ids=record.prompt_ids % NUM_KNOWN, response_ids=record.response_ids % 50)


def load(folder: Path, context: RankContext) -> PolicyModel:
    config = run_config(folder)
    return load_policy(str(folder), config.model, config.actor, context, trainable=True)


def test_logprobs_are_normalised_over_known_tokens(padded_folder: Path, context: RankContext) -> None:
    policy = load(padded_folder, context)
    assert policy.vocab_size == NUM_KNOWN
    micro = build_micro_batch([ref_of(known_record(0))], [known_record(0)], NUM_KNOWN)
    place = micro.positions_before(micro.response_mask)[:1].repeat(NUM_KNOWN)
    with torch.no_grad():
        logprobs, _ = policy(micro.inputs, place, torch.arange(NUM_KNOWN), 0.7, False)
    assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_greedy_choices_are_known_tokens(padded_folder: Path, context: RankContext) -> None:
    policy = load(padded_folder, context)
    records = [known_record(index) for index in range(4)]
    micro = build_micro_batch([ref_of(record) for record in records], records, NUM_KNOWN)
    mask = micro.response_mask
    with torch.no_grad():
        _, greedy_ids = policy.score(micro.inputs, micro.positions_before(mask), micro.response_ids[mask])
        # Among all rows the likeliest one is always padding.
        policy.vocab_size = VOCAB_SIZE
        _, of_all_rows = policy.score(micro.inputs, micro.positions_before(mask), micro.response_ids[mask])
    assert greedy_ids.max() < NUM_KNOWN
    assert (of_all_rows >= NUM_KNOWN).float().mean() > 0.9


def test_gradient_of_padded_rows_is_exactly_zero(padded_folder: Path, context: RankContext) -> None:
    policy = load(padded_folder, context)
    records = [known_record(index) for index in range(4)]
    micro = build_micro_batch([ref_of(record) for record in records], records, NUM_KNOWN)
    mask = micro.response_mask
    logprobs, entropies = policy(micro.inputs, micro.positions_before(mask), micro.response_ids[mask], 0.7, True)
    (logprobs.sum() + entropies.sum()).backward()
    gradients = whole_gradients(policy)
    heads = [gradient for name, gradient in gradients.items() if name.endswith(("lm_head.weight", "embed_tokens.weight"))]
    assert heads
    for gradient in heads:
        assert not gradient[NUM_KNOWN:].any()
        assert gradient[:NUM_KNOWN].any()
