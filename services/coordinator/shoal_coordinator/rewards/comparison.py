"""A shadow revision beside the active one: what both say of the same responses.

Only samples that both have scored are compared; samples without a score count in the shares alone. The statistics are those of the
latest samples, in whole groups, at most MAX_KEPT_SAMPLES: memory stays bounded, and a service that was repaired is not measured by
what it was. Standard deviations are those of the population, as everywhere in Shoal; percentiles are linear between ranks.

Latency of a sample: that of its combined result, the largest `latency_ms` that a component of the revision reported for it, since
components are asked side by side. It is the server's own measure, on both sides, so that a shadow with little traffic is compared with
an active route under load by the same clock; a sample for which nothing was reported (0), such as one whose call failed, has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from shoal.types import ScoreResult, ScoreSample, ScoreStatus
from shoal_coordinator.rewards.agreement import Float64Array, PairCount, Percentiles, count_pairs, pearson, percentiles, spearman, z_scores

MAX_KEPT_SAMPLES = 20_000
MAX_POINTS = 2_000
MAX_WORST = 10
MAX_TEXT_CHARS = 500
MAX_ERROR_CHARS = 500
SMALLEST_WORST_Z = 1e-9
"""Less than this is rounding, not disagreement."""

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides(Generic[ValueT]):
    """The same of both revisions."""

    active: ValueT
    shadow: ValueT


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstCase:
    """A response of which the two rewards differ most, each in standard deviations from its mean; texts are cut."""

    sample_id: str
    prompt: str
    response: str
    active: float
    shadow: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How the shadow revision `number` compares with the active one; None is what cannot be said.

    num_groups: groups that the shadow was asked for so far. num_samples: samples that both have scored so far. num_dropped: groups that
    the shadow was too slow for. The rest is of the latest of these: mean, std, pearson, spearman: of the rewards of samples that both
    have scored. num_pairs: siblings that at least one of the two orders; ranking_disagreement: share of these that they order
    differently, a tie being half a difference. latency_ms: of a sample. error_share, not_scored_share: of all samples. points: (active,
    shadow). worst: largest difference first. first_error: of the shadow; None if all is well.
    """

    number: int
    active: int
    num_groups: int = 0
    num_samples: int = 0
    num_dropped: int = 0
    mean: Sides[float | None] = field(default_factory=lambda: Sides(active=None, shadow=None))
    std: Sides[float | None] = field(default_factory=lambda: Sides(active=None, shadow=None))
    pearson: float | None = None
    spearman: float | None = None
    num_pairs: int = 0
    ranking_disagreement: float | None = None
    latency_ms: Sides[Percentiles] = field(default_factory=lambda: Sides(active=Percentiles(), shadow=Percentiles()))
    error_share: Sides[float | None] = field(default_factory=lambda: Sides(active=None, shadow=None))
    not_scored_share: Sides[float | None] = field(default_factory=lambda: Sides(active=None, shadow=None))
    points: tuple[tuple[float, float], ...] = ()
    worst: tuple[WorstCase, ...] = ()
    first_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one revision says of a sample, without what comparing does not need. latency_ms: None where none was reported."""

    status: ScoreStatus
    value: float
    latency_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedGroup:
    """The siblings of one group with both verdicts; texts are cut, first_error is the shadow's or empty."""

    prompt: str
    responses: tuple[str, ...]
    sample_ids: tuple[str, ...]
    active: tuple[Verdict, ...]
    shadow: tuple[Verdict, ...]
    first_error: str
    pairs: PairCount

    @property
    def both(self) -> list[int]:
        """Places of the samples that both have scored."""
        return _both(self.active, self.shadow)


def verdicts_of(results: Sequence[ScoreResult]) -> tuple[Verdict, ...]:
    """What a revision says of a group.

    Args:
        results: combined (`shoal_coordinator.rewards.combine`), by completion.
    """
    return tuple(
        Verdict(status=result.status, value=result.value, latency_ms=result.latency_ms if result.latency_ms > 0 else None)
        for result in results
    )


def compare_group(samples: Sequence[ScoreSample], active: tuple[Verdict, ...], shadow: tuple[Verdict, ...], error: str) -> ComparedGroup:
    """Put both verdicts of one group together.

    Args:
        samples: at least one.
        active, shadow: one per sample.
        error: the first one of the shadow; empty if there is none.
    """
    both = _both(active, shadow)
    return ComparedGroup(
        prompt=_cut(samples[0].prompt),
        responses=tuple(_cut(sample.response) for sample in samples),
        sample_ids=tuple(sample.sample_id for sample in samples),
        active=active,
        shadow=shadow,
        first_error=error[:MAX_ERROR_CHARS],
        pairs=count_pairs([active[place].value for place in both], [shadow[place].value for place in both]),
    )


class ComparisonTally:
    """Collects the groups of one shadow revision while one revision is active; used from the event loop alone."""

    def __init__(self, number: int, active: int, *, max_samples: int = MAX_KEPT_SAMPLES) -> None:
        self.number = number
        self.active = active
        self.num_dropped = 0
        self._max_samples = max_samples
        self._groups: deque[ComparedGroup] = deque()
        self._num_kept = 0
        self._num_groups = 0
        self._num_samples = 0
        self._latest: Comparison | None = None

    def add(self, group: ComparedGroup) -> None:
        """Count a group; the oldest ones are forgotten when there are too many samples."""
        self._latest = None
        self._groups.append(group)
        self._num_kept += len(group.sample_ids)
        self._num_groups += 1
        self._num_samples += len(group.both)
        while self._num_kept > self._max_samples and len(self._groups) > 1:
            self._num_kept -= len(self._groups.popleft().sample_ids)

    def comparison(self) -> Comparison:
        """The comparison so far; computed once for all who ask between two groups."""
        if self._latest is None:
            self._latest = self._compare()
        return replace(self._latest, num_dropped=self.num_dropped)

    def _compare(self) -> Comparison:
        groups = tuple(self._groups)
        places = [(group, place) for group in groups for place in group.both]
        active = np.array([group.active[place].value for group, place in places], np.float64)
        shadow = np.array([group.shadow[place].value for group, place in places], np.float64)
        num_pairs = sum(group.pairs.num_pairs for group in groups)
        num_different = sum(group.pairs.num_different for group in groups)
        verdicts = _verdicts(groups)
        return Comparison(
            number=self.number,
            active=self.active,
            num_groups=self._num_groups,
            num_samples=self._num_samples,
            mean=Sides(active=_mean(active), shadow=_mean(shadow)),
            std=Sides(active=_std(active), shadow=_std(shadow)),
            pearson=pearson(active, shadow),
            spearman=spearman(active, shadow),
            num_pairs=num_pairs,
            ranking_disagreement=num_different / num_pairs if num_pairs else None,
            latency_ms=Sides(active=_latencies(verdicts.active), shadow=_latencies(verdicts.shadow)),
            error_share=_shares(verdicts, ScoreStatus.ERROR),
            not_scored_share=_shares(verdicts, ScoreStatus.NOT_SCORED),
            points=tuple(zip(active[-MAX_POINTS:].tolist(), shadow[-MAX_POINTS:].tolist(), strict=True)),
            worst=_worst(places, active, shadow),
            first_error=next((group.first_error for group in groups if group.first_error), None),
        )


def _both(active: Sequence[Verdict], shadow: Sequence[Verdict]) -> list[int]:
    scored = ScoreStatus.SCORED
    return [place for place, pair in enumerate(zip(active, shadow, strict=True)) if pair[0].status is scored and pair[1].status is scored]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 1]}…"


def _mean(values: Float64Array) -> float | None:
    return float(values.mean()) if values.size else None


def _std(values: Float64Array) -> float | None:
    # From the least value, so that equal values give exactly 0 whatever their mean rounds to.
    return float((values - values.min()).std()) if values.size else None


def _verdicts(groups: Sequence[ComparedGroup]) -> Sides[list[Verdict]]:
    return Sides(
        active=[verdict for group in groups for verdict in group.active],
        shadow=[verdict for group in groups for verdict in group.shadow],
    )


def _latencies(verdicts: Sequence[Verdict]) -> Percentiles:
    reported = [verdict.latency_ms for verdict in verdicts if verdict.latency_ms is not None]
    return percentiles(np.array(reported, np.float64))


def _shares(verdicts: Sides[list[Verdict]], status: ScoreStatus) -> Sides[float | None]:
    return Sides(active=_share(verdicts.active, status), shadow=_share(verdicts.shadow, status))


def _share(verdicts: Sequence[Verdict], status: ScoreStatus) -> float | None:
    return sum(verdict.status is status for verdict in verdicts) / len(verdicts) if verdicts else None


def _worst(places: Sequence[tuple[ComparedGroup, int]], active: Float64Array, shadow: Float64Array) -> tuple[WorstCase, ...]:
    """The samples whose two rewards lie furthest apart, in standard deviations; of equally bad ones the oldest first."""
    differences = np.abs(z_scores(active) - z_scores(shadow))
    order = np.argsort(-differences, kind="stable")[:MAX_WORST]
    return tuple(_worst_case(*places[index]) for index in order.tolist() if differences[index] > SMALLEST_WORST_Z)


def _worst_case(group: ComparedGroup, place: int) -> WorstCase:
    return WorstCase(
        sample_id=group.sample_ids[place],
        prompt=group.prompt,
        response=group.responses[place],
        active=group.active[place].value,
        shadow=group.shadow[place].value,
    )
