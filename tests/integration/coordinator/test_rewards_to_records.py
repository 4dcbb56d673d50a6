"""From engine answers through a real reward server to stored records: routes, per-token rewards, cut answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest
from shoal_coordinator.dispatcher import Dispatcher
from shoal_coordinator.records import assemble_records
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.rewards.route import RouteComponent, RouteRevision
from shoal_coordinator.rewards.scored import ScoredGroup
from shoal_coordinator.rewards.scoring import GroupScorer
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.stage_clock import StageClock
from shoal_coordinator.waiting import WaitBoard

from shoal.codec.experience import record_from_bytes, record_to_bytes
from shoal.config.models import RewardSection, RolloutSection
from shoal.reward import Isolation, Row, ScorerRegistry, reward
from shoal.types import Completion, ExperienceRecord, FinishReason, ScoreStatus
from tests.helpers.coordinator_fakes import FakeRollout, FakeTokenizer, make_completion, make_request, make_task, rollout_pool
from tests.helpers.reward_servers import serving_scorers
from tests.helpers.routes import revision_of

REGISTRY = ScorerRegistry()
# The fake tokenizer writes a response as its ids with blanks between.
ANSWERS = {"sums": [[7, 2], [7, 8, 9]], "steps": [[4, 5, 6], [4, 1]]}


@reward(name="first_is_seven", version="1", registry=REGISTRY, isolation=Isolation.THREAD)
def first_is_seven(prompt: str, response: str, row: Row) -> dict[str, float]:
    """Two parts."""
    return {"correct": float(response.startswith("7")), "bonus": 0.25}


@reward(name="per_token", version="2", registry=REGISTRY, isolation=Isolation.THREAD)
def per_token(prompt: str, response: str, row: Row) -> list[float]:
    """One reward per id; one too few where the response ends with 1."""
    rewards = [0.5, -0.25, 1.0][: len(response.split())]
    return rewards[:-1] if response.endswith(" 1") else rewards


@pytest.fixture
async def pool() -> AsyncIterator[ServerPool[RewardEndpoint]]:
    pool: ServerPool[RewardEndpoint] = ServerPool("reward server", WaitBoard())
    async with serving_scorers(REGISTRY) as server:
        pool.add("reward", server)
        yield pool


def route(pool: ServerPool[RewardEndpoint], section: RewardSection) -> RouteRevision:
    """What a configuration asks for, pinned to what the server offers."""
    (server,) = pool.servers()
    offered = {scorer.name: scorer for scorer in server.client.scorers}

    def pinned(component: RouteComponent) -> RouteComponent:
        scorer = offered.get(component.scorer)
        return component if scorer is None else replace(component, version=scorer.version, fingerprint=scorer.fingerprint)

    revision = revision_of(section)
    return replace(revision, components=tuple(map(pinned, revision.components)))


async def collect(pool: ServerPool[RewardEndpoint], config: RewardSection) -> tuple[list[ScoredGroup], dict[str, ExperienceRecord]]:
    """Generate both groups, score them by one revision, store their records and read them back."""

    def script(request_id: str, completions: list[Completion]) -> list[Completion]:
        whole, cut = ANSWERS[request_id.split("/")[1]]
        return [make_completion(0, whole), make_completion(1, cut, finish_reason=FinishReason.LENGTH)]

    clock = StageClock()
    engine = rollout_pool(a=FakeRollout(script=script))
    dispatcher = Dispatcher(engine, RolloutSection(retries=0), run_id="run", vocab_size=100, clock=clock, wait_for_server_s=1.0)
    scorer = GroupScorer(ScorerCalls(pool, max_open_requests=8), FakeTokenizer(), clock)
    revision = route(pool, config)
    tasks = [replace(make_task(source), row={"data_source": source}) for source in ANSWERS]
    groups = []
    async with aclosing(dispatcher.generate(tasks, make_request())) as finished:
        async for some in finished:
            groups += some
    scored = sorted(await scorer.score([(group, revision) for group in groups]), key=lambda group: group.group.task.uid)
    records = [record for group in scored for record in assemble_records(group, "run", "hash", 0)]
    stored = [record_from_bytes(record_to_bytes(record)) for record in records]
    return scored, {f"{record.uid}/{record.sample_index}": record for record in stored}


BOTH = {"sums": "first_is_seven", "steps": "per_token"}


async def test_each_source_reaches_its_scorer_and_the_records_say_which(pool: ServerPool[RewardEndpoint]) -> None:
    """R72."""
    _, records = await collect(pool, RewardSection(sources=BOTH))
    named = {uid: {(part.scorer, part.service_version) for part in record.reward_components} for uid, record in records.items()}
    assert (named["sums/0"], named["steps/0"]) == ({("first_is_seven", "1")}, {("per_token", "2")})
    assert {record.route_revision for record in records.values()} == {1}
    assert records["sums/0"].reward == 1.25
    assert sorted((part.name, part.value, part.service) for part in records["sums/0"].reward_components) == [
        ("bonus", 0.25, "reward"),
        ("correct", 1.0, "reward"),
    ]
    assert [part.name for part in records["steps/0"].reward_components] == ["per_token"]


async def test_token_rewards_are_used_as_given_and_a_short_list_loses_its_sample_alone(pool: ServerPool[RewardEndpoint]) -> None:
    """R71."""
    (steps, _), records = await collect(pool, RewardSection(sources=BOTH))
    assert [result.status for result in steps.results] == [ScoreStatus.SCORED, ScoreStatus.ERROR]
    assert "1 token rewards for 2 response tokens" in steps.results[1].message
    assert sorted(records) == ["steps/0", "sums/0", "sums/1"]
    given = records["steps/0"].token_rewards
    assert given is not None
    assert given.tolist() == [0.5, -0.25, 1.0]
    assert records["sums/0"].token_rewards is None


async def test_cut_answer_keeps_its_own_last_token(pool: ServerPool[RewardEndpoint]) -> None:
    _, records = await collect(pool, RewardSection(sources=BOTH))
    cut = records["sums/1"]
    assert (cut.response_ids.tolist(), cut.finish_reason) == ([7, 8, 9], FinishReason.LENGTH)
    assert cut.response_mask.tolist() == [True] * 3
    assert cut.rollout_logprobs.size == 3


async def test_record_has_the_weighted_total_and_the_raw_components(pool: ServerPool[RewardEndpoint]) -> None:
    config = RewardSection(scorer="first_is_seven", weights={"correct": 2.0, "bonus": -4.0})
    _, records = await collect(pool, config)
    assert [records[name].reward for name in ("sums/0", "steps/0")] == [1.0, -1.0]
    assert {part.name: part.value for part in records["sums/0"].reward_components} == {"correct": 1.0, "bonus": 0.25}


async def test_scorer_that_nobody_offers_leaves_its_rows_without_a_reward_and_the_others_with_theirs(
    pool: ServerPool[RewardEndpoint],
) -> None:
    config = RewardSection(sources={"sums": "first_is_seven", "steps": "poet"}, timeout_s=0.1)
    (steps, _), records = await collect(pool, config)
    assert {result.status for result in steps.results} == {ScoreStatus.ERROR}
    assert "no reward server offered poet@3" in steps.results[0].message
    assert sorted(records) == ["sums/0", "sums/1"]
