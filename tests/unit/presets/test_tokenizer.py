"""The character tokenizer."""

from __future__ import annotations

import string

import pytest
from shoal_trainer.presets.tokenizer import build_char_tokenizer


@pytest.mark.parametrize("text", ["12+34=", "46", " a  b ", string.printable[:95]])
def test_char_tokenizer_gives_a_token_a_character_and_back(text: str) -> None:
    tokenizer = build_char_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_char_tokenizer_special_ids_are_distinct_and_every_id_is_used() -> None:
    tokenizer = build_char_tokenizer()
    special = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    assert len(special) == 4
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_char_tokenizer_maps_what_it_does_not_know_to_unk_and_skips_specials() -> None:
    tokenizer = build_char_tokenizer()
    assert tokenizer("é", add_special_tokens=False)["input_ids"] == [tokenizer.unk_token_id]
    ids = [*tokenizer("46", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "46"
