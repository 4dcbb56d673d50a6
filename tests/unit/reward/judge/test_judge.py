from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from shoal_reward.kinds import build_scorer
from shoal_reward.outcome import outcome, raised

from shoal.config.reward_service import ScorerDefinition
from shoal.errors import CodecError, ConfigError, DataError, InvalidRequestError, ShoalError
from shoal.reward import Isolation, Scorer
from shoal.types import FinishReason, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.http_stub import StubAnswer, StubRequest, http_stub, json_answer

RUBRIC = "Is it right?\n{response}\nThe right answer is {row.answer}."
ROW: dict[str, object] = {"answer": "4"}


def _judge(url: str, **settings: object) -> Scorer:
    fast = {"backoff_s": 0.001, "max_backoff_s": 0.002, "model": "judge", "rubric": RUBRIC}
    return build_scorer("grade", ScorerDefinition(kind="judge", settings={**fast, "url": f"{url}/v1", **settings}))


def _said(content: object, **choice: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop", **choice}]}


async def _score(scorer: Scorer, response: str = "4", row: Mapping[str, object] = ROW) -> Any:  # noqa: ANN401 - a scorer returns anything
    returned: Any = scorer.function("2+2?", response, dict(row))
    return await returned


async def _answered(reply: StubAnswer, **settings: object) -> Any:  # noqa: ANN401 - see above
    async def answering(request: StubRequest) -> StubAnswer:
        return reply

    async with http_stub(answering) as stub:
        return await _score(_judge(stub.url, **settings))


def test_a_judge_waits_in_the_event_loop() -> None:
    scorer = _judge("http://127.0.0.1:1")
    assert (scorer.isolation, scorer.is_async, scorer.is_batch) == (Isolation.LOOP, True, False)


async def test_the_request_is_a_chat_with_the_rules_and_the_rubric() -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        return json_answer(_said("Score: 8"))

    async with http_stub(answering) as stub:
        assert await _score(_judge(stub.url, max_tokens=77, extra={"seed": 1})) == 8.0
        [request] = stub.requests
    assert request.path == "/v1/chat/completions"
    system, user = request.body.pop("messages")
    assert request.body == {"model": "judge", "max_tokens": 77, "temperature": 0.0, "seed": 1}
    assert (system["role"], user["role"]) == ("system", "user")
    assert "a number from 0 to 10" in system["content"]
    assert user["content"].endswith("The right answer is 4.")


async def test_the_same_sample_makes_the_same_request() -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        return json_answer(_said("Score: 8"))

    async with http_stub(answering) as stub:
        scorer = _judge(stub.url, system_role=False, temperature=None, max_tokens_name="max_completion_tokens")
        assert [await _score(scorer) for _ in range(2)] == [8.0, 8.0]
        first, second = stub.requests
    assert first.body == second.body
    assert [message["role"] for message in first.body["messages"]] == ["user"]
    assert set(first.body) == {"model", "messages", "max_completion_tokens"}


async def test_numbers_are_weighted_components() -> None:
    fields = {"facts": {"weight": 0.1}, "style": {"low": -1, "high": 1, "weight": 2}}
    score = await _answered(json_answer(_said('{"facts": 8, "style": 0.5}')), answer="json", fields=fields)
    assert score == pytest.approx({"facts": 0.8, "style": 1.0})
    assert await _answered(json_answer(_said("Score: 8")), score={"weight": 0.1}) == pytest.approx(0.8)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": []},
        {"choices": None},
        {"choices": ["x"]},
        {"choices": [{}, {}]},
        {"choices": [{"message": None}]},
        {"error": "overloaded"},
        _said(None),
        _said(""),
        _said(["Score: 8"]),
        _said("It is fine."),
        _said("Score: 8", finish_reason="length"),
        _said("Score: 8", finish_reason="content_filter"),
    ],
)
async def test_200_without_a_score_is_an_error(body: dict[str, object]) -> None:
    with pytest.raises((CodecError, DataError)):
        await _answered(json_answer(body))


async def test_a_cut_answer_does_not_end_in_what_it_quotes() -> None:
    with pytest.raises(DataError, match="not complete"):
        await _answered(json_answer(_said("The response said:\nScore: 10", finish_reason="length")))


async def test_a_text_that_is_too_long_is_never_sent() -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        return json_answer(_said("Score: 8"))

    async with http_stub(answering) as stub:
        scorer = _judge(stub.url, max_text_chars=1000)
        with pytest.raises(DataError, match="would read 10000004 characters"):
            await _score(scorer, "x" * 10_000_000)
        with pytest.raises(DataError, match="max_text_chars allows 1000"):
            await _score(scorer, "x", {"answer": "x" * 2000})
        assert not stub.requests


@pytest.mark.parametrize("response", ["\0", "\ud800", "{" * 1000, "🦈" * 100, "\u202e"])
async def test_strange_texts_arrive_as_they_are(response: str) -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        return json_answer(_said("Score: 8"))

    async with http_stub(answering) as stub:
        assert await _score(_judge(stub.url), response) == 8.0
        assert response in stub.requests[0].body["messages"][1]["content"]


@pytest.mark.parametrize(
    ("statuses", "status", "num_requests"),
    [
        ((500, 500, 200), ScoreStatus.SCORED, 3),
        ((500,), ScoreStatus.ERROR, 5),
        ((503, 429, 200), ScoreStatus.SCORED, 3),
        ((422,), ScoreStatus.ERROR, 1),
    ],
)
async def test_a_failing_judge_gives_the_right_score_or_an_error(statuses: Sequence[int], status: ScoreStatus, num_requests: int) -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        code = statuses[min(request.number, len(statuses)) - 1]
        return json_answer(_said("Score: 6") if code == 200 else {"error": "out of order"}, code)

    async with http_stub(answering) as stub:
        result = await _result(_judge(stub.url, max_tries=5))
        assert len(stub.requests) == num_requests
    assert (result.status, result.value) == (status, 6.0 if status is ScoreStatus.SCORED else 0.0)
    assert (result.message == "") is (status is ScoreStatus.SCORED)


async def test_one_bad_answer_leaves_the_other_samples_their_scores() -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        bad = "bad" in json.dumps(request.body)
        return json_answer({"detail": "no"}, 422) if bad else json_answer(_said("Score: 5"))

    async with http_stub(answering) as stub:
        scorer = _judge(stub.url)
        scores = await asyncio.gather(*(_score(scorer, text) for text in ("a", "bad", "c")), return_exceptions=True)
    assert [scores[0], scores[2]] == [5.0, 5.0]
    assert isinstance(scores[1], InvalidRequestError)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rubric": "Grade it."}, r"has no \{response\}"),
        ({"answer": "json"}, "fields goes with answer: json"),
        ({"fields": {"facts": {}}}, "fields goes with answer: json"),
        ({"answer": "json", "fields": {"a b": {}}}, "use letters"),
        ({"score": {"low": 3, "high": 3}}, "is not below high"),
        ({"extra": {"messages": []}}, "extra sets messages"),
        ({"api_key": "sk-1"}, "api_key is not a known key"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _judge("http://127.0.0.1:1", **settings)


async def _result(scorer: Scorer) -> ScoreResult:
    sample = ScoreSample(sample_id="s", prompt="2+2?", response="4", row=ROW, finish_reason=FinishReason.STOP, num_response_tokens=1)
    try:
        return outcome(sample, await _score(scorer), 0.0)
    except ShoalError as error:
        return raised(sample, error, 0.0)
