"""What flows through swaps: the ways of collecting groups, the revisions that are added, the prompts and the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from shoal_coordinator.prompts import PromptTask
from shoal_coordinator.rewards.route import RouteComponent

from shoal.config.load import build_config
from shoal.config.models import RunConfig
from shoal.types import FinishReason, Int32Array, ScoreSample
from tests.helpers.swap_servers import ScorerKey

LEASE_S = 3600.0
TIMEOUT_S = 20.0
"""Of every component but one that hangs; no step takes near as long."""
UNTIL_S = 60.0
NUM_GROUPS, GROUP_SIZE = 4, 2
SOURCES = ("sums", "words")
WHO, WHY = "ada", "because"
HANGING: ScorerKey = ("exact", "99")
OFFERS: dict[str, list[ScorerKey]] = {
    "a": [("exact", str(version)) for version in range(1, 9)] + [("steps", "1"), ("shy", "1")],
    "b": [("exact", str(version)) for version in range(1, 9)] + [("steps", "1")],
    "c": [("exact", str(version)) for version in range(9, 13)] + [("style", "1"), ("style", "2"), HANGING],
}
"""`a` and `b` are replicas for the most part; `c` cannot register and is asked at its address."""
FIRST_REVISIONS, EXTRA_REVISIONS = 5, 5
"""Are added before groups flow, and meanwhile."""

Components = tuple[RouteComponent, ...]


def exact(version: int | str, **fields: Any) -> RouteComponent:  # noqa: ANN401
    """One scorer, one version."""
    return RouteComponent(scorer="exact", version=str(version), timeout_s=TIMEOUT_S, **fields)


def one_scorer(number: int) -> Components:
    """The nth revision that is added: its version is used by no other."""
    return (exact(1 + number),)


def several_components(number: int) -> Components:
    """The nth revision that is added: revisions share scorers, weigh them otherwise, and split the rows by source."""
    style = RouteComponent(scorer="style", version=str(1 + number % 2), weight=0.5 * number, timeout_s=TIMEOUT_S, sources=("words",))
    shy = RouteComponent(scorer="shy", version="1", weight=-1.0, timeout_s=TIMEOUT_S, is_required=False)
    steps = RouteComponent(scorer="steps", version="1", weight=0.25, timeout_s=TIMEOUT_S, sources=("sums",))
    menus: list[Components] = [
        (exact(1 + number, sources=("sums",)), style),
        (exact(2), shy),
        (exact(2, weight=3.0), replace(style, is_required=False), steps),
        (steps, style),
    ]
    return menus[number % len(menus)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What flows: with which options of collecting, which revisions, and what else. reward: the configuration's, of revision 1."""

    name: str
    reward: Mapping[str, Any] = field(default_factory=lambda: {"scorer": "exact", "version": "1"})
    components: Callable[[int], Components] = one_scorer
    max_refills: int | None = None
    has_greedy: bool = False
    evaluates: bool = False
    failing_share: float = 0.0
    hangs: bool = False
    shares_scorers: bool = False
    breaks: bool = False
    pauses: bool = False


def config_of(folder: Path, redis_url: str, mode: Mode, seed: int) -> RunConfig:
    tree = {
        "run": {"id": f"swap-{mode.name}", "folder": str(folder), "seed": seed},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl", "held_out": "held_out.jsonl"},
        "reward": {"timeout_s": TIMEOUT_S} | dict(mode.reward),
        "coordinator": {"lease_s": LEASE_S, "ready_timeout_s": 20.0},
        "evaluation": {"samples": GROUP_SIZE, "temperature": 1.0, "max_new_tokens": 4},
        "redis": {"url": redis_url},
    }
    return build_config(tree)


def row_of(index: int) -> dict[str, object]:
    return {"answer": str(index), "data_source": SOURCES[index % len(SOURCES)]}


def prompt_ids_of(index: int) -> Int32Array:
    return np.array([1 + index % 90, 1 + index // 90, 2], np.int32)


def task_of(index: int) -> PromptTask:
    return PromptTask(uid=f"g{index}", group_id=f"g{index}", prompt_ids=prompt_ids_of(index), text=f"prompt {index}", row=row_of(index))


def probe_of(index: int) -> ScoreSample:
    return ScoreSample(
        sample_id=f"made-{index}",
        prompt=f"prompt {index}",
        response=f"{index} {index}",
        row=row_of(index),
        finish_reason=FinishReason.STOP,
        num_response_tokens=2,
        response_ids=(index, index),
    )


def is_of_c(component: RouteComponent) -> bool:
    return (component.scorer, component.version) in OFFERS["c"]
