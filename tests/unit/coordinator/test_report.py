"""The run's report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shoal_coordinator.evaluation import Evaluation
from shoal_coordinator.report import LoggedEvaluation, RunOutcome, build_report, config_hash, stage_medians, write_json_atomically

from shoal.config.models import DataSection, ModelSection, RunConfig, RunSection


def make_config(seed: int = 0) -> RunConfig:
    return RunConfig(
        run=RunSection(id="run", folder="runs/run", seed=seed), model=ModelSection(path="model"), data=DataSection(train="train.jsonl")
    )


def make_evaluation(accuracy: float) -> Evaluation:
    return Evaluation(accuracy=accuracy, mean_reward=0.0, policy_versions=(1,), num=10, num_unscored=0)


def make_outcome(accuracies: list[float]) -> RunOutcome:
    evaluations = [
        LoggedEvaluation(step=step, policy_version=step, timestamp_unix_s=0.0, result=make_evaluation(accuracy))
        for step, accuracy in enumerate(accuracies, start=1)
    ]
    return RunOutcome(
        state="finished",
        error=None,
        started_unix_s=100.0,
        ended_unix_s=160.5,
        evaluations=evaluations,
        num_steps=3,
        num_samples=12,
        num_tokens=120,
        recent_steps=[{"step": 1, "rollout_s": 1.0}, {"step": 2, "rollout_s": 5.0}, {"step": 3, "rollout_s": 2.0}],
        policy_version=3,
        export_folder="runs/run/export",
        pushes={"num_pushes": 3, "delta_share": 0.5},
    )


def test_report_holds_accuracy_before_and_after_and_totals() -> None:
    report = build_report(make_config(), make_outcome([0.25, 0.5, 0.75]))
    assert (report["accuracy_before"], report["accuracy_after"]) == (0.25, 0.75)
    assert (report["wall_s"], report["steps"], report["tokens"], report["samples"]) == (60.5, 3, 120, 12)
    assert report["pushes"] == {"num_pushes": 3, "delta_share": 0.5}
    assert report["stage_medians_s"] == {"rollout_s": 2.0}
    assert report["started"] == "1970-01-01T00:01:40.000+00:00"


@pytest.mark.parametrize(("accuracies", "expected"), [([], (None, None)), ([0.5], (0.5, None))])
def test_report_does_not_invent_an_accuracy(accuracies: list[float], expected: tuple[float | None, float | None]) -> None:
    report = build_report(make_config(), make_outcome(accuracies))
    assert (report["accuracy_before"], report["accuracy_after"]) == expected


def test_stage_medians_leave_out_rates_and_timestamps() -> None:
    assert stage_medians([{"step_s": 1.0, "tokens_per_s": 9.0, "timestamp_unix_s": 7.0, "push_s": None}]) == {"step_s": 1.0}


def test_config_hash_depends_on_every_value() -> None:
    assert config_hash(make_config()) == config_hash(make_config())
    assert config_hash(make_config()) != config_hash(make_config(seed=1))


def test_write_json_atomically_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "report.json"
    write_json_atomically(path, {"a": 1})
    write_json_atomically(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(path.parent.iterdir()) == [path]
