"""Events are written at once, read back with the library's own messages, and their failure stops nothing."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from shoal_coordinator.app import open_sinks
from shoal_coordinator.evaluation import Evaluation
from shoal_coordinator.metrics_sink import MetricsSink
from shoal_coordinator.report import LoggedEvaluation
from shoal_coordinator.tensorboard_sink import TensorBoardSink
from tensorboardX.crc32c import crc32c
from tensorboardX.proto import event_pb2

from shoal.config.models import DataSection, ModelSection, RunConfig, RunSection, TelemetrySection

CONFIG = {"run": {"id": "test"}}


def masked(checksum: int) -> int:
    """As the record format has it."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def read_events(folder: Path) -> list[Any]:
    """All events of the one file: length, its checksum, the message, its checksum."""
    (file,) = folder.iterdir()
    data, place, events = file.read_bytes(), 0, []
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        assert struct.unpack_from("<I", data, place + 8)[0] == masked(crc32c(data[place : place + 8]))
        message = data[place + 12 : place + 12 + length]
        assert struct.unpack_from("<I", data, place + 12 + length)[0] == masked(crc32c(message))
        events.append(event_pb2.Event.FromString(message))
        place += 16 + length
    return events


def scalars(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    found: dict[str, list[tuple[int, Any]]] = {}
    for event in read_events(folder):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, []).append((event.step, pytest.approx(value.simple_value)))
    return found


def make_evaluation(step: int, accuracy: float) -> LoggedEvaluation:
    result = Evaluation(accuracy=accuracy, mean_reward=0.5, policy_versions=(step,), num=4, num_unscored=0, source_accuracy={"sums": 0.25})
    return LoggedEvaluation(step=step, policy_version=step, timestamp_unix_s=77.0, result=result)


def test_sink_writes_scalars_of_steps_and_evaluations_at_once(tmp_path: Path) -> None:
    with MetricsSink([TensorBoardSink(tmp_path, CONFIG)]) as sink:
        sink.add({"step": 1, "reward": 0.5, "actor_loss": 0.25, "critic_loss": 2.0, "step_s": 3.0, "push_bytes": 8, "tokens_per_s": 9.0})
        assert scalars(tmp_path) == {
            "train/reward": [(1, 0.5)],
            "actor/loss": [(1, 0.25)],
            "critic/loss": [(1, 2.0)],
            "time/step_s": [(1, 3.0)],
            "push/bytes": [(1, 8.0)],
            "train/tokens_per_s": [(1, 9.0)],
        }
        sink.add_evaluation(make_evaluation(1, 0.75))
        sink.add({"step": 2, "reward": 0.75, "kl": math.nan})
        found = scalars(tmp_path)
    assert found["train/reward"] == [(1, 0.5), (2, 0.75)]
    assert found["evaluation/accuracy"] == [(1, 0.75)]
    assert (found["evaluation/policy_version"], found["evaluation/accuracy_sums"]) == ([(1, 1.0)], [(1, 0.25)])
    assert "train/kl" not in found, "not a number"
    assert read_events(tmp_path)[0].file_version == "brain.Event:2"


def test_sink_shows_the_configuration_as_text(tmp_path: Path) -> None:
    TensorBoardSink(tmp_path, CONFIG).close()
    (value,) = (value for event in read_events(tmp_path) for value in event.summary.value)
    assert value.tag == "config/text_summary"
    assert json.loads(value.tensor.string_val[0]) == CONFIG


def test_sink_keeps_the_time_of_a_step(tmp_path: Path) -> None:
    with MetricsSink([TensorBoardSink(tmp_path, CONFIG)]) as sink:
        sink.add({"step": 3, "timestamp_unix_s": 1234.5, "reward": 1.0})
        sink.add_evaluation(make_evaluation(3, 1.0))
    assert {(event.step, event.wall_time) for event in read_events(tmp_path) if event.step} == {(3, 1234.5), (3, 77.0)}


def test_sink_that_cannot_write_says_so_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with MetricsSink([TensorBoardSink(tmp_path / "file", CONFIG)]) as sink:
        for step in (1, 2):
            sink.add({"step": step, "reward": 1.0})
        sink.add_evaluation(make_evaluation(2, 1.0))
    assert caplog.text.count("tensorboard_failed") == 1
    assert sink.num_steps == 2


def test_sink_that_fails_later_says_so_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board = TensorBoardSink(tmp_path, CONFIG)

    class FullDisk:
        def write_event(self, event: object) -> None:
            raise OSError(28, "No space left on device")

    with MetricsSink([board]) as sink:
        sink.add({"step": 1, "reward": 1.0})
        board._writer = FullDisk()
        for step in (2, 3):
            sink.add({"step": step, "reward": 1.0})
        sink.add_evaluation(make_evaluation(3, 1.0))
    assert caplog.text.count("tensorboard_failed") == 1
    assert scalars(tmp_path)["train/reward"] == [(1, 1.0)]


@pytest.mark.parametrize("tensorboard", [False, True])
def test_run_opens_the_sink_if_asked_to(tmp_path: Path, tensorboard: bool) -> None:
    config = RunConfig(
        run=RunSection(id="test", folder=str(tmp_path)),
        model=ModelSection(path="model"),
        data=DataSection(train="train.jsonl"),
        telemetry=TelemetrySection(tensorboard=tensorboard),
    )
    with MetricsSink(open_sinks(config)) as sink:
        sink.add({"step": 1, "reward": 0.5})
    assert (tmp_path / "tensorboard").exists() is tensorboard
    if tensorboard:
        assert scalars(tmp_path / "tensorboard") == {"train/reward": [(1, 0.5)]}
