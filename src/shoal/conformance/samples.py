"""The samples that a server is checked with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import cast

from shoal.types import FinishReason, ScoreSample

MAX_SAMPLES = 16
"""Of the samples that were given, so many are used."""
LARGE_SAMPLE_CHARS = 1 << 20

_NUM_MADE_TOKENS = 8

_TEXTS = (
    ("What is 2 + 2?", "4", "4"),
    ("What is 3 * 5? Put the answer in \\boxed{}.", "Three fives are \\boxed{15}.", "15"),
    ("What is the capital of France?", "<think>It is Paris.</think><answer>Paris</answer>", "Paris"),
    ("Which letter is second: (A) a (B) b", "The answer is (B).", "B"),
    ('Answer with {"a": 1}.', '{"a": 1}', '{"a": 1}'),
    ("What is 2 + 2?", "5", "4"),
    ("Say nothing.", "", ""),
)
_ODD_TEXTS = (
    "null \x00 byte",
    "\u202eright to left\u202c مرحبا שלום",
    "emoji 👩‍👩‍👧‍👦🏳️‍🌈 and e\u0301\u0301\u0301",
    "\ufeff\u200b\u2028\r\n\t\x1b[31m\x7f",
    "{" * 10_000,
    "\\boxed{" * 2_000,
)


def choose_samples(given: Sequence[ScoreSample], *, needs_token_ids: bool) -> tuple[ScoreSample, ...]:
    """At most MAX_SAMPLES of the given samples, or made ones, with ids of their own; made token ids where they are needed and missing."""
    chosen = tuple(given[:MAX_SAMPLES]) or tuple(_made(prompt, response, {"answer": answer}) for prompt, response, answer in _TEXTS)
    if needs_token_ids:
        chosen = tuple(_with_ids(sample) for sample in chosen)
    return numbered(chosen)


def numbered(samples: Sequence[ScoreSample]) -> tuple[ScoreSample, ...]:
    """The samples under ids that differ."""
    return tuple(replace(sample, sample_id=f"check-{index}/0/0") for index, sample in enumerate(samples))


def repeated(samples: Sequence[ScoreSample], number: int) -> tuple[ScoreSample, ...]:
    """As many samples as asked for, those given over and over."""
    return numbered(tuple(islice(cycle(samples), number)))


def odd_samples(like: ScoreSample) -> tuple[ScoreSample, ...]:
    """A sample with texts that break careless code: null bytes, right-to-left, emoji, control characters, deep nesting."""
    return numbered([replace(like, prompt=f"{like.prompt} {text[:200]}", response=text) for text in _ODD_TEXTS])


def unscorable_samples(like: ScoreSample) -> tuple[ScoreSample, ...]:
    """A sample whose row has no columns, columns of other types, or is not even an object."""
    not_an_object = cast("dict[str, object]", ["not", "an", "object"])
    strange: dict[str, object] = {column: {"is": [None, 1e300, {}]} for column in like.row}
    rows: list[dict[str, object]] = [{}, dict.fromkeys(like.row), strange, not_an_object]
    return tuple(replace(like, row=row) for row in rows)


def large_sample(like: ScoreSample) -> ScoreSample:
    """A sample whose response has 1 MiB."""
    words = "lorem ipsum 4 \\boxed{4} "
    return replace(like, response=(words * (LARGE_SAMPLE_CHARS // len(words) + 1))[:LARGE_SAMPLE_CHARS])


def _made(prompt: str, response: str, row: dict[str, object]) -> ScoreSample:
    return ScoreSample(
        sample_id="", prompt=prompt, response=response, row=row, finish_reason=FinishReason.STOP, num_response_tokens=_NUM_MADE_TOKENS
    )


def _with_ids(sample: ScoreSample) -> ScoreSample:
    if sample.response_ids:
        return sample
    num_tokens = max(1, sample.num_response_tokens)
    # Small ids exist in every vocabulary.
    ids = tuple(1 + index % 100 for index in range(num_tokens))
    return replace(sample, prompt_ids=sample.prompt_ids or (1, 2, 3), response_ids=ids, num_response_tokens=num_tokens)
