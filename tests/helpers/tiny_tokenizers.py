"""A tokenizer of a few letters, one id each, saved as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
LETTERS = "abcdefgh"
A, B = 3, 4
"""Ids of the first two letters; the others follow."""
WITH_BOS = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
WITHOUT_BOS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def save_tokenizer(
    folder: Path,
    *,
    adds_bos: bool,
    template: str | None = None,
    bos: str | None = "<bos>",
    added: Sequence[str] = (),
    unknown: str = "<pad>",
) -> Path:
    """Write a tokenizer into folder and return it.

    Args:
        adds_bos: whether the tokenizer itself puts BOS before plain text.
        template: chat template; None for none.
        bos: text of the BOS token; None: the tokenizer names none.
        added: special tokens behind the letters.
        unknown: token of all other text.
    """
    vocabulary = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID} | {letter: A + place for place, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(added))
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": bos, "eos_token": "<eos>", "unk_token": unknown}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def write_model_config(folder: Path, *, vocab_size: int, max_context: int = 64, **generation: object) -> Path:
    """Write what the coordinator reads of a model beside its tokenizer."""
    config = {"vocab_size": vocab_size, "max_position_embeddings": max_context, "eos_token_id": EOS_ID}
    (folder / "config.json").write_text(json.dumps(config))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
