from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_reward.kinds import build_scorer
from shoal_reward.models.reward_model import RewardModel
from shoal_reward.models.settings import ModelSection

from shoal.config.reward_service import ScorerDefinition
from shoal.errors import ConfigError, DataError
from tests.helpers.reward_models import RewardArchitecture, plain_model, save_reward_model
from tests.helpers.tiny_models import EOS_ID
from tests.helpers.tiny_tokenizers import save_tokenizer

ROWS: list[dict[str, object]] = [
    {"prompt_ids": [1, 3, 4, 5], "response_ids": [6, 7, 2]},
    {"prompt_ids": [], "response_ids": [2]},
    {"prompt_ids": [1, 3], "response_ids": [4, 5, 0, 7, 8, 9, 10, 2, 2]},
]


def _model(folder: Path, **settings: object) -> RewardModel:
    return RewardModel(
        ModelSection.model_validate({"model": str(folder), "device": "cpu", "per_token": True, "policy_tokenizer": str(folder), **settings})
    )


def _score(model: RewardModel, rows: list[dict[str, object]]) -> list[Any]:
    return model.score([""] * len(rows), [""] * len(rows), rows)


def _naive(folder: Path, row: dict[str, Any], *, for_tokens: bool) -> list[float]:
    """The output behind each response token, each from a pass over all up to the end of it, or for encoders over all."""
    ids, num_prompt = [*row["prompt_ids"], *row["response_ids"]], len(row["prompt_ids"])
    with torch.no_grad():
        if for_tokens:
            return plain_model(folder, for_tokens=True)(input_ids=torch.tensor([ids])).logits[0, num_prompt:, 0].tolist()  # type: ignore[no-any-return]
        model = plain_model(folder)
        model.config.pad_token_id = None
        return [model(input_ids=torch.tensor([ids[: end + 1]])).logits[0, 0].item() for end in range(num_prompt, len(ids))]


@pytest.mark.parametrize(("architecture", "for_tokens"), [("llama", False), ("qwen2", False), ("llama", True), ("bert", True)])
@pytest.mark.parametrize("pad_token_id", [0, EOS_ID, None])
def test_each_response_token_gets_the_output_behind_it(
    tmp_path: Path, architecture: RewardArchitecture, for_tokens: bool, pad_token_id: int | None
) -> None:
    folder = save_reward_model(tmp_path, architecture, for_tokens=for_tokens, pad_token_id=pad_token_id)
    scores = _score(_model(folder, scale=2.0, shift=1.0), ROWS)
    assert [len(score) for score in scores] == [3, 1, 9]
    for score, row in zip(scores, ROWS, strict=True):
        assert score == pytest.approx([2 * value + 1 for value in _naive(folder, row, for_tokens=for_tokens)], abs=2e-5)


def test_ids_that_cannot_be_the_models_are_errors_of_their_sample(tmp_path: Path) -> None:
    model = _model(save_reward_model(tmp_path, "llama"), max_tokens=12)
    bad: list[dict[str, object]] = [
        {"prompt_ids": [1], "response_ids": [101]},
        {"prompt_ids": [-1], "response_ids": [1]},
        {"prompt_ids": [1], "response_ids": []},
        {"prompt_ids": [1], "response_ids": [True]},
        {"prompt_ids": [1], "response_ids": "ab"},
        {"response_ids": [1]},
        {"prompt_ids": [1] * 10, "response_ids": [3] * 3},
    ]
    *scores, good = _score(model, [*bad, ROWS[0]])
    assert all(isinstance(score, DataError) for score in scores)
    assert len(good) == 3


def test_truncation_drops_prompt_tokens_and_keeps_every_response_token(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, "llama")
    model = _model(folder, max_tokens=8, overlong="truncate_left")
    row: dict[str, object] = {"prompt_ids": [1, *range(3, 13)], "response_ids": [5, 4, 3]}
    kept: dict[str, object] = {"prompt_ids": [1, 9, 10, 11, 12], "response_ids": [5, 4, 3]}
    long: dict[str, object] = {"prompt_ids": [1], "response_ids": [3] * 9}
    cut, plain, refused = _score(model, [row, kept, long])
    assert cut == pytest.approx(plain, abs=1e-5)
    assert len(cut) == 3
    assert isinstance(refused, DataError)


def test_a_model_with_another_tokenizer_than_the_policys_is_refused(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path / "model", "llama")
    policy = save_tokenizer(tmp_path / "policy", adds_bos=True, added=["<call>"])
    with pytest.raises(ConfigError, match=r"differ in 1, '<call>' for one"):
        _model(folder, policy_tokenizer=str(policy)).prepare()


def test_models_and_settings_that_give_no_token_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pools by itself and gives no output for a token"):
        _model(save_reward_model(tmp_path / "bert", "bert")).prepare()
    tokens = save_reward_model(tmp_path / "tokens", "llama", for_tokens=True)
    with pytest.raises(ConfigError, match="gives an output for every token: set per_token"):
        RewardModel(ModelSection(model=str(tokens))).prepare()
    with pytest.raises(ConfigError, match="name the policy's folder in policy_tokenizer"):
        build_scorer("rm", ScorerDefinition(kind="model", settings={"model": str(tokens), "per_token": True}))


def test_a_scorer_asks_for_token_ids(tmp_path: Path) -> None:
    folder = str(save_reward_model(tmp_path, "llama"))
    settings = {"model": folder, "per_token": True, "policy_tokenizer": folder}
    assert build_scorer("rm", ScorerDefinition(kind="model", settings=settings)).needs_token_ids
