"""Where the metrics of a step go."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from shoal_coordinator.evaluation import Evaluation
from shoal_coordinator.metrics_sink import JsonLinesSink, MetricsSink, PrometheusSink
from shoal_coordinator.report import LoggedEvaluation

from shoal.errors import ConfigError
from shoal.telemetry.metrics import sample_value


def test_metrics_sink_writes_a_whole_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsSink([JsonLinesSink(path.parent)]) as sink:
        sink.add({"step": 1, "reward": 0.5, "num_samples": 4, "num_tokens": 40})
        assert json.loads(path.read_text()) == {"step": 1, "reward": 0.5, "num_samples": 4, "num_tokens": 40}
        sink.add({"step": 2, "reward": 0.75, "num_samples": 4, "num_tokens": 50})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    assert (sink.num_steps, sink.num_samples, sink.num_tokens) == (2, 8, 90)


def test_metrics_sink_turns_non_finite_values_into_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsSink([JsonLinesSink(tmp_path)]) as sink:
        sink.add({"step": 1, "reward": math.nan, "kl": math.inf})
    assert json.loads(path.read_text()) == {"step": 1, "reward": None, "kl": None}


def test_metrics_sink_pages_by_step() -> None:
    with MetricsSink([]) as sink:
        for step in range(1, 6):
            sink.add({"step": step})
    assert [step["step"] for step in sink.after(2, 2)] == [3, 4]


def test_metrics_sink_keeps_the_last_ten_thousand_steps() -> None:
    with MetricsSink([]) as sink:
        for step in range(1, 10_003):
            sink.add({"step": step})
    assert [step["step"] for step in sink.after(0, 1)] == [3]
    assert sink.num_steps == 10_002


def test_metrics_sink_shows_the_last_step_to_prometheus() -> None:
    with MetricsSink([PrometheusSink()]) as sink:
        sink.add({"step": 7, "policy_version": 7, "reward": 0.25})
    assert sample_value("shoal_coordinator_step_metric_value", {"metric": "reward"}) == 0.25
    assert sample_value("shoal_coordinator_policy_version") == 7


def test_metrics_sink_names_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"set run\.folder"):
        JsonLinesSink(tmp_path / "file")


def test_metrics_sink_writes_evaluations_beside_the_steps(tmp_path: Path) -> None:
    result = Evaluation(
        accuracy=0.5,
        mean_reward=0.25,
        policy_versions=(3,),
        num=8,
        num_unscored=2,
        num_rows=4,
        samples=2,
        best_of_samples=0.75,
        mean_length=3.0,
        truncated_share=0.125,
        source_accuracy={"sums": 1.0},
    )
    with MetricsSink([JsonLinesSink(tmp_path), PrometheusSink()]) as sink:
        sink.add_evaluation(LoggedEvaluation(step=2, policy_version=3, timestamp_unix_s=7.0, result=result))
        (line,) = map(json.loads, (tmp_path / "evaluations.jsonl").read_text().splitlines())
    assert line == {
        "step": 2,
        "policy_version": 3,
        "timestamp_unix_s": 7.0,
        "accuracy": 0.5,
        "mean_reward": 0.25,
        "policy_versions": [3],
        "num": 8,
        "num_unscored": 2,
        "num_rows": 4,
        "samples": 2,
        "best_of_samples": 0.75,
        "mean_length": 3.0,
        "truncated_share": 0.125,
        "source_accuracy": {"sums": 1.0},
        "reward_revision": 0,
        "num_samples": 6,
    }
    assert sample_value("shoal_coordinator_evaluation_metric_value", {"metric": "accuracy"}) == 0.5
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_metrics_sink_closes_every_sink(tmp_path: Path) -> None:
    lines = JsonLinesSink(tmp_path)
    with MetricsSink([lines]):
        pass
    with pytest.raises(ValueError, match="closed file"):
        lines.add_step({"step": 1})
