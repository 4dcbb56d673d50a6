"""Reward models and judges on real vLLM servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_reward.kinds import build_scorer
from shoal_reward.models.reward_model import RewardModel
from shoal_reward.models.settings import ModelSection

from shoal.config.reward_service import ScorerDefinition
from shoal.errors import DataError, InvalidRequestError
from shoal.reward import Scorer
from tests.helpers.reward_models import TEMPLATE, plain_model, plain_outputs, save_reward_model
from tests.helpers.tiny_models import save_tiny_model
from tests.helpers.tiny_tokenizers import save_tokenizer
from tests.helpers.vllm_server import vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOLERANCE = 1e-4
PROMPTS = ["abc", "a", "abcdefgh" * 3, "b", "hgfedcba"]
RESPONSES = ["hg", "abcabcabc", "b", "hhhh", "aaa"]


def _scorer(kind: str, url: str, **settings: object) -> Scorer:
    return build_scorer("remote", ScorerDefinition(kind=kind, settings={"url": url, "model": "tiny", **settings}))


async def _scores(scorer: Scorer, rows: Sequence[dict[str, object]] | None = None) -> list[Any]:
    found: Any = [{}] * len(PROMPTS) if rows is None else rows
    calls: list[Any] = [scorer.function(*sample) for sample in zip(PROMPTS[: len(found)], RESPONSES[: len(found)], found, strict=True)]
    return await asyncio.gather(*calls, return_exceptions=True)


def _read(folder: Path, **settings: object) -> list[list[int]]:
    """What a model in this process would read."""
    reader = RewardModel(ModelSection.model_validate({"model": str(folder), "device": "cpu", **settings}))._model().reader
    return [reader.read(prompt, response, {}).ids for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


async def test_a_pooling_server_gives_the_outputs_of_a_plain_forward(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path / "model", "qwen2")
    async with vllm_server(folder, tmp_path / "log", "--runner", "pooling") as url:
        for reading in ("chat", "text"):
            plain = [plain_outputs(folder, ids)[0] for ids in _read(folder, input=reading)]
            scores = await _scores(_scorer("model_server", url, input=reading))
            assert scores == pytest.approx(plain, abs=TOLERANCE)
            # A sigmoid would show.
            assert min(scores) < 0.0 or max(scores) > 1.0
        [refused] = await _scores(_scorer("model_server", url, input="text", separator="a" * 300), [{}])
        assert isinstance(refused, InvalidRequestError)
        assert "answered 400" in str(refused)


async def test_a_pooling_server_gives_a_value_for_each_token(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path / "model", "qwen2", for_tokens=True)
    rows: list[dict[str, Any]] = [
        {"prompt_ids": [1, 3, 4, 5], "response_ids": [6, 7, 2]},
        {"prompt_ids": [1], "response_ids": [4, 5, 7, 8, 9, 10, 2]},
    ]
    model = plain_model(folder, for_tokens=True)
    async with vllm_server(folder, tmp_path / "log", "--runner", "pooling") as url:
        scores = await _scores(_scorer("model_server", url, per_token=True), rows)
    for score, row in zip(scores, rows, strict=True):
        with torch.no_grad():
            outputs = model(input_ids=torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])).logits[0, :, 0].tolist()
        assert score == pytest.approx(outputs[len(row["prompt_ids"]) :], abs=TOLERANCE)


async def test_a_judge_that_babbles_gives_errors_of_its_samples(tmp_path: Path) -> None:
    folder = save_tokenizer(save_tiny_model(tmp_path / "model", "qwen2"), adds_bos=True, template=TEMPLATE)
    async with vllm_server(folder, tmp_path / "log") as url:
        line = _scorer("judge", f"{url}/v1", rubric="{response}", max_tokens=8)
        scores = await _scores(line)
        assert all(isinstance(score, (float, DataError)) for score in scores), scores
        assert any(isinstance(score, DataError) for score in scores)
        wrong = _scorer("judge", f"{url}/v1", rubric="{response}", extra={"seed": "seven"})
        assert all(isinstance(score, InvalidRequestError) for score in await _scores(wrong))
