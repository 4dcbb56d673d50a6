"""Steps that pause because their samples have no score, and go on; with fakes.

Invariants: a group is scored by one revision as a whole, queued once, and never scored again once it is queued.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from shoal_coordinator.alerts import StoppedWhilePausedError
from shoal_coordinator.collected import MAX_COMPONENTS, component_metric
from shoal_coordinator.evaluation import greedy_request

from shoal.config.models import RolloutSection
from shoal.errors import InternalError
from shoal.types import ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_collecting import CollectorSetup
from tests.helpers.coordinator_fakes import FakeReward, scored_one
from tests.helpers.routes import FakeAttention, FakeRoutes, component, revision


def failing_for(*group_ids: str) -> FakeReward:
    """Fails every sample of these groups, until `repair`."""

    def score_one(sample: ScoreSample) -> ScoreResult:
        if sample.sample_id.split("/")[0].removesuffix("-greedy") in group_ids:
            return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.ERROR, message="broken")
        return scored_one(sample)

    return FakeReward(score_one)


def repairing(reward: FakeReward, then: Callable[[], None] = lambda: None) -> FakeAttention:
    def repair() -> None:
        reward.score_one = scored_one
        then()

    return FakeAttention([repair])


def times_asked(reward: FakeReward) -> Counter[str]:
    """How often each group was sent to a scorer."""
    return Counter(uid for call in reward.calls for uid in {sample.sample_id.split("/")[0] for sample in call})


async def test_affected_groups_are_scored_again_as_wholes_and_counted_once() -> None:
    reward = failing_for("g0", "g2")
    setup = CollectorSetup(reward=reward, attention=repairing(reward), max_unscored_share=0.4)
    collected = await setup.collect(num_groups=4)
    assert {name: [record.sample_index for record in group] for name, group in setup.queued.items()} == {
        f"g{number}": [0, 1] for number in range(4)
    }
    assert len(setup.queue.groups) == 4
    assert times_asked(reward) == {"g0": 2, "g1": 1, "g2": 2, "g3": 1}
    metrics = collected.metrics()
    assert (metrics["num_samples"], metrics["num_scorer_errors"], metrics["rescored_groups"]) == (8.0, 0.0, 2.0)
    assert len(setup.attention.alerts) == 1


async def test_groups_are_scored_again_by_the_revision_that_is_active_then() -> None:
    reward = failing_for("g0", "g1")
    routes = FakeRoutes(revision(component("sum")))

    def activate() -> None:
        routes.active = revision(component("exact"), number=2)

    setup = CollectorSetup(reward=reward, routes=routes, attention=repairing(reward, activate), max_unscored_share=0.4)
    collected = await setup.collect(num_groups=4)
    revisions = {name: {record.route_revision for record in group} for name, group in setup.queued.items()}
    assert {name: len(own) for name, own in revisions.items()} == {f"g{number}": 1 for number in range(4)}
    assert (revisions["g0"], revisions["g1"]) == ({2}, {2})
    scorers = {record.route_revision: record.reward_components[0].scorer for group in setup.queue.groups for record in group}
    assert scorers[2] == "exact"
    assert collected.metrics()["reward_revision"] == 2.0


async def test_what_was_not_scored_yet_is_scored_by_the_revision_that_is_active_after_the_pause() -> None:
    reward = failing_for("g0")
    routes = FakeRoutes(revision(component("sum")))
    setup = CollectorSetup(reward=reward, routes=routes, max_unscored_share=0.0)
    setup.rollout.gates["g1"] = asyncio.Event()

    def activate() -> None:
        routes.active = revision(component("exact"), number=2)
        setup.rollout.gates["g1"].set()

    setup.attention = repairing(reward, activate)
    collected = await setup.collect(num_groups=2)
    assert {record.route_revision for group in setup.queue.groups for record in group} == {2}
    assert "reward_revision_min" not in collected.metrics()


async def test_group_keeps_the_revision_that_was_active_when_it_was_issued() -> None:
    routes = FakeRoutes(revision(component("sum")))
    setup = CollectorSetup(routes=routes)
    setup.rollout.gate = asyncio.Event()
    collecting = asyncio.create_task(setup.collect())
    await setup.rollout.entered.wait()
    routes.active = revision(component("exact"), number=2)
    setup.rollout.gate.set()
    await collecting
    assert {record.route_revision for group in setup.queue.groups for record in group} == {1}
    assert routes.open_pins == {1: 0}


async def test_queued_group_is_never_scored_again_however_often_the_step_pauses() -> None:
    reward = failing_for("g0", "g1", "g2")
    attention = FakeAttention([lambda: None, lambda: None, repairing(reward).repairs[0]])
    setup = CollectorSetup(reward=reward, attention=attention, max_unscored_share=0.4)
    await setup.collect(num_groups=4)
    assert times_asked(reward) == {"g0": 4, "g1": 4, "g2": 4, "g3": 1}
    assert sorted(setup.queued) == ["g0", "g1", "g2", "g3"]
    assert [len(setup.queue.groups), len(setup.attention.alerts)] == [4, 3]


class FailsLate(FakeReward):
    """Fails g0 once the call of g1 is under way, and that only after the repair; then works."""

    def __init__(self, g0_is_asked: asyncio.Event) -> None:
        super().__init__()
        self.g0_is_asked = g0_is_asked
        self.g1_is_asked = asyncio.Event()
        self.is_repaired = asyncio.Event()

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """See the class."""
        if self.is_repaired.is_set():
            return await super().score(scorer, version, samples, timeout_s=timeout_s)
        if samples[0].sample_id.startswith("g0"):
            self.g0_is_asked.set()
            await self.g1_is_asked.wait()
        else:
            self.g1_is_asked.set()
            await self.is_repaired.wait()
        raise InternalError("broken")


async def test_failure_of_a_call_that_was_under_way_at_the_pause_is_no_reason_to_pause_again() -> None:
    g0_is_asked = asyncio.Event()
    reward = FailsLate(g0_is_asked)
    routes = FakeRoutes(revision(component("sum", timeout_s=0.001)))
    setup = CollectorSetup(reward=reward, routes=routes, attention=FakeAttention([reward.is_repaired.set]), max_unscored_share=0.4)
    setup.rollout.gates["g1"] = g0_is_asked
    collected = await asyncio.wait_for(setup.collect(num_groups=2), 10)
    assert (sorted(setup.queued), collected.num_unscored) == (["g0", "g1"], 0)
    assert len(setup.attention.alerts) == 1


async def test_greedy_answer_is_scored_by_the_revision_of_its_group_and_again_with_it() -> None:
    reward = failing_for("g0")
    routes = FakeRoutes(revision(component("sum")))

    def activate() -> None:
        routes.active = revision(component("exact"), number=2)

    greedy = greedy_request(RolloutSection(max_new_tokens=4), (2,), 0)
    setup = CollectorSetup(reward=reward, routes=routes, attention=repairing(reward, activate), max_unscored_share=0.4, greedy=greedy)
    await setup.collect(num_groups=2)
    by_scorer = {
        name: {
            sample.sample_id.split("/")[0]
            for (asked, _), call in zip(reward.asked, reward.calls, strict=True)
            if asked == name
            for sample in call
        }
        for name in ("sum", "exact")
    }
    assert {"g0", "g0-greedy"} <= by_scorer["exact"]
    assert times_asked(reward)["g0"] == times_asked(reward)["g0-greedy"] == 2
    assert {record.baseline_reward for record in setup.queued["g0"]} == {1.0}


async def test_stop_in_the_pause_releases_all_and_leaves_what_was_queued() -> None:
    setup = CollectorSetup(reward=failing_for("g0", "g1"), max_unscored_share=0.4)
    with pytest.raises(StoppedWhilePausedError, match="have no score"):
        await setup.collect(num_groups=4)
    assert {"g0", "g1"}.isdisjoint(setup.queued)


async def test_cancellation_in_the_pause_releases_all() -> None:
    paused = asyncio.Event()

    class Waiting(FakeAttention):
        async def wait_for_resume(self, alert: object) -> None:
            paused.set()
            await asyncio.Event().wait()

    setup = CollectorSetup(reward=failing_for("g0", "g1"), attention=Waiting(), max_unscored_share=0.4)
    collecting = asyncio.create_task(setup.collect())
    await paused.wait()
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    assert setup.routes is not None
    assert setup.routes.num_open == 0


async def test_failing_stage_releases_all() -> None:
    routes = FakeRoutes()
    setup = CollectorSetup(routes=routes)
    setup.rollout.fail_after = (1, InternalError("engine"))
    with pytest.raises(InternalError):
        await setup.collect()
    assert [pin.num_releases for pin in routes.pins] == [1, 1]


async def test_onlookers_see_every_group_once_after_it_was_settled() -> None:
    reward = failing_for("g0", "g1", "g2")
    setup = CollectorSetup(reward=reward, attention=repairing(reward), max_unscored_share=0.4)
    await setup.collect(num_groups=4)
    assert sorted(scored.group.task.uid for scored in setup.offered) == ["g0", "g1", "g2", "g3"]
    assert all(len(scored.samples) == 2 for scored in setup.offered)
    assert sorted(sample.sample_id for sample in setup.probes) == [f"g{number}/{index}/0" for number in range(4) for index in range(2)]


async def test_metrics_tell_declined_samples_from_failed_ones() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        status = {"g0/0/0": ScoreStatus.NOT_SCORED, "g1/0/0": ScoreStatus.ERROR}.get(sample.sample_id, ScoreStatus.SCORED)
        return ScoreResult(sample_id=sample.sample_id, status=status, value=0.5)

    metrics = (await CollectorSetup(reward=FakeReward(score_one)).collect(num_groups=3)).metrics()
    assert (metrics["num_not_scored"], metrics["num_scorer_errors"], metrics["unscored_share"]) == (1.0, 1.0, 2 / 6)


async def test_metrics_name_revisions_and_means_of_components() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        index = float(sample.sample_id.split("/")[1])
        parts = {} if reward.asked[-1][0] == "judge" else {"correct": index, "well-formed": 1.0}
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=4.0, components=parts)

    reward = FakeReward(score_one)
    routes = FakeRoutes(revision(component("sum", parts={"correct": 1.0}), component("judge", weight=0.5), number=7))
    metrics = (await CollectorSetup(reward=reward, routes=routes).collect()).metrics()
    means = {name: metrics[name] for name in ("reward_sum_correct", "reward_sum_well_formed", "reward_judge", "reward")}
    assert means == {"reward_sum_correct": 0.5, "reward_sum_well_formed": 1.0, "reward_judge": 4.0, "reward": 2.5}
    assert metrics["reward_revision"] == 7.0
    assert "reward_revision_min" not in metrics


async def test_records_name_every_component_with_its_service_version_and_status() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        is_judge = reward.asked[-1][0] == "judge"
        status = ScoreStatus.ERROR if is_judge and sample.sample_id == "g0/1/0" else ScoreStatus.SCORED
        return ScoreResult(sample_id=sample.sample_id, status=status, value=2.0, latency_ms=3.0)

    reward = FakeReward(score_one)
    routes = FakeRoutes(revision(component("sum"), component("judge", is_required=False), number=4))
    setup = CollectorSetup(reward=reward, routes=routes)
    await setup.collect(num_groups=1)
    first, second = setup.queued["g0"]
    assert (first.reward, second.reward, first.route_revision) == (2.0, 2.0, 4), "the judge lacks one, and is left out of both"
    named = [(part.scorer, part.name, part.service, part.service_version, part.value, part.status) for part in second.reward_components]
    assert named == [("sum", "sum", "r", "3", 2.0, ScoreStatus.SCORED), ("judge", "judge", "r", "3", 0.0, ScoreStatus.ERROR)]
    assert {part.latency_ms for part in first.reward_components} == {3.0}


async def test_metrics_name_both_revisions_of_a_step_that_was_issued_under_two() -> None:
    routes = FakeRoutes(revision(component("sum"), number=3))

    def score_one(sample: ScoreSample) -> ScoreResult:
        uid, index, _ = sample.sample_id.split("/")
        # g0 has no spread and is replaced; whoever swaps now swaps between the rounds.
        routes.active = revision(component("exact"), number=4)
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=0.0 if uid == "g0" else float(index))

    setup = CollectorSetup(reward=FakeReward(score_one), routes=routes, max_refills=1)
    metrics = (await setup.collect(num_groups=2)).metrics()
    assert {name: {record.route_revision for record in own} for name, own in setup.queued.items()} == {"g1": {3}, "g2": {4}}
    assert (metrics["reward_revision"], metrics["reward_revision_min"]) == (4.0, 3.0)


async def test_parts_that_a_scorer_names_differently_each_time_do_not_fill_the_metrics() -> None:
    def score_one(sample: ScoreSample) -> ScoreResult:
        parts = {f"{sample.sample_id}-{number}": 1.0 for number in range(40)}
        return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=40.0, components=parts)

    metrics = (await CollectorSetup(reward=FakeReward(score_one)).collect()).metrics()
    assert len([name for name in metrics if name.startswith("reward_sum_")]) == MAX_COMPONENTS


@pytest.mark.parametrize(
    ("scorer", "name"), [("std", "reward_std_score"), ("my-scorer.v2", "reward_my_scorer_v2"), ("judge", "reward_judge")]
)
def test_mean_of_a_scorer_hides_no_other_metric(scorer: str, name: str) -> None:
    assert component_metric(scorer, scorer) == name
