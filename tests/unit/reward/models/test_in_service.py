"""Model scorers and judges as the reward service runs them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from shoal_reward.kinds import build_scorer
from shoal_reward.scoring import ScoringPool

from shoal.config.reward_service import ScorerDefinition
from shoal.types import FinishReason, ScoreSample, ScoreStatus
from tests.helpers.http_stub import StubAnswer, StubRequest, http_stub, json_answer
from tests.helpers.reward_models import save_reward_model


@pytest.fixture
def pool() -> Iterator[ScoringPool]:
    """A pool as the service has it."""
    pool = ScoringPool(2)
    yield pool
    pool.shutdown()


def _sample(name: str, response: str, **row: object) -> ScoreSample:
    ids = tuple(range(3, 3 + len(response)))
    return ScoreSample(
        sample_id=name,
        prompt="abc",
        response=response,
        row=dict(row),
        finish_reason=FinishReason.STOP,
        num_response_tokens=len(response),
        prompt_ids=(1, 3),
        response_ids=ids,
    )


async def test_a_models_batch_keeps_errors_and_scores_apart(tmp_path: Path, pool: ScoringPool) -> None:
    settings = {"model": str(save_reward_model(tmp_path, "llama")), "device": "cpu"}
    scorer = build_scorer("rm", ScorerDefinition(kind="model", settings=settings))
    samples = [_sample("a", "hg"), _sample("b", "hg", messages=["no message"]), _sample("c", "hg")]
    first, bad, last = await pool.score(scorer, samples, 60.0)
    assert [first.status, bad.status, last.status] == [ScoreStatus.SCORED, ScoreStatus.ERROR, ScoreStatus.SCORED]
    assert first.value == pytest.approx(last.value, abs=1e-5)
    assert "holds no chat messages" in bad.message


async def test_token_values_arrive_one_for_each_response_token(tmp_path: Path, pool: ScoringPool) -> None:
    folder = str(save_reward_model(tmp_path, "llama"))
    settings = {"model": folder, "policy_tokenizer": folder, "per_token": True, "device": "cpu"}
    scorer = build_scorer("rm", ScorerDefinition(kind="model", settings=settings))
    results = await pool.score(scorer, [_sample("a", "hgh"), _sample("b", "h")], 60.0)
    assert [len(result.token_values) for result in results] == [3, 1]


async def test_a_model_that_cannot_be_loaded_is_an_error_of_every_sample(tmp_path: Path, pool: ScoringPool) -> None:
    settings = {"model": str(save_reward_model(tmp_path, "bert")), "device": "cpu"}
    scorer = build_scorer("rm", ScorerDefinition(kind="model", settings=settings))
    results = await pool.score(scorer, [_sample("a", "hg")] * 2, 60.0)
    assert [result.status for result in results] == [ScoreStatus.ERROR] * 2
    assert all("has no chat template" in result.message for result in results)


async def test_a_judges_batch_is_asked_for_at_once_and_bounded(pool: ScoringPool) -> None:
    four_are_in = asyncio.Event()

    async def answering(request: StubRequest) -> StubAnswer:
        if request.number == 4:
            four_are_in.set()
        await four_are_in.wait()
        said = {"choices": [{"message": {"content": f"Score: {request.number % 2}"}, "finish_reason": "stop"}]}
        return json_answer(said if request.number != 3 else {"choices": []})

    async with http_stub(answering) as stub:
        settings = {"url": stub.url, "model": "m", "rubric": "{response}", "max_open": 4}
        scorer = build_scorer("grade", ScorerDefinition(kind="judge", settings=settings))
        results = await pool.score(scorer, [_sample(str(index), "hg") for index in range(20)], 30.0)
        assert stub.max_open == 4
    statuses = [result.status for result in results]
    assert (statuses.count(ScoreStatus.SCORED), statuses.count(ScoreStatus.ERROR)) == (19, 1)
