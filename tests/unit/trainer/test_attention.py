"""A row means the same in every layout, with every attention; and what cannot be packed is found out.

A row is scored alone, padded on the left and on the right by 1, 3 and 8, and packed behind two others (R31).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from shoal_trainer.attention import attention_implementation, may_pack
from shoal_trainer.batching import build_micro_batch
from shoal_trainer.distributed import RankContext
from shoal_trainer.inputs import Layout, pack_rows, pad_rows
from shoal_trainer.models import PolicyModel, layout_for, load_policy, load_value_model
from shoal_trainer.packing import choose_packing, kernel_fault, model_fault
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shoal.config.gang import GangSection
from shoal.errors import ConfigError
from shoal.types import ExperienceRecord
from tests.helpers.left_padding import pad_rows_left
from tests.helpers.tiny_models import Architecture, random_model, save_tiny_model
from tests.helpers.trainer_bench import VOCAB_SIZE, make_record, ref_of, run_config, save_policy, whole_gradients

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SETTINGS = tuple(itertools.product(("eager", "sdpa"), ("off", "on")))
ROW = make_record(0, num_prompt=3, num_response=6)


def load(folder: Path, context: RankContext, *, trainable: bool = False, **actor: Any) -> PolicyModel:  # noqa: ANN401
    config = run_config(folder, actor=actor)
    return load_policy(str(folder), config.model, config.actor, context, trainable=trainable)


def logprobs_of(policy: PolicyModel, records: list[ExperienceRecord], layout: Layout, row: int) -> Tensor:
    """Log-probabilities of one record's response among others, in a layout; with a graph."""
    micro = build_micro_batch([ref_of(record) for record in records], records, VOCAB_SIZE, layout=layout)
    mask = micro.response_mask & (torch.arange(len(records)) == row)[:, None]
    logprobs, _ = policy(micro.inputs, micro.positions_before(mask), micro.response_ids[mask], 0.7, False)
    return torch.as_tensor(logprobs)


def places() -> dict[str, tuple[Layout, list[ExperienceRecord], int]]:
    """Layout, records, and which of them is the row."""
    longer = {pad: make_record(pad, num_prompt=3, num_response=6 + pad) for pad in (1, 3, 8)}
    neighbours = [make_record(20, num_prompt=4, num_response=5), make_record(21, num_prompt=1, num_response=1)]
    return {
        "alone": (pad_rows, [ROW], 0),
        **{f"left {pad}": (pad_rows_left, [other, ROW], 1) for pad, other in longer.items()},
        **{f"right {pad}": (pad_rows, [ROW, other], 0) for pad, other in longer.items()},
        "packed": (pack_rows, [*neighbours, ROW], 2),
        "packed alone": (pack_rows, [ROW], 0),
    }


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_logprobs_of_a_row_are_the_same_in_every_layout_and_attention(tmp_path: Path, context: RankContext, architecture: str) -> None:
    folder = save_policy(tmp_path / "model", architecture, dropout=0.3)
    found: dict[str, Tensor] = {}
    for attention, packing in SETTINGS:
        policy = load(folder, context, attention=attention, packing=packing)
        assert policy.packs == (packing == "on")
        for name, (layout, records, row) in places().items():
            if policy.packs or layout is not pack_rows:
                found[f"{attention}, packing {packing}, {name}"] = logprobs_of(policy, records, layout, row).detach()
    assert len(found) == 2 * (7 + 9)
    for (one, first), (other, second) in itertools.combinations(found.items(), 2):
        assert (first - second).abs().max() <= 1e-5, (one, other)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_gradients_are_the_same_packed_and_padded(tmp_path: Path, context: RankContext, architecture: str) -> None:
    folder = save_policy(tmp_path / "model", architecture)
    records = [make_record(index, num_prompt=1 + index, num_response=2 + 3 * index) for index in range(4)]
    gradients = []
    for layout in (pad_rows, pad_rows_left, pack_rows):
        policy = load(folder, context, trainable=True, packing="on")
        torch.stack([logprobs_of(policy, records, layout, row).square().sum() for row in range(4)]).sum().backward()  # type: ignore[no-untyped-call]
        gradients.append(whole_gradients(policy))
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert torch.allclose(other[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max())), name


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3", "gemma", "gemma3", "gpt2", "mixtral", "phi3", "opt"])
def test_own_attention_packs_all_of_these_models(tmp_path: Path, context: RankContext, architecture: Architecture) -> None:
    folder = save_tiny_model(tmp_path / "model", architecture)
    assert load(folder, context, packing="on").packs


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sliding_window_reaches_over_its_own_sequence_only(tmp_path: Path, attention: Literal["eager", "sdpa"]) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    packed, plain = decoder(folder, GangSection(packing="on", attention=attention)), decoder(folder, GangSection(attention="eager"))
    assert model_fault(packed) is None
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 100, length).astype(np.int32) for length in (7, 12, 3)]
    with torch.no_grad():
        found = packed(**pack_rows(rows).arguments()).last_hidden_state[0, 7:19]
        expected = plain(**pad_rows(rows[1:2]).arguments()).last_hidden_state[0]
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


def decoder(folder: Path, gang: GangSection) -> Any:  # noqa: ANN401 - transformers is untyped
    """A decoder that is not sharded."""
    implementation = attention_implementation(gang, CPU, AutoConfig.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=implementation)
    return model.eval().get_decoder()


def test_a_model_that_hides_borders_from_its_mask_is_not_packed_with_eager(tmp_path: Path, context: RankContext) -> None:
    folder = save_tiny_model(tmp_path / "model", "opt")
    with pytest.raises(ConfigError, match=r"packing is 'on', but OPT\w+ cannot be packed here: a packed sequence comes out"):
        load(folder, context, packing="on", attention="eager")


def test_model_fault_is_found_where_borders_do_not_reach_attention() -> None:
    model = random_model("llama", tied=False, seed=0)
    fault = model_fault(_Deaf(model.get_decoder()))
    assert fault is not None
    assert "packed sequence comes out" in fault


class _Deaf:
    """A decoder that takes neither positions nor borders."""

    def __init__(self, decoder: Any) -> None:  # noqa: ANN401
        self.config = decoder.config
        self._decoder = decoder

    def __call__(self, *, input_ids: Tensor, use_cache: bool, **_: Any) -> Any:  # noqa: ANN401
        return self._decoder(input_ids=input_ids, use_cache=use_cache)


def test_kernel_fault_is_found_where_there_is_no_kernel() -> None:
    config = random_model("llama", tied=False, seed=0).config
    fault = kernel_fault(config, CPU)
    assert fault is not None
    assert "the kernel fails" in fault


def test_models_with_capped_attention_logits_run_eager(tmp_path: Path, context: RankContext) -> None:
    folder = save_tiny_model(tmp_path / "model", "gemma2", final_logit_softcapping=None)
    assert load(folder, context).language_model.config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping=50\.0"):
        load(folder, context, attention="sdpa")


def test_models_without_fused_attention_run_eager(tmp_path: Path, context: RankContext) -> None:
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_local_experts=2, num_experts_per_tok=1, pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    assert load(tmp_path / "model", context).language_model.config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match="does not support"):
        load(tmp_path / "model", context, attention="sdpa")


def test_packing_is_not_automatic_where_attention_is_eager(tmp_path: Path, context: RankContext) -> None:
    folder = save_tiny_model(tmp_path / "model", "gemma2", final_logit_softcapping=None)
    on_gpu = RankContext(rank=0, world_size=1, device=GPU, mesh=context.mesh)
    backbone = decoder(folder, GangSection(precision="bf16_mixed"))
    assert not choose_packing(backbone, GangSection(precision="bf16_mixed"), on_gpu)
    assert choose_packing(backbone, GangSection(packing="on"), context)


@pytest.mark.parametrize("option", ["softcap", "s_aux"])
def test_own_attention_refuses_what_it_would_leave_out(option: str) -> None:
    attention_implementation(GangSection(packing="on"), CPU, random_model("llama", tied=False, seed=0).config)
    heads = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ConfigError, match=f"needs {option}"):
        ALL_ATTENTION_FUNCTIONS["sdpa_varlen"](torch.nn.Identity(), heads, heads, heads, None, **{option: 1.0})


@pytest.mark.parametrize(
    ("gang", "device", "packs", "name"),
    [
        ({}, CPU, False, "sdpa"),
        ({}, GPU, False, "sdpa"),
        ({"precision": "bf16_mixed"}, CPU, False, "sdpa_float32"),
        ({"precision": "bf16_mixed"}, GPU, True, "sdpa_varlen"),
        ({"precision": "bf16_mixed", "packing": "off"}, GPU, False, "sdpa"),
        ({"precision": "bf16_mixed", "attention": "eager"}, GPU, False, "eager"),
        ({"packing": "on"}, CPU, True, "sdpa_varlen"),
        ({"packing": "on"}, GPU, True, "sdpa_varlen"),
        ({"packing": "on", "attention": "eager"}, CPU, True, "eager"),
    ],
)
def test_attention_follows_the_settings(gang: dict[str, Any], device: torch.device, packs: bool, name: str) -> None:
    section = GangSection(**gang)
    assert may_pack(section, device) == packs
    assert attention_implementation(section, device, random_model("llama", tied=False, seed=0).config) == name


def test_packing_on_and_off_are_read_from_yaml_as_they_stand() -> None:
    assert GangSection.model_validate({"packing": True}).packing == "on"
    assert GangSection.model_validate({"packing": False}).packing == "off"


def test_layout_is_packed_if_all_models_pack(policy_folder: Path, context: RankContext) -> None:
    config = run_config(policy_folder, critic={"packing": "on"})
    packs, pads = load(policy_folder, context, packing="on"), load(policy_folder, context)
    critic = load_value_model(config.model, config.critic, context)
    assert layout_for(packs, critic, None) is pack_rows
    assert layout_for(packs, torch.nn.Identity()) is pack_rows
    assert layout_for(packs, pads) is pad_rows
