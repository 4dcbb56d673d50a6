"""Reports that others have filed elsewhere, sent to `python -m shoal_reward` as it runs: texts and right values as they were reported."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import yaml
from shoal_coordinator.dispatcher import GeneratedGroup
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.rewards.route import RouteRevision, components_of_config
from shoal_coordinator.rewards.scored import ScoredGroup
from shoal_coordinator.rewards.scoring import GroupScorer
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import StageClock
from shoal_coordinator.waiting import WaitBoard

from shoal.clients.reward import RewardClient
from shoal.config.models import RewardSection, SecuritySection
from shoal.types import ScoreResult, ScoreStatus
from tests.helpers.coordinator_fakes import FakeTokenizer, make_completion, make_request, make_task
from tests.helpers.http_stub import Answering, StubAnswer, StubRequest, http_stub, json_answer
from tests.helpers.plain_http import PLAIN_HTTP
from tests.helpers.reward_servers import connected
from tests.helpers.scoring import make_sample
from tests.helpers.valkey import free_port

SECURITY = SecuritySection()
TIMEOUT_S = 60.0
SCORED, NOT_SCORED, ERROR = ScoreStatus.SCORED, ScoreStatus.NOT_SCORED, ScoreStatus.ERROR
CLIENT_LIMIT = 64
SCORERS = r"""
import asyncio
import threading

from shoal.reward import Isolation, reward
from shoal_reward.verifiers import math

equal = math.KIND.build(math.KIND.settings()).function


@reward(name="in_main_thread", version="1")
def in_main_thread(prompt, response, row):
    assert threading.current_thread() is threading.main_thread()
    return equal(prompt, response, row)


@reward(name="in_worker_thread", version="1", isolation=Isolation.THREAD)
def in_worker_thread(prompt, response, row):
    assert threading.current_thread() is not threading.main_thread()
    return equal(prompt, response, row)


@reward(name="in_executor", version="1")
async def in_executor(prompt, response, row):
    return await asyncio.get_running_loop().run_in_executor(None, equal, prompt, response, row)


@reward(name="raises", version="1")
def raises(prompt, response, row):
    raise ValueError("signal only works in main thread of the main interpreter")


@reward(name="per_token", version="1")
def per_token(prompt, response, row):
    return [0.5, -0.25, 1.0]
"""


@dataclass(frozen=True, slots=True)
class Served:
    """The process, the judge's port and where its metrics are."""

    address: str
    judge_port: int
    metrics_port: int


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all cases, with every scorer that has a name, the math verifier under its other rule, and a judge."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "scorers.py").write_text(SCORERS)
    judge_port, metrics_port = free_port(), free_port()
    judge = {"url": f"http://127.0.0.1:{judge_port}/v1", "model": "judge", "rubric": "Grade {response}.", "max_open": CLIENT_LIMIT}
    settings = {
        "modules": ["shoal_reward.builtin", str(folder / "scorers.py")],
        "scorers": {
            "hundredth": {"kind": "math", "settings": {"percent": "hundredth"}},
            "forgiving": {"kind": "exact"},
            "judge": {"kind": "judge", "settings": {**judge, "backoff_s": 0.05, "max_backoff_s": 0.1, "deadline_s": 20, "max_tries": 100}},
            "short_judge": {"kind": "judge", "settings": {**judge, "backoff_s": 0.05, "max_backoff_s": 0.1, "deadline_s": 0.5}},
        },
        "workers": 1,
    }
    (folder / "service.yaml").write_text(yaml.safe_dump(settings))
    ready = folder / "ready.json"
    argv = ["--serve", str(folder / "service.yaml"), "--ready-file", str(ready), "--metrics-port", str(metrics_port)]
    process = subprocess.Popen([sys.executable, "-m", "shoal_reward", *argv], env={**os.environ, "SHOAL_SUPERVISED": "1"})
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        yield Served(json.loads(ready.read_text())["address"], judge_port, metrics_port)
    finally:
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0


@pytest.fixture
async def client(served: Served) -> AsyncIterator[RewardClient]:
    async with RewardClient(served.address, SECURITY) as client:
        yield client


async def score(client: RewardClient, scorer: str, *cases: tuple[object, str], **settings: Any) -> list[ScoreResult]:  # noqa: ANN401
    """Score (right answer, response) pairs in one call."""
    samples = [make_sample(index, response=response, answer=gold, **settings) for index, (gold, response) in enumerate(cases)]
    _, results = await client.score(scorer, "", samples, timeout_s=TIMEOUT_S)
    return results


def values(results: Sequence[ScoreResult]) -> list[float]:
    assert [result.status for result in results] == [SCORED] * len(results), [result.message for result in results]
    return [result.value for result in results]


async def test_r38_boxes_are_read_to_their_own_brace_and_in_every_form(client: RewardClient) -> None:
    halves = ("1/2", r"\boxed{\frac{1}{2}}"), ("1/2", r"\boxed{\frac{1}{3}}")
    forms = ("42", r"\fbox{42}"), ("42", r"\boxed{42"), ("42", r"\boxed{}"), ("42", "")
    assert values(await score(client, "math", *halves, *forms, ("E", r"\boxed{\text{E}}"))) == [1, 0, 1, 0, 0, 0, 1]


async def test_r40_a_wrapper_is_taken_off_once_under_every_name(client: RewardClient) -> None:
    """Every registered name that compares with a right answer; the others judge something else, or need a row of their own."""
    others = {"code", "format", "length", "reasoning_gym", "raises", "per_token", "judge", "short_judge"}
    names = {scorer.name for scorer in await client.describe(timeout_s=TIMEOUT_S)} - others
    assert {"arithmetic", "exact", "math", "choice", "regex", "json_schema", "hundredth", "forgiving"} <= names
    row = {"options": {"A": "4", "B": "5"}, "pattern": r"\A5\Z", "json_schema": {"const": 5}}
    for name in sorted(names):
        found = await score(client, name, ("B" if name == "choice" else "5", "5"), ("5", r"\boxed{5}"), **row)
        assert (name, values(found)) == (name, [1, 1])


@pytest.mark.parametrize("scorer", ["math", "in_main_thread", "in_worker_thread", "in_executor"])
async def test_r41_a_third_is_right_in_every_thread(client: RewardClient, scorer: str) -> None:
    assert values(await score(client, scorer, *[("1/3", r"\boxed{\frac{1}{3}}")] * 4)) == [1, 1, 1, 1]


async def test_r41_what_a_scorer_raises_is_counted_and_is_no_score(client: RewardClient, served: Served) -> None:
    results = await score(client, "raises", ("1/3", r"\boxed{\frac{1}{3}}"), ("1/3", "0"))
    assert [result.status for result in results] == [ERROR, ERROR]
    assert all("ValueError: signal only works in main thread" in result.message for result in results)
    async with httpx.AsyncClient(verify=PLAIN_HTTP) as http:
        metrics = (await http.get(f"http://127.0.0.1:{served.metrics_port}/metrics", timeout=TIMEOUT_S)).text
    assert 'shoal_reward_scored_samples_total{scorer="raises",status="error",version="1"} 2.0' in metrics.splitlines()


async def test_r44_tiny_numbers_differ(client: RewardClient) -> None:
    cases = ("1/2004!", "1/2006!"), ("1/2006!", r"\boxed{1/2004!}"), ("1/2^99", "1/2^98"), ("1/2^{99}", r"\boxed{1/2^{98}}")
    assert values(await score(client, "math", *cases)) == [0, 0, 0, 0]


async def test_r44_a_right_answer_that_is_none_pays_nobody(client: RewardClient) -> None:
    """That such rows are reported when they are loaded is tested with `shoal_coordinator.rewards.row_check`."""
    results = await score(client, "math", ("", ""), ("", "5"), ("  ", "5"), (r"\frac{1", r"\frac{1"), (r"\frac{1", "5"))
    assert [result.status for result in results] == [NOT_SCORED] * 5
    assert not any(result.value for result in results)


@pytest.mark.parametrize("scorer", ["math", "exact", "forgiving", "arithmetic"])
async def test_r44_an_empty_answer_is_part_of_no_word(client: RewardClient, scorer: str) -> None:
    assert values(await score(client, scorer, ("dog", ""), ("dog", r"\boxed{}"), ("dog", "do"), ("dog", "dog"))) == [0, 0, 0, 1]


async def test_r44_the_percent_rule_holds_on_both_sides(client: RewardClient) -> None:
    """Written down in docs/verifiers.md: the sign is dropped, or it is a hundredth."""
    cases = ("50", r"\boxed{50\%}"), (r"50\%", r"\boxed{50}"), (r"50\%", r"\boxed{0.5}"), ("0.5", r"\boxed{50\%}"), (r"50\%", r"50\%")
    assert values(await score(client, "math", *cases)) == [1, 1, 0, 0, 1]
    assert values(await score(client, "hundredth", *cases)) == [0, 0, 1, 1, 1]


def grade(number: int = 8) -> StubAnswer:
    choice = {"index": 0, "message": {"role": "assistant", "content": f"Score: {number}"}, "finish_reason": "stop"}
    return json_answer({"choices": [choice]})


def in_turn(*answers: StubAnswer) -> Answering:
    """Each once, the last one for ever."""

    async def answering(request: StubRequest) -> StubAnswer:
        return answers[min(request.number, len(answers)) - 1]

    return answering


async def judged(client: RewardClient, served: Served, scorer: str, answering: Answering) -> tuple[ScoreResult, int]:
    """One sample; its result and how often the judge was asked."""
    async with http_stub(answering, served.judge_port) as stub:
        (result,) = await score(client, scorer, ("4", "4"))
        return result, len(stub.requests)


async def test_r46_a_score_after_two_failures_is_the_right_one(client: RewardClient, served: Served) -> None:
    result, num_requests = await judged(client, served, "judge", in_turn(StubAnswer(500), StubAnswer(500), grade()))
    assert (result.status, result.value, num_requests) == (SCORED, 8.0, 3)


async def test_r46_a_judge_that_always_fails_leaves_the_sample_without_a_score(client: RewardClient, served: Served) -> None:
    """That the run pauses above a share of these is tested in tests/integration/coordinator/test_coordinator_process.py."""
    result, num_requests = await judged(client, served, "short_judge", in_turn(StubAnswer(500, b"broken")))
    assert (result.status, result.value) == (ERROR, 0.0)
    assert num_requests > 1
    assert "answered 500" in result.message


async def test_r46_a_refusal_is_not_tried_again(client: RewardClient, served: Served) -> None:
    result, num_requests = await judged(client, served, "judge", in_turn(StubAnswer(422, b"no such model"), grade()))
    assert (result.status, num_requests) == (ERROR, 1)
    assert "answered 422, which is not tried again" in result.message


@pytest.mark.parametrize("answer", [json_answer({}), json_answer({"choices": []}), json_answer({"score": None}), StubAnswer(200)])
async def test_r46_an_answer_without_a_score_is_an_error(client: RewardClient, served: Served, answer: StubAnswer) -> None:
    result, num_requests = await judged(client, served, "judge", in_turn(answer, grade()))
    assert (result.status, result.value, num_requests) == (ERROR, 0.0, 1)
    assert "answered 200" in result.message


async def test_r46_a_judge_that_refuses_connections_for_5_s_is_waited_for(client: RewardClient, served: Served) -> None:
    waiting = asyncio.create_task(score(client, "judge", ("4", "4")))
    await asyncio.sleep(5.0)
    assert not waiting.done()
    async with http_stub(in_turn(grade()), served.judge_port):
        assert values(await waiting) == [8.0]


async def test_r46_2000_requests_at_once_keep_to_the_limit_of_64(client: RewardClient, served: Served) -> None:
    async def answering(request: StubRequest) -> StubAnswer:
        await asyncio.sleep(0.005)
        return grade(request.number % 10)

    async with http_stub(answering, served.judge_port) as stub:
        found = await score(client, "judge", *[("4", str(number)) for number in range(2000)])
        assert (len(values(found)), len(stub.requests)) == (2000, 2000)
        assert 1 < stub.max_open <= CLIENT_LIMIT


async def test_r71_token_rewards_are_used_as_given_and_a_short_list_is_refused_alone(client: RewardClient) -> None:
    samples = [make_sample(index, response="a b c", num_response_tokens=number) for index, number in enumerate((3, 4))]
    _, (given, short) = await client.score("per_token", "", samples, timeout_s=TIMEOUT_S)
    assert (given.status, given.value, given.token_values) == (SCORED, 1.25, (0.5, -0.25, 1.0))
    assert (short.status, short.value, short.token_values) == (ERROR, 0.0, ())
    assert "3 token rewards for 4 response tokens" in short.message


async def test_r72_each_source_reaches_its_own_scorer(served: Served) -> None:
    """That a row of an unknown source is refused when it is loaded is tested in tests/unit/coordinator/test_prompt_rows.py."""
    async with connected(served.address) as server:
        pool: ServerPool[RewardEndpoint] = ServerPool("reward server", WaitBoard())
        pool.add("reward", server)
        route = _route(RewardSection(sources={"sums": "math", "words": "arithmetic"}), server)
        scorer = GroupScorer(ScorerCalls(pool, max_open_requests=8), FakeTokenizer(), StageClock())
        groups = [_group(source, "7 1") for source in ("sums", "words", "poems")]
        sums, words, poems = await scorer.score([(group, route) for group in groups])
    assert ([_scorers(group) for group in (sums, words, poems)]) == [{"math"}, {"arithmetic"}, set()]
    assert [result.value for result in (*sums.results, *words.results)] == [1.0, 0.0, 1.0, 0.0]
    assert {result.status for result in poems.results} == {NOT_SCORED}


def _route(section: RewardSection, server: RewardEndpoint) -> RouteRevision:
    """What a configuration asks for, pinned to what the server offers."""
    offered = {scorer.name: scorer for scorer in server.scorers}
    components = [
        replace(each, version=offered[each.scorer].version, fingerprint=offered[each.scorer].fingerprint)
        for each in components_of_config(section)
    ]
    return RouteRevision(number=1, label="handed", components=tuple(components))


def _group(source: str, answer: str) -> GeneratedGroup:
    """Two siblings; the fake tokenizer writes a response as its ids with blanks between."""
    completions = (make_completion(0, [7, 1]), make_completion(1, [7, 2]))
    task = make_task(source, row={"data_source": source, "answer": answer})
    return GeneratedGroup(task=task, attempt=1, server_id="a", sampling=make_request().sampling, completions=completions)


def _scorers(group: ScoredGroup) -> set[str]:
    return {each.component.scorer for own in group.components for each in own}
