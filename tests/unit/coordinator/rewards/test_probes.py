"""The probe set: live samples, made samples, bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from shoal_coordinator.prompts import PromptRow
from shoal_coordinator.rewards.probes import MAX_LIVE_SAMPLES, MAX_MADE_SAMPLES, MAX_RESPONSE_CHARS, ProbeSet

from shoal.types import FinishReason, Int32Array, ScoreSample


class WordTokenizer:
    """One id per word."""

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        return [np.arange(len(text.split()), dtype=np.int32) for text in texts]


def make_row(index: int, **columns: object) -> PromptRow:
    return PromptRow(row_index=index, prompt_ids=np.array([5, 6], np.int32), text=f"question {index}", row=dict(columns))


def make_sample(name: str, response: str = "r", source: str = "") -> ScoreSample:
    row: dict[str, object] = {"data_source": source} if source else {}
    return ScoreSample(sample_id=name, prompt="p", response=response, row=row, finish_reason=FinishReason.STOP, num_response_tokens=1)


def ids(samples: Sequence[ScoreSample]) -> list[str]:
    return [sample.sample_id for sample in samples]


def test_rows_give_samples_with_the_answer_as_response() -> None:
    probes = ProbeSet.from_rows([make_row(4, answer=12), make_row(7, answer="two words")], WordTokenizer())
    first, second = probes.samples(8)
    assert (first.prompt, first.response, first.row, first.prompt_ids) == ("question 4", "12", {"answer": 12}, (5, 6))
    assert (second.response, second.num_response_tokens, second.response_ids) == ("two words", 2, (0, 1))
    assert len({first.sample_id, second.sample_id}) == 2


def test_row_without_answer_gives_its_prompt_and_one_without_tokens_none() -> None:
    probes = ProbeSet.from_rows([make_row(0), make_row(1, answer=""), make_row(2, answer=None)], WordTokenizer())
    assert [sample.response for sample in probes.samples(8)] == ["question 0", "question 2"]


def test_rare_source_is_among_the_made_samples() -> None:
    rows = [make_row(index, answer="a", data_source="common") for index in range(1000)]
    probes = ProbeSet.from_rows([*rows, make_row(1000, answer="b", data_source="rare")], WordTokenizer())
    assert [sample.response for sample in probes.samples(8, sources=["rare"])] == ["b"]
    assert len(probes.samples(10_000)) == MAX_MADE_SAMPLES


def test_live_samples_come_first_and_made_ones_fill_up() -> None:
    probes = ProbeSet([make_sample("made0"), make_sample("made1"), make_sample("made2")])
    assert ids(probes.samples(2)) == ["made0", "made2"]
    probes.note([make_sample("live0")])
    assert ids(probes.samples(3)) == ["live0", "made0", "made2"]
    probes.note([make_sample("live1"), make_sample("live2")])
    assert ids(probes.samples(3)) == ["live0", "live1", "live2"]


def test_samples_are_spread_over_the_latest_live_ones() -> None:
    probes = ProbeSet(max_live=5)
    probes.note([make_sample(str(number)) for number in range(9)])
    assert ids(probes.samples(3)) == ["4", "6", "8"]
    assert ids(probes.samples(9)) == ["4", "5", "6", "7", "8"]


def test_only_samples_of_the_asked_sources_are_chosen() -> None:
    probes = ProbeSet([make_sample("made", source="code")])
    probes.note([make_sample("a", source="math"), make_sample("b", source="code"), make_sample("c")])
    assert ids(probes.samples(8, sources=("code",))) == ["b", "made"]
    assert ids(probes.samples(8)) == ["a", "b", "c", "made"]


def test_memory_is_bounded() -> None:
    probes = ProbeSet()
    probes.note([make_sample("huge", "x" * (MAX_RESPONSE_CHARS + 1))])
    assert probes.samples(8) == []
    probes.note([make_sample(str(number)) for number in range(2 * MAX_LIVE_SAMPLES)])
    assert len(probes.samples(10_000)) == MAX_LIVE_SAMPLES


def test_empty_set_and_limit_zero_give_nothing() -> None:
    assert ProbeSet().samples(8) == []
    assert ProbeSet([make_sample("made")]).samples(0) == []
