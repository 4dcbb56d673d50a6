from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_reward.kinds import build_scorer
from shoal_reward.models.forward import Head
from shoal_reward.models.reward_model import RewardModel
from shoal_reward.models.settings import ModelSection
from shoal_reward.outcome import outcome
from transformers import AutoModelForSequenceClassification, XLNetConfig

from shoal.config.reward_service import ScorerDefinition
from shoal.errors import ConfigError, DataError
from shoal.reward import Isolation
from shoal.types import FinishReason, ScoreSample, ScoreStatus
from tests.helpers.reward_models import RewardArchitecture, plain_outputs, save_reward_model
from tests.helpers.tiny_models import EOS_ID, save_tiny_model
from tests.helpers.tiny_tokenizers import BOS_ID, A, save_tokenizer

PROMPTS = ["abc", "", "abcdefgh" * 3, "b", "hgfedcba"]
RESPONSES = ["hg", "abcabcabc", "b", "hhhh", "aaa"]
TOLERANCE = 1e-5


def _model(folder: Path, **settings: object) -> RewardModel:
    return RewardModel(ModelSection.model_validate({"model": str(folder), "device": "cpu", **settings}))


def _score(model: RewardModel, rows: Sequence[Mapping[str, object]] | None = None) -> list[Any]:
    return model.score(PROMPTS, RESPONSES, [{}] * len(PROMPTS) if rows is None else rows)


def _plain(folder: Path, model: RewardModel, label: int = 0) -> list[float]:
    reader = model._model().reader
    inputs = [reader.read(prompt, response, {}) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    types = [{} if read.type_ids is None else {"token_type_ids": read.type_ids} for read in inputs]
    return [plain_outputs(folder, read.ids, **extra)[label] for read, extra in zip(inputs, types, strict=True)]


@pytest.mark.parametrize(
    ("architecture", "overrides", "reading", "padding_side"),
    [
        ("llama", {}, "chat", "left"),
        ("llama", {}, "chat", "right"),
        ("qwen2", {"pad_token_id": None}, "chat", "left"),
        ("qwen2", {"pad_token_id": None}, "chat", "right"),
        ("llama", {"pad_token_id": EOS_ID}, "chat", "right"),
        ("qwen2", {"pad_token_id": A}, "text", "left"),
        ("gpt2", {"pad_token_id": None}, "text", "right"),
        ("bert", {}, "pair", "left"),
        ("bert", {}, "pair", "right"),
        ("bert", {"pad_token_id": None}, "text", "right"),
        ("roberta", {}, "pair", "left"),
        ("deberta", {}, "text", "right"),
    ],
)
def test_batches_equal_a_plain_forward_of_each_sample(
    tmp_path: Path, architecture: RewardArchitecture, overrides: dict[str, Any], reading: str, padding_side: str
) -> None:
    folder = save_reward_model(tmp_path, architecture, padding_side=padding_side, **overrides)
    model = _model(folder, input=reading)
    scores = _score(model)
    assert scores == pytest.approx(_plain(folder, model), abs=TOLERANCE)
    assert max(scores) - min(scores) > 100 * TOLERANCE
    assert model._model().forward.head is not Head.SINGLE


@pytest.mark.parametrize("limits", [{"max_batch_tokens": 1}, {"max_batch_tokens": 30}, {"max_batch_samples": 2}])
def test_how_samples_are_batched_does_not_matter(tmp_path: Path, limits: dict[str, object]) -> None:
    folder = save_reward_model(tmp_path, "qwen2")
    assert _score(_model(folder, **limits)) == pytest.approx(_score(_model(folder)), abs=TOLERANCE)


def test_a_model_that_pools_wrongly_in_batches_scores_one_by_one(tmp_path: Path) -> None:
    config = XLNetConfig(vocab_size=101, d_model=32, n_layer=2, n_head=2, d_inner=64, num_labels=1, pad_token_id=0)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, adds_bos=True)
    model = _model(tmp_path, input="text", max_tokens=64)
    assert _score(model) == pytest.approx(_plain(tmp_path, model), abs=TOLERANCE)
    assert model._model().forward.head is Head.SINGLE


def test_the_output_is_chosen_by_place_or_name_scaled_and_not_squashed(tmp_path: Path) -> None:
    names = {0: "harm", 1: "help", 2: "style"}
    folder = save_reward_model(tmp_path, "llama", num_labels=3, id2label=names, label2id={name: place for place, name in names.items()})
    by_name = _model(folder, label="help")
    plain = _plain(folder, by_name, 1)
    assert _score(by_name) == pytest.approx(plain, abs=TOLERANCE)
    assert _score(_model(folder, label=1, scale=100.0, shift=3.0)) == pytest.approx([100 * value + 3 for value in plain], abs=1e-3)
    for label in (None, 3, -1, "helpful"):
        with pytest.raises(ConfigError, match=r"has 3 outputs \(0 'harm', 1 'help', 2 'style'\)"):
            build_scorer("rm", ScorerDefinition(kind="model", settings={"model": str(folder), "label": label}))


def test_16_bit_scores_are_near_the_exact_ones(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, "llama")
    model = _model(folder, dtype="bfloat16")
    assert _score(model) == pytest.approx(_plain(folder, model), abs=0.1)
    assert model._model().forward.head is Head.LAST


def test_a_bad_sample_is_an_error_and_leaves_the_others_their_scores(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, "llama")
    model = _model(folder, max_text_chars=1000)
    expected = _score(model)
    rows: list[dict[str, object]] = [{}, {"messages": [{"role": "user"}]}, {}, {"prompt": []}, {}]
    scores = _score(model, rows)
    assert [scores[0], scores[2], scores[4]] == pytest.approx([expected[0], expected[2], expected[4]], abs=TOLERANCE)
    assert all(isinstance(scores[place], DataError) for place in (1, 3))
    [long] = model.score(["a"], ["b" * 10_000_000], [{}])
    assert isinstance(long, DataError)
    sample = ScoreSample(sample_id="s", prompt="", response="", row={}, finish_reason=FinishReason.STOP, num_response_tokens=1)
    assert outcome(sample, long, 0.0).status is ScoreStatus.ERROR
    assert "max_text_chars allows 1000" in outcome(sample, long, 0.0).message


@pytest.mark.parametrize("response", ["\0", "\ud800", "🦈" * 50, "<eos><pad>", "", "{" * 100])
def test_strange_responses_give_a_score_or_an_error_of_their_own(tmp_path: Path, response: str) -> None:
    model = _model(save_reward_model(tmp_path, "qwen2"))
    strange, plain = model.score(["a", "a"], [response, "b"], [{}, {}])
    assert isinstance(strange, (float, Exception))
    assert isinstance(plain, float)


def test_threads_take_turns(tmp_path: Path) -> None:
    model = _model(save_reward_model(tmp_path, "llama"))
    expected, found = _score(model), []
    threads = [threading.Thread(target=lambda: found.append(_score(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_a_language_model_without_a_head_is_refused(tmp_path: Path) -> None:
    save_tokenizer(save_tiny_model(tmp_path, "qwen2"), adds_bos=True)
    with pytest.raises(ConfigError, match=r"lacks score.weight: it is no trained reward model"):
        _model(tmp_path, input="text", label=0).prepare()


def test_a_model_without_a_template_needs_another_input(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, "bert")
    with pytest.raises(ConfigError, match="has no chat template: set input to text or pair"):
        _model(folder).prepare()


def test_a_scorer_holds_the_model_once_and_loads_it_when_prepared(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, "llama")
    scorer = build_scorer("rm", ScorerDefinition(kind="model", settings={"model": str(folder), "device": "cpu"}))
    assert (scorer.isolation, scorer.is_batch, scorer.needs_token_ids) == (Isolation.THREAD, True, False)
    assert scorer.prepare is not None
    scorer.prepare()
    assert scorer.function(["abc"], ["hg"], [{}]) == pytest.approx([_score(_model(folder))[0]], abs=TOLERANCE)


def test_truncation_keeps_the_first_token_and_the_end(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, "llama")
    refusing = _model(folder, input="text", max_tokens=8)
    [refused] = refusing.score(["abcdefgh"], ["abc"], [{}])
    assert isinstance(refused, DataError)
    assert "12 tokens, the model takes 8" in str(refused)
    cutting = _model(folder, input="text", max_tokens=8, overlong="truncate_left")
    read = cutting._model().reader.read("abcdefgh", "abc", {})
    assert read.ids == [BOS_ID, *range(A + 4, A + 8), A, A + 1, A + 2]
    assert cutting.score(["abcdefgh"], ["abc"], [{}]) == pytest.approx(plain_outputs(folder, read.ids), abs=TOLERANCE)


def test_truncation_of_a_pair_cuts_the_prompt_alone(tmp_path: Path) -> None:
    reader = _model(save_reward_model(tmp_path, "bert"), input="pair", max_tokens=8, overlong="truncate_left")._model().reader
    read = reader.read("abcdefgh", "abc", {})
    assert (read.ids, read.type_ids) == ([2, 11, 12, 3, 5, 6, 7, 3], [0, 0, 0, 0, 1, 1, 1, 1])
    with pytest.raises(Exception, match=r"too short|response alone"):
        reader.read("ab", "abcdefgh", {})


def test_a_limit_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_tokens is 300, but model .* takes 256"):
        _model(save_reward_model(tmp_path, "llama"), max_tokens=300).prepare()


def test_text_has_one_bos_and_the_asked_end(tmp_path: Path) -> None:
    reader = _model(save_reward_model(tmp_path, "llama"), input="text", separator="h", append_eos=True)._model().reader
    assert reader.read("<bos>a", "b", {}).ids == [BOS_ID, A, A + 7, A + 1, EOS_ID]
    assert reader.read("a", "b<eos>", {}).ids == [BOS_ID, A, A + 7, A + 1, EOS_ID]
