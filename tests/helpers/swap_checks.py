"""What must hold after groups have flowed through swaps, from what servers, the queue and the disk say alone."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from shoal_coordinator.dispatcher import sample_seed
from shoal_coordinator.experience import GREEDY_SUFFIX
from shoal_coordinator.records import outcome
from shoal_coordinator.rewards.audit_log import RouteAction
from shoal_coordinator.rewards.book import RouteBook
from shoal_coordinator.rewards.route import RouteComponent

from shoal.types import ExperienceRecord
from tests.helpers.coordinator_fakes import sampled_ids
from tests.helpers.swap_load import SwapLoad
from tests.helpers.swap_modes import GROUP_SIZE, TIMEOUT_S
from tests.helpers.swap_servers import score_of

SEED = 7
"""Of `coordinator_fakes.make_request`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What becomes of a group: worth by sample; is_kept: it has spread where that is asked for."""

    worth: tuple[float, ...]
    baseline: float | None
    is_kept: bool


def check_load(load: SwapLoad) -> None:
    """Everything."""
    assert load.problems == []
    book = _replayed(load)
    components = {record.revision.number: record.revision.components for record in book.records()}
    if load.mode.breaks:
        _take_revisions_of_records(load)
    _check_records(load, components)
    _check_calls(load, components)
    _check_evaluations(load, components)
    assert max(load.step_s) < TIMEOUT_S
    assert all(load.book.num_open_groups(number) == 0 for number in components)


def _replayed(load: SwapLoad) -> RouteBook:
    """The log of the run says what its memory says."""
    copy = Path(shutil.copytree(load.folder, load.folder.with_name(f"{load.folder.name}-copy")))
    book = RouteBook.open(copy, load.config.run.id)
    book.close()
    assert (book.records(), book.active_number, book.previous_number) == (
        load.book.records(),
        load.book.active_number,
        load.book.previous_number,
    )
    assert load.durable.active[-1] == load.book.active_number
    assert len(load.durable.active) == len(load.book.entries(1 << 20)) + 1
    return book


def _check_records(load: SwapLoad, components: Mapping[int, Sequence[RouteComponent]]) -> None:
    """Each issued group has come out of the queue once, whole, with the rewards of the revision that was active when it was issued."""
    groups: dict[str, list[ExperienceRecord]] = defaultdict(list)
    for record in load.records:
        groups[record.group_id].append(record)
    issued = {name: group for name, group in load.issued.items() if name.startswith("g")}
    assert all(group.is_done for group in issued.values())
    expected = {name: _expected(load, name, components[group.revision]) for name, group in issued.items()}
    assert sorted(groups) == sorted(name for name, group in expected.items() if group.is_kept)
    for name, records in groups.items():
        records.sort(key=lambda record: record.sample_index)
        assert [record.sample_index for record in records] == list(range(GROUP_SIZE)), name
        assert {record.route_revision for record in records} == {issued[name].revision}, name
        assert [outcome(record) for record in records] == pytest.approx(expected[name].worth), name
        assert {record.baseline_reward for record in records} == {expected[name].baseline}, name
        _check_scorers(records, load, components[issued[name].revision])


def _take_revisions_of_records(load: SwapLoad) -> None:
    """After a pause a group takes the revision that is active when it is scored; which that was, only its pin says."""
    assert {record.route_revision for record in load.records} <= set(load.pinned)
    for record in load.records:
        load.issued[record.group_id].revision = record.route_revision


def _check_scorers(records: Sequence[ExperienceRecord], load: SwapLoad, components: Sequence[RouteComponent]) -> None:
    source = load.issued[records[0].group_id].source
    wanted = sorted((component.scorer, component.version) for component in components if component.applies_to(source))
    for record in records:
        assert sorted((part.scorer, part.service_version) for part in record.reward_components) == wanted


def _check_calls(load: SwapLoad, components: Mapping[int, Sequence[RouteComponent]]) -> None:
    """The active route has asked for each sample once, for exactly the scorers of its revision; servers have answered that once."""
    live = Counter({key[1:]: number for key, number in load.asked.items() if key[0]})
    side = Counter({key[1:]: number for key, number in load.asked.items() if not key[0]})
    wanted = Counter(
        (component.scorer, component.version, sample_id)
        for name, group in load.issued.items()
        if name.startswith("g")
        for component in components[group.revision]
        if component.applies_to(group.source)
        for sample_id in _sample_ids(load, name)
    )
    if load.mode.breaks:
        _check_that_nothing_was_scored_twice(load, side)
        assert wanted <= live
        return
    assert Counter({key: number for key, number in live.items() if not key[2].startswith("eval-")}) == wanted
    for key, number in live.items():
        assert number <= load.journal.answered[key] <= number + side[key], key
    _check_that_no_side_call_is_of_the_own_revision(load, side, components)
    for scorer, version, ids in load.journal.failed:
        assert all(load.journal.answered[(scorer, version, sample_id)] for sample_id in ids if live[(scorer, version, sample_id)])


def _check_that_nothing_was_scored_twice(load: SwapLoad, side: Mapping[tuple[str, str, str], int]) -> None:
    """A group has one call, which fails as a whole: what has a score is not asked for again, by whatever revision."""
    shadowed = Counter[str]()
    for (_, _, sample_id), number in side.items():
        shadowed[sample_id] += number
    twice = [sample_id for sample_id, number in load.journal.num_scored.items() if number > 1 + shadowed[sample_id] and sample_id[0] == "g"]
    assert twice == []


def _check_that_no_side_call_is_of_the_own_revision(
    load: SwapLoad, side: Mapping[tuple[str, str, str], int], components: Mapping[int, Sequence[RouteComponent]]
) -> None:
    if load.mode.shares_scorers:
        return
    for scorer, version, sample_id in side:
        group = load.issued.get(sample_id.split("/")[0].removesuffix(GREEDY_SUFFIX))
        if group is not None:
            assert (scorer, version) not in {(each.scorer, each.version) for each in components[group.revision]}, sample_id


def _check_evaluations(load: SwapLoad, components: Mapping[int, Sequence[RouteComponent]]) -> None:
    """One revision each, that which was active at its start."""
    for name, issued, result in load.evaluations:
        assert result.reward_revision == issued.revision
        assert result.num_unscored == 0
        asked = {key[1:3] for key in load.asked if key[0] and key[3].startswith(f"{name}-")}
        assert asked == {(component.scorer, component.version) for component in components[issued.revision]}, name
        assert all(number == 1 for key, number in load.asked.items() if key[0] and key[3].startswith(f"{name}-"))
    assert load.evaluations or not load.mode.evaluates


def _sample_ids(load: SwapLoad, name: str) -> list[str]:
    return [f"{name}/{index}/0" for index in range(GROUP_SIZE)] + ([f"{name}{GREEDY_SUFFIX}/0/0"] if load.mode.has_greedy else [])


def _expected(load: SwapLoad, name: str, components: Sequence[RouteComponent]) -> Expected:
    """Rewards of a group, reckoned apart from the product."""
    texts = [" ".join(map(str, sampled_ids(sample_seed(SEED, name, index, 0)))) for index in range(GROUP_SIZE)]
    index = int(name[1:])
    if load.mode.has_greedy:
        texts.append(str(1 + index % 90))
    worth = [0.0] * len(texts)
    for component in components:
        scores = [score_of(component.scorer, component.version, text) for text in texts]
        # An optional component counts for all or none.
        if component.applies_to(load.issued[name].source) and None not in scores:
            worth = [total + component.weight * _worth(score) for total, score in zip(worth, scores, strict=True)]
    baseline = worth.pop() if load.mode.has_greedy else None
    is_kept = load.mode.max_refills is None or len(set(worth)) > 1
    return Expected(worth=tuple(worth), baseline=baseline, is_kept=is_kept)


def _worth(score: object) -> float:
    assert isinstance(score, float | list)
    return sum(score) if isinstance(score, list) else score


def counts(load: SwapLoad) -> dict[str, int]:
    """What has happened, for messages and for the certainty that something has."""
    return {
        "swaps": load.done[RouteAction.ACTIVATE] + load.done[RouteAction.ROLLBACK] - 1,
        "rollbacks": load.done[RouteAction.ROLLBACK],
        "shadows": load.done[RouteAction.SHADOW],
        "drained": load.done[RouteAction.DRAIN],
        "retired": load.done[RouteAction.RETIRE],
        "groups": sum(name.startswith("g") for name in load.issued),
        "records": len(load.records),
        "revisions": len({record.route_revision for record in load.records}),
        "steps": len(load.step_s),
        "shadow_calls": sum(number for key, number in load.asked.items() if not key[0]),
        "failed_calls": len(load.journal.failed),
        "refused": load.num_refused,
        "pauses": load.num_pauses,
        "evaluations": len(load.evaluations),
    }
