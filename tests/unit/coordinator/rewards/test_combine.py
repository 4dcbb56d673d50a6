"""One reward of several components; by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from shoal_coordinator.rewards.combine import combine, with_parts
from shoal_coordinator.rewards.scored import ComponentResult

from shoal.types import ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.routes import component
from tests.helpers.scoring import make_sample

S, N, E = ScoreStatus.SCORED, ScoreStatus.NOT_SCORED, ScoreStatus.ERROR
SUM = component("sum", weight=2.0)
JUDGE = component("judge", weight=-1.0)
OPTIONAL = component("run", is_required=False)

Given = tuple[ScoreStatus, float] | tuple[float, ...] | float


def result(given: Given | ScoreStatus, index: int = 0) -> ScoreResult:
    """A number is a score, a tuple per-token rewards, a status no score."""
    empty = ScoreResult(sample_id=f"uid/{index}/0", status=S)
    if isinstance(given, ScoreStatus):
        return replace(empty, status=given, message=f"why {given}")
    if isinstance(given, tuple):
        return replace(empty, value=float(sum(given)), token_values=given)  # type: ignore[arg-type]
    return replace(empty, value=given)


def rewards(*columns: tuple[object, Sequence[object]], num_tokens: int = 3) -> list[ScoreResult]:
    """Combine; each column is a component with what it gives the samples."""
    num_samples = len(columns[0][1])
    samples: list[ScoreSample] = [make_sample(index, num_response_tokens=num_tokens) for index in range(num_samples)]
    components = [
        [ComponentResult(component=own, service="r", result=result(given[index], index)) for own, given in columns]  # type: ignore[arg-type]
        for index in range(num_samples)
    ]
    return combine(samples, components)


def test_reward_is_the_weighted_sum_of_the_components() -> None:
    first, second = rewards((SUM, [1.0, 0.5]), (JUDGE, [3.0, 0.25]))
    assert (first.value, second.value) == (2 * 1.0 - 3.0, 2 * 0.5 - 0.25)
    assert first.components == {"sum": 1.0, "judge": 3.0}
    assert (first.sample_id, first.status, first.token_values) == ("uid/0/0", S, ())


@pytest.mark.parametrize(
    ("given", "status", "message"),
    [
        ((1.0, N), N, "judge@3: why not_scored"),
        ((1.0, E), E, "judge@3: why error"),
        ((N, E), E, "judge@3: why error"),
        ((N, N), N, "sum@3: why not_scored"),
    ],
)
def test_sample_without_a_required_component_has_no_reward_and_says_which(
    given: tuple[object, object], status: ScoreStatus, message: str
) -> None:
    first, second = rewards((SUM, [given[0], 1.0]), (JUDGE, [given[1], 1.0]))
    assert (first.status, first.value, first.components, first.message) == (status, 0.0, {}, message)
    assert (second.status, second.value) == (S, 1.0)


@pytest.mark.parametrize("missing", [N, E])
def test_optional_component_is_left_out_for_all_siblings_if_one_lacks_it(missing: ScoreStatus) -> None:
    """Siblings are compared with each other: what counts for one must count for all."""
    first, second = rewards((SUM, [1.0, 0.5]), (OPTIONAL, [10.0, missing]))
    assert (first.value, second.value) == (2.0, 1.0)
    assert "run" not in first.components


def test_optional_component_counts_if_every_sibling_has_it() -> None:
    first, second = rewards((SUM, [1.0, 0.5]), (OPTIONAL, [10.0, 20.0]))
    assert (first.value, second.value) == (12.0, 21.0)


def test_optional_components_alone_make_no_reward_where_one_is_missing() -> None:
    first, second = rewards((OPTIONAL, [1.0, N]))
    assert (first.status, second.status) == (N, N)
    assert first.message == "no optional component has scored every sample of the prompt"


def test_sample_that_no_component_scores_says_so() -> None:
    (only,) = combine([make_sample()], [[]])
    assert (only.status, only.message) == (N, "no component of the route scores its source")


def test_per_token_rewards_add_up_token_by_token_and_whole_rewards_go_to_the_last_token() -> None:
    (only,) = rewards((SUM, [(1.0, 0.0, 0.5)]), (component("run"), [(0.0, 3.0, 0.0)]), (JUDGE, [4.0]))
    assert only.token_values == (2.0, 3.0, 1.0 - 4.0)
    assert only.value == 2.0


def test_optional_per_token_rewards_that_are_left_out_leave_a_whole_reward() -> None:
    first, second = rewards((SUM, [1.0, 0.5]), (OPTIONAL, [(1.0, 1.0, 1.0), E]))
    assert (first.value, first.token_values, second.value) == (2.0, (), 1.0)


@pytest.mark.parametrize("given", [3e38, (3e38, 0.0, 0.0)])
def test_sum_that_float32_cannot_hold_is_an_error(given: object) -> None:
    (only,) = rewards((SUM, [given]))
    assert (only.status, only.value, only.token_values) == (E, 0.0, ())
    assert only.message == "the weighted sum is 6e+38: float32 cannot hold it"


def test_parts_of_a_component_are_weighed_before_its_weight() -> None:
    given = ScoreResult(sample_id="uid/0/0", status=S, value=9.0, components={"correct": 1.0, "format": 0.5, "length": 7.5})
    own = ComponentResult(component=component("sum", weight=10.0, parts={"correct": 2.0, "format": -1.0}), service="r", result=given)
    (only,) = combine([make_sample()], [[with_parts(own)]])
    assert only.value == 10.0 * (2.0 - 0.5)
    assert only.components == given.components


def test_latency_is_that_of_the_slowest_component() -> None:
    own = [
        ComponentResult(component=each, service="r", result=replace(result(1.0), latency_ms=latency_ms))
        for each, latency_ms in ((SUM, 3.0), (JUDGE, 8.0))
    ]
    assert combine([make_sample()], [own])[0].latency_ms == 8.0


def test_failed_call_is_not_named_twice() -> None:
    failed = ScoreResult(sample_id="uid/0/0", status=E, message="sum@3 failed on 'a': UnavailableError: down")
    (only,) = combine([make_sample()], [[ComponentResult(component=SUM, service="a", result=failed)]])
    assert only.message == failed.message
