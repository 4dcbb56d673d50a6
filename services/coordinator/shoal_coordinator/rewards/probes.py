"""Samples to try a new revision on: the latest live ones, and ones made of data rows until there are enough of these."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

import numpy as np

from shoal.types import FinishReason, Int32Array, ScoreSample
from shoal_coordinator.prompt_rows import ANSWER
from shoal_coordinator.prompts import PromptRow
from shoal_coordinator.tokenizing import valid_text

_T = TypeVar("_T")

MAX_LIVE_SAMPLES = 256
MAX_MADE_SAMPLES = 64
MAX_SCANNED_ROWS = 100_000
MAX_RESPONSE_CHARS = 100_000
"""Longer answers are for the tests of limits, not for a warm-up."""


class ProbeTokenizer(Protocol):
    """What making probes of rows needs of a tokenizer."""

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        """[T] int32 ids of each text."""
        ...


class ProbeSet:
    """A bounded set of samples; used from the event loop alone.

    Args:
        made: samples that are used while too few live ones were seen.
        source_key: column that names a row's source.
        max_live: live samples kept, the latest ones.
    """

    def __init__(self, made: Sequence[ScoreSample] = (), *, source_key: str = "data_source", max_live: int = MAX_LIVE_SAMPLES) -> None:
        self._made = tuple(made[:MAX_MADE_SAMPLES])
        self._source_key = source_key
        self._live: deque[ScoreSample] = deque(maxlen=max_live)

    @classmethod
    def from_rows(cls, rows: Sequence[PromptRow], tokenizer: ProbeTokenizer, *, source_key: str = "data_source") -> ProbeSet:
        """Make samples of data rows, of all sources alike: the response is the row's answer as text, the prompt itself without one.

        Args:
            rows: as many as there are; the first MAX_SCANNED_ROWS are looked at, and few are used.
            tokenizer: gives the ids of the responses, for scorers that need them.
            source_key: column that names a row's source.
        """
        chosen = _of_each_source(rows[:MAX_SCANNED_ROWS], source_key, MAX_MADE_SAMPLES)
        answers = [answer_of(row) for row in chosen]
        ids = tokenizer.encode(answers)
        # A live response has a token at least.
        made = [
            sample_of_row(row, answer, own, f"probe-r{row.row_index}/0/1")
            for row, answer, own in zip(chosen, answers, ids, strict=True)
            if own.size
        ]
        return cls(made, source_key=source_key)

    def note(self, samples: Sequence[ScoreSample]) -> None:
        """Keep live samples; they take the place of the oldest ones."""
        self._live.extend(sample for sample in samples if len(sample.response) <= MAX_RESPONSE_CHARS)

    def samples(self, limit: int, *, sources: Collection[str] = ()) -> list[ScoreSample]:
        """Choose samples to try a scorer on: live ones, spread over those that are kept, then made ones.

        Args:
            limit: how many at most.
            sources: of whose rows; empty is all.
        """
        live = spread([sample for sample in self._live if self._is_of(sample, sources)], limit)
        made = spread([sample for sample in self._made if self._is_of(sample, sources)], limit - len(live))
        return [*live, *made]

    def _is_of(self, sample: ScoreSample, sources: Collection[str]) -> bool:
        return not sources or source_of_row(sample.row, self._source_key) in sources


def _of_each_source(rows: Sequence[PromptRow], source_key: str, limit: int) -> list[PromptRow]:
    """The first rows of each source, in turns, so that a rare source is there too."""
    by_source: dict[str, list[PromptRow]] = {}
    for row in rows:
        own = by_source.setdefault(source_of_row(row.row, source_key), [])
        if len(own) < limit:
            own.append(row)
    longest = max(map(len, by_source.values()), default=0)
    in_turns = [own[place] for place in range(longest) for own in by_source.values() if place < len(own)]
    return in_turns[:limit]


def source_of_row(row: dict[str, object], source_key: str) -> str:
    """The source of a row; "" if it has none."""
    return str(row.get(source_key, ""))


def answer_of(row: PromptRow) -> str:
    """A row's answer as text, the first of several right ones; the prompt of a row without the column."""
    answer = row.row.get(ANSWER)
    if isinstance(answer, list):
        answer = answer[0] if answer else ""
    return valid_text(row.text if answer is None else str(answer))[:MAX_RESPONSE_CHARS]


def sample_of_row(row: PromptRow, response: str, response_ids: Int32Array, sample_id: str) -> ScoreSample:
    """Make a sample of a row and a response that nobody generated; response_ids: at least one."""
    return ScoreSample(
        sample_id=sample_id,
        prompt=row.text,
        response=response,
        row=row.row,
        finish_reason=FinishReason.STOP,
        num_response_tokens=response_ids.size,
        prompt_ids=tuple(row.prompt_ids.tolist()),
        response_ids=tuple(response_ids.tolist()),
    )


def spread(items: Sequence[_T], limit: int) -> list[_T]:
    """At most limit of the items, at even distances: neighbours, such as siblings, resemble each other."""
    if limit <= 0:
        return []
    if len(items) <= limit:
        return list(items)
    return [items[place] for place in np.linspace(0, len(items) - 1, limit).round().astype(int).tolist()]
