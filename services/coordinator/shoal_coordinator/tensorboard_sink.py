"""TensorBoard events of every step and evaluation, in <run.folder>/tensorboard.

The events are written here and now with tensorboardX's `EventsWriter`. Its `SummaryWriter` hands them to a thread through a bounded
queue: a flush does not wait for that queue, and once the thread has died of a full disk the next put blocks for ever.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from shoal.telemetry.logs import get_logger
from shoal_coordinator.metrics_sink import StepMetrics
from shoal_coordinator.report import LoggedEvaluation

log = get_logger(__name__)

FOLDER_NAME = "tensorboard"


class TensorBoardSink:
    """Writes scalars, and the configuration as text. A failure to write is logged once and ends the events, not the run."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        """Open a new event file.

        Args:
            folder: made if it is missing; the files of earlier starts stay.
            config: shown as text.
        """
        # Any: tensorboardX has no types.
        self._writer: Any = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"))
            # As Markdown: an indented block is shown as it is.
            text = "\n".join(f"    {line}" for line in json.dumps(config, indent=2).splitlines())
            self._write([summary.text("config", text)], 0, time.time())
        except OSError as error:
            self._give_up(error)

    def add_step(self, step: StepMetrics) -> None:
        """Write a step's scalars; numbers that are not finite are left out."""
        scalars = {_tag(name): value for name, value in step.items() if value is not None and name not in ("step", "timestamp_unix_s")}
        self._add(scalars, int(step["step"] or 0), step.get("timestamp_unix_s") or time.time())

    def add_evaluation(self, evaluation: LoggedEvaluation) -> None:
        """Write an evaluation's scalars at the step that it came after."""
        scalars = {f"evaluation/{name}": value for name, value in evaluation.metrics().items() if name != "step" and math.isfinite(value)}
        self._add(scalars, evaluation.step, evaluation.timestamp_unix_s)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._give_up(error)
        self._writer = None

    def _add(self, scalars: Mapping[str, float], step: int, unix_s: float) -> None:
        if self._writer is None:
            return
        try:
            self._write([summary.scalar(tag, value) for tag, value in scalars.items()], step, unix_s)
        except OSError as error:
            self._give_up(error)

    def _write(self, summaries: list[Any], step: int, unix_s: float) -> None:
        for one in summaries:
            self._writer.write_event(event_pb2.Event(wall_time=unix_s, step=step, summary=one))
        self._writer.flush()

    def _give_up(self, error: OSError) -> None:
        log.error("tensorboard_failed", error=str(error), reason="no more events are written; the run goes on")
        self._writer = None


def _tag(name: str) -> str:
    """Groups of plots: those of a gang, seconds, the push, and the rest."""
    for prefix in ("actor", "critic", "push"):
        if name.startswith(f"{prefix}_"):
            return f"{prefix}/{name.removeprefix(f'{prefix}_')}"
    if name.endswith("_s") and not name.endswith("_per_s"):
        return f"time/{name}"
    return f"train/{name}"
