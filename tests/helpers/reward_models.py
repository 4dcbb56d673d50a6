"""Tiny random reward models with tokenizers, and what a plain forward of one sample gives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DebertaV2Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from tests.helpers.tiny_models import Architecture, tiny_config
from tests.helpers.tiny_tokenizers import LETTERS, save_tokenizer

RewardArchitecture = Architecture | Literal["bert", "roberta", "deberta"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
_ENCODERS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "bert": (BertConfig, {"pad_token_id": 0}),
    "roberta": (RobertaConfig, {"pad_token_id": 1, "type_vocab_size": 1}),
    "deberta": (DebertaV2Config, {"pad_token_id": 0, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}),
}


def save_reward_model(
    folder: Path,
    architecture: RewardArchitecture,
    *,
    num_labels: int = 1,
    for_tokens: bool = False,
    padding_side: str = "right",
    **overrides: object,
) -> Path:
    """Write a random reward model and its tokenizer, and return the folder.

    Args:
        folder: to write.
        architecture: of transformers.
        num_labels: outputs.
        for_tokens: an output for every token.
        padding_side: what the tokenizer says of itself.
        overrides: of the configuration; pad_token_id is the model's, the tokenizer always has one.
    """
    encoder = architecture in _ENCODERS
    config = _encoder_config(architecture) if encoder else tiny_config(architecture, tied=False)  # type: ignore[arg-type]
    config.update({"num_labels": num_labels, **overrides})
    kind = AutoModelForTokenClassification if for_tokens else AutoModelForSequenceClassification
    model = kind.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(mean + 0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    if encoder:
        _save_encoder_tokenizer(folder, padding_side, with_types=architecture == "bert")
    else:
        save_tokenizer(folder, adds_bos=True, template=TEMPLATE)
        _say_padding_side(folder, padding_side)
    return folder


def plain_outputs(folder: Path, ids: Sequence[int], **inputs: list[int]) -> list[float]:
    """All outputs of one unpadded forward in float32, as the model pools them itself."""
    model = plain_model(folder)
    extra = {name: torch.tensor([row]) for name, row in inputs.items()}
    with torch.no_grad():
        outputs: list[float] = model(input_ids=torch.tensor([list(ids)]), **extra).logits[0].tolist()
    return outputs


@functools.lru_cache(maxsize=1)
def plain_model(folder: Path, *, for_tokens: bool = False) -> Any:  # noqa: ANN401 - transformers ships no usable types
    """The model of a folder as transformers loads it, in float32."""
    kind = AutoModelForTokenClassification if for_tokens else AutoModelForSequenceClassification
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def _encoder_config(architecture: str) -> PreTrainedConfig:
    kind, extras = _ENCODERS[architecture]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return kind(vocab_size=101, max_position_embeddings=66, **sizes, **extras)


def _save_encoder_tokenizer(folder: Path, padding_side: str, *, with_types: bool) -> None:
    special = ("<pad0>", "<pad>", "<cls>", "<sep>", "<unk>") if not with_types else ("<pad>", "<unused>", "<cls>", "<sep>", "<unk>")
    vocabulary = {token: place for place, token in enumerate([*special, *LETTERS, "u"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    second = "$B:1 <sep>:1" if with_types else "<sep> $B <sep>"
    tokenizer.post_processor = TemplateProcessing(
        single="<cls> $A <sep>", pair=f"<cls> $A <sep> {second}", special_tokens=[("<cls>", 2), ("<sep>", 3)]
    )
    names = ["input_ids", "token_type_ids", "attention_mask"] if with_types else ["input_ids", "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        cls_token="<cls>",  # noqa: S106
        sep_token="<sep>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
        padding_side=padding_side,
        model_max_length=64,
        model_input_names=names,
    ).save_pretrained(folder)


def _say_padding_side(folder: Path, padding_side: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side=padding_side)
    tokenizer.save_pretrained(folder)
