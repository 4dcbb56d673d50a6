"""Scalars about the experience of one step; no tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.types import ExperienceRecord, FinishReason, ScoreStatus
from shoal_coordinator.records import has_spread
from shoal_coordinator.rewards.scored import ScoredGroup

_OTHERS = frozenset({"reward_s", "reward_std", "reward_revision", "reward_revision_min"})
"""Metrics that the mean of a scorer `s`, `std` ... must not hide."""
MAX_COMPONENTS = 64
"""A scorer may name its parts as it likes, and differently for each sample; metrics are kept for ever."""


@dataclass(slots=True, kw_only=True)
class CollectedExperience:
    """What a step has generated; rewards, lengths and stopped have one entry per queued sample.

    num_generated_groups: prompts issued. num_groups: groups put into the queue. num_dropped_groups: groups without a scored sample, or
    without a scored greedy answer where one is needed (num_no_baseline). num_zero_std_dropped, num_refills: what dynamic sampling has
    dropped, and rounds after the first; None if it is off.
    num_empty, num_outside_vocab, num_not_finite, num_missing: completions without tokens, with an id that cannot be sampled, with a
    log-probability that is not finite, not finished in time. num_aborted: ended early by a server and generated again; not in what was
    queued. num_not_scored: their scorer declined. num_scorer_errors: their scorer failed. num_rescored_groups: groups that were scored
    again after a pause, once for each time. revisions: of the reward route, of queued groups.
    components: scorer, or scorer_part -> sum of its scores and their number, of queued samples, as the scorer gave them.
    num_zero_std: queued groups of several samples whose rewards are all equal.
    generated_rewards: of all scored samples, those of dropped groups too. baselines: rewards of the greedy answers of queued groups.
    """

    num_generated_groups: int = 0
    num_groups: int = 0
    num_dropped_groups: int = 0
    num_no_baseline: int = 0
    num_zero_std_dropped: int | None = None
    num_refills: int = 0
    num_empty: int = 0
    num_outside_vocab: int = 0
    num_not_finite: int = 0
    num_missing: int = 0
    num_aborted: int = 0
    num_not_scored: int = 0
    num_scorer_errors: int = 0
    num_rescored_groups: int = 0
    num_zero_std: int = 0
    first_unscored_message: str = ""
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    generated_rewards: list[float] = field(default_factory=list)
    baselines: list[float] = field(default_factory=list)
    policy_versions: set[int] = field(default_factory=set)
    revisions: set[int] = field(default_factory=set)
    components: dict[str, tuple[float, int]] = field(default_factory=dict)

    @property
    def num_unscored(self) -> int:
        """Samples without a score."""
        return self.num_not_scored + self.num_scorer_errors

    @property
    def num_answered(self) -> int:
        """Samples that were sent to the scorer."""
        return self.num_unscored + len(self.generated_rewards)

    @property
    def unscored_share(self) -> float:
        """Unscored samples as a part of all that had tokens."""
        return self.num_unscored / self.num_answered if self.num_answered else 0.0

    def add_scored(self, scored: ScoredGroup) -> None:
        """Count a group's samples, whatever becomes of it."""
        group = scored.group
        unscored = [result for result in scored.results if result.status is not ScoreStatus.SCORED]
        if unscored and not self.num_unscored:
            self.first_unscored_message = unscored[0].message
        self.num_not_scored += sum(result.status is ScoreStatus.NOT_SCORED for result in unscored)
        self.num_scorer_errors += sum(result.status is ScoreStatus.ERROR for result in unscored)
        self.generated_rewards += [result.value for result in scored.results if result.status is ScoreStatus.SCORED]
        self.num_empty += group.num_empty
        self.num_outside_vocab += group.num_outside_vocab
        self.num_not_finite += group.num_not_finite
        self.num_missing += group.num_missing
        self.num_aborted += group.num_aborted

    def add_queued(self, records: Sequence[ExperienceRecord]) -> None:
        """Count a group that is put into the queue."""
        self.num_groups += 1
        self.num_zero_std += len(records) > 1 and not has_spread(records)
        self.rewards += [record.reward for record in records]
        self.lengths += [record.response_ids.size for record in records]
        self.stopped += [record.finish_reason is FinishReason.STOP for record in records]
        self.baselines += [record.baseline_reward for record in records[:1] if record.baseline_reward is not None]
        self.policy_versions.update(span.policy_version for record in records for span in record.policy_version_spans)
        self.revisions.update(record.route_revision for record in records)
        for record in records:
            self._add_components(record)

    def metrics(self) -> dict[str, float]:
        """Metrics of the step; means over nothing, and those of what is switched off, are left out."""
        counts = {
            "num_samples": len(self.rewards),
            "num_generated_groups": self.num_generated_groups,
            "num_groups": self.num_groups,
            "num_dropped_groups": self.num_dropped_groups,
            "num_empty": self.num_empty,
            "num_outside_vocab": self.num_outside_vocab,
            "num_not_finite": self.num_not_finite,
            "num_missing": self.num_missing,
            "num_aborted": self.num_aborted,
            "num_not_scored": self.num_not_scored,
            "num_scorer_errors": self.num_scorer_errors,
            "rescored_groups": self.num_rescored_groups,
        }
        metrics = {name: float(count) for name, count in counts.items()} | {"unscored_share": self.unscored_share}
        metrics |= {name: total / number for name, (total, number) in sorted(self.components.items())}
        metrics |= self._revision_metrics()
        if self.num_zero_std_dropped is not None:
            metrics |= {"num_zero_std_dropped": float(self.num_zero_std_dropped), "num_refills": float(self.num_refills)}
            metrics |= {"generated_reward": float(np.mean(self.generated_rewards))} if self.generated_rewards else {}
        if self.baselines:
            metrics["baseline_reward"] = float(np.mean(self.baselines))
        return metrics | self._means()

    def _add_components(self, record: ExperienceRecord) -> None:
        for part in record.reward_components:
            name = component_metric(part.scorer, part.name)
            is_known = name in self.components or len(self.components) < MAX_COMPONENTS
            if part.status is ScoreStatus.SCORED and is_known:
                total, number = self.components.get(name, (0.0, 0))
                self.components[name] = (total + part.value, number + 1)

    def _revision_metrics(self) -> dict[str, float]:
        """The revision that scored the step; the lowest too where there are several."""
        if not self.revisions:
            return {}
        newest, oldest = max(self.revisions), min(self.revisions)
        return {"reward_revision": float(newest)} | ({} if newest == oldest else {"reward_revision_min": float(oldest)})

    def _means(self) -> dict[str, float]:
        if not self.rewards:
            return {}
        rewards, lengths, stopped = np.array(self.rewards), np.array(self.lengths), np.array(self.stopped)
        return {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "num_response_tokens": float(lengths.sum()),
            "response_length": float(lengths.mean()),
            "clipped_share": float(1 - stopped.mean()),
            "terminated_length": float(lengths[stopped].mean()) if stopped.any() else 0.0,
            "frac_zero_std": self.num_zero_std / self.num_groups,
        }


def component_metric(scorer: str, part: str) -> str:
    """Name of the mean of a scorer, or of a part of several that it gives."""
    name = f"reward_{scorer}" if part == scorer else f"reward_{scorer}_{part}"
    safe = re.sub(r"[^a-zA-Z0-9_]", "_", name)
    return f"{safe}_score" if safe in _OTHERS else safe
