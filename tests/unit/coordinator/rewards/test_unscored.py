"""What a human is told about samples without a score."""

from __future__ import annotations

from shoal_coordinator.dispatcher import GeneratedGroup
from shoal_coordinator.rewards.route import RouteComponent
from shoal_coordinator.rewards.scored import ComponentResult, ScoredGroup
from shoal_coordinator.rewards.unscored import is_whole, num_unscored, unscored_alert

from shoal.types import ScoreResult, ScoreStatus
from tests.helpers.coordinator_fakes import make_completion, make_request, make_task
from tests.helpers.routes import component

S, E = ScoreStatus.SCORED, ScoreStatus.ERROR


def scored(statuses: dict[str, list[ScoreStatus]], service: str = "reward-0", *, optional: tuple[str, ...] = ()) -> ScoredGroup:
    """A group whose scorers gave these statuses, sample by sample."""
    num = len(next(iter(statuses.values())))
    group = GeneratedGroup(
        task=make_task(),
        attempt=0,
        server_id="a",
        sampling=make_request().sampling,
        completions=tuple(make_completion(index, [1]) for index in range(num)),
    )

    def own(name: str, index: int) -> ComponentResult:
        route: RouteComponent = component(name, is_required=name not in optional)
        result = ScoreResult(sample_id=str(index), status=statuses[name][index], message=f"{name} broke")
        return ComponentResult(component=route, service=service, result=result)

    components = tuple(tuple(own(name, index) for name in statuses) for index in range(num))
    results = tuple(
        ScoreResult(
            sample_id=str(index),
            status=E if any(each.result.status is E and each.component.is_required for each in components[index]) else S,
            message=f"sample {index}",
        )
        for index in range(num)
    )
    return ScoredGroup(group=group, revision=1, results=results, components=components)


def test_group_is_whole_only_if_every_sample_has_a_score() -> None:
    assert is_whole(scored({"sum": [S, S]}))
    assert not is_whole(scored({"sum": [S, E]}))
    assert num_unscored([scored({"sum": [S, E]}), scored({"sum": [E, E]}), scored({"sum": [S]})]) == 3


def test_alert_names_every_scorer_and_server_at_fault_and_the_first_error() -> None:
    groups = [scored({"sum": [S, S], "judge": [S, S]}), scored({"sum": [S, S], "judge": [S, E]}), scored({"judge": [E]}, "reward-1")]
    alert = unscored_alert(groups, "what")
    assert (alert.what, alert.service, alert.error) == ("what", "judge@3 on reward-0, reward-1", "sample 1")


def test_alert_names_a_scorer_that_no_server_offers() -> None:
    assert unscored_alert([scored({"sum": [E]}, "")], "what").service == "sum@3 on no server"


def test_alert_blames_no_optional_scorer() -> None:
    alert = unscored_alert([scored({"sum": [E], "judge": [E]}, optional=("judge",))], "what")
    assert alert.service == "sum@3 on reward-0"
