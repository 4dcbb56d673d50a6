"""What a forward keeps for its backward, and how large anything gets on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_trainer import models
from shoal_trainer.batching import MicroBatch, build_micro_batch
from shoal_trainer.distributed import RankContext
from shoal_trainer.models import PolicyModel, layout_for, load_policy
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.helpers.largest_tensor import LargestTensor
from tests.helpers.trainer_bench import VOCAB_SIZE, make_record, ref_of, run_config

LARGE_VOCABULARY = 49_152


def load(folder: Path, context: RankContext, **actor: Any) -> PolicyModel:  # noqa: ANN401
    config = run_config(folder, actor=actor)
    return load_policy(str(folder), config.model, config.actor, context, trainable=True)


def micro_batch(policy: PolicyModel, num_rows: int, num_response: int) -> MicroBatch:
    records = [make_record(index, num_prompt=8, num_response=num_response) for index in range(num_rows)]
    return build_micro_batch([ref_of(record) for record in records], records, VOCAB_SIZE, layout=layout_for(policy))


def logprobs_of(policy: PolicyModel, micro: MicroBatch) -> Tensor:
    mask = micro.response_mask
    logprobs, _ = policy(micro.inputs, micro.positions_before(mask), micro.response_ids[mask], 1.0, True)
    return torch.as_tensor(logprobs)


def kept_bytes(policy: PolicyModel, micro: MicroBatch) -> int:
    """Bytes that a graph holds, each piece of memory once; the inputs of decoder blocks count, however they are held."""
    kept: dict[int, int] = {}
    # Held, so that no address is used twice.
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def keep_input(_module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        keep(args[0])

    blocks = policy.language_model.get_decoder().layers
    handles = [block.register_forward_pre_hook(keep_input) for block in blocks]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = logprobs_of(policy, micro)
    for handle in handles:
        handle.remove()
    assert logprobs.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("packing", ["off", "on"])
def test_activation_checkpointing_keeps_little_but_the_inputs_of_blocks(policy_folder: Path, context: RankContext, packing: str) -> None:
    kept = {}
    for checkpointing in (False, True):
        policy = load(policy_folder, context, activation_checkpointing=checkpointing, packing=packing)
        kept[checkpointing] = kept_bytes(policy, micro_batch(policy, 4, 40))
    assert kept[True] < kept[False] / 3


@pytest.mark.parametrize("num_response", [64, 256])
@pytest.mark.parametrize("packing", ["off", "on"])
def test_no_tensor_is_as_large_as_all_logits(
    large_vocabulary: Path, context: RankContext, monkeypatch: pytest.MonkeyPatch, num_response: int, packing: str
) -> None:
    chunk = 32 * LARGE_VOCABULARY
    monkeypatch.setattr(models, "CHUNK_ELEMENTS", chunk)
    policy = load(large_vocabulary, context, packing=packing)
    micro = micro_batch(policy, 1, num_response)
    mask = micro.response_mask
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]  # torch leaves it untyped
        logprobs_of(policy, micro).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        with torch.no_grad():
            policy.score(micro.inputs, micro.positions_before(mask), micro.response_ids[mask])
    assert largest.num_elements == chunk


def test_packed_attention_makes_nothing_of_the_square_of_a_pack(policy_folder: Path, context: RankContext) -> None:
    square = (64 * (8 + 8 - 1)) ** 2
    largest = {}
    for attention in ("sdpa", "eager"):
        policy = load(policy_folder, context, packing="on", attention=attention)
        micro = micro_batch(policy, 64, 8)
        assert micro.inputs.num_positions**2 == square
        with LargestTensor() as watched:  # type: ignore[no-untyped-call]  # torch leaves it untyped
            logprobs_of(policy, micro).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        largest[attention] = watched.num_elements
    assert largest["sdpa"] < square / 4
    # Eager attention masks the whole pack.
    assert largest["eager"] >= square


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrow model with many tokens."""
    folder = tmp_path_factory.mktemp("large") / "model"
    config = LlamaConfig(
        vocab_size=LARGE_VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
