from __future__ import annotations

from typing import Any

import pytest
from shoal_reward.kinds import build_scorer

from shoal.config.reward_service import ScorerDefinition
from shoal.errors import CodecError, ConfigError, DataError, InvalidRequestError, UnavailableError
from shoal.reward import Isolation, Scorer
from tests.helpers.http_stub import HttpStub, StubAnswer, StubRequest, http_stub, json_answer

IDS: dict[str, object] = {"prompt_ids": [1, 3], "response_ids": [4, 5, 2]}


def _scorer(url: str, **settings: object) -> Scorer:
    fast = {"backoff_s": 0.001, "max_backoff_s": 0.002, "max_tries": 3, "model": "rm"}
    return build_scorer("rm", ScorerDefinition(kind="model_server", settings={**fast, "url": url, **settings}))


async def _scored(reply: StubAnswer, row: dict[str, object] | None = None, **settings: object) -> tuple[Any, HttpStub]:
    async def answering(request: StubRequest) -> StubAnswer:
        return reply

    async with http_stub(answering) as stub:
        returned: Any = _scorer(stub.url, **settings).function("p", "r", row or {})
        return await returned, stub


def _probs(*values: object) -> StubAnswer:
    return json_answer({"data": [{"index": 0, "label": "LABEL_0", "probs": list(values), "num_classes": len(values)}]})


async def test_the_raw_output_is_asked_for_and_scaled() -> None:
    score, stub = await _scored(_probs(-3.5), scale=2.0, shift=1.0)
    assert score == -6.0
    messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}]
    [request] = stub.requests
    assert (request.path, request.body) == ("/classify", {"model": "rm", "use_activation": False, "messages": messages})


async def test_text_is_joined_and_cut_on_the_left() -> None:
    score, stub = await _scored(_probs(0.25, 4.0), input="text", separator="|", max_tokens=64, label=1)
    assert score == 4.0
    body = {"model": "rm", "use_activation": False, "input": "p|r", "truncate_prompt_tokens": 64, "truncation_side": "left"}
    assert stub.requests[0].body == body


async def test_each_response_token_gets_the_output_behind_it() -> None:
    score, stub = await _scored(json_answer({"data": [{"index": 0, "data": [[1.0], [2.0], [3.0], [4.0], [5.0]]}]}), IDS, per_token=True)
    assert score == [3.0, 4.0, 5.0]
    [request] = stub.requests
    assert request.path == "/pooling"
    assert request.body == {
        "model": "rm",
        "use_activation": False,
        "task": "token_classify",
        "input": [1, 3, 4, 5, 2],
        "add_special_tokens": False,
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"data": []},
        {"data": [{}]},
        {"data": [{"probs": []}]},
        {"data": [{"probs": ["1"]}]},
        {"data": [{"probs": [None]}]},
        {"data": [{"probs": [0.1, 0.9]}]},
        {"data": [{"probs": [1.0]}, {"probs": [1.0]}]},
    ],
)
async def test_200_without_the_output_is_an_error(body: dict[str, object]) -> None:
    with pytest.raises(CodecError):
        await _scored(json_answer(body))


@pytest.mark.parametrize("outputs", [None, [], [[1.0]] * 4, [[1.0]] * 6, [1.0] * 5, [[1.0, 2.0]] * 5])
async def test_another_number_of_token_outputs_is_an_error(outputs: object) -> None:
    with pytest.raises(CodecError):
        await _scored(json_answer({"data": [{"data": outputs}]}), IDS, per_token=True)


@pytest.mark.parametrize("row", [{}, {"prompt_ids": [1], "response_ids": []}, {"prompt_ids": [1], "response_ids": [-1]}])
async def test_a_sample_without_ids_is_an_error(row: dict[str, object]) -> None:
    with pytest.raises(DataError):
        await _scored(_probs(1.0), row, per_token=True)


@pytest.mark.parametrize(("status", "error", "num_requests"), [(400, InvalidRequestError, 1), (503, UnavailableError, 3)])
async def test_failures_follow_the_rules_of_every_server(status: int, error: type[Exception], num_requests: int) -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        return json_answer({"error": {"message": "no"}}, status)

    async with http_stub(answering) as stub:
        with pytest.raises(error, match=f"answered {status}"):
            await _scorer(stub.url).function("p", "r", {})  # type: ignore[misc]
        assert len(stub.requests) == num_requests


def test_a_server_is_waited_for_in_the_event_loop_and_takes_no_pairs() -> None:
    scorer = _scorer("http://127.0.0.1:1", per_token=True)
    assert (scorer.isolation, scorer.is_async, scorer.needs_token_ids) == (Isolation.LOOP, True, True)
    with pytest.raises(ConfigError, match="takes no pairs"):
        _scorer("http://127.0.0.1:1", input="pair")
    with pytest.raises(ConfigError, match="give the place, from 0"):
        _scorer("http://127.0.0.1:1", label="help")
