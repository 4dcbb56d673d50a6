"""Where the metrics of steps and evaluations go: files, Prometheus, TensorBoard, the log, and memory for the REST API."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from shoal.errors import ConfigError
from shoal.telemetry.logs import get_logger
from shoal.telemetry.metrics import counter, gauge
from shoal_coordinator.report import LoggedEvaluation

KEPT_STEPS = 10_000
METRICS_NAME = "metrics.jsonl"
EVALUATIONS_NAME = "evaluations.jsonl"
StepMetrics: TypeAlias = dict[str, float | None]

log = get_logger(__name__)
_STEP_METRIC = gauge("coordinator", "step_metric", "value", "Metrics of the last step, as in metrics.jsonl.", labels=("metric",))
_EVALUATION_METRIC = gauge("coordinator", "evaluation_metric", "value", "Metrics of the last evaluation.", labels=("metric",))
_POLICY_VERSION = gauge("coordinator", "policy", "version", "Version that the rollout servers serve.")
_STEPS = counter("coordinator", "completed", "steps", "Training steps completed.")
_SAMPLES = counter("coordinator", "trained", "samples", "Samples of completed steps.")
_TOKENS = counter("coordinator", "trained", "tokens", "Prompt and response tokens of completed steps.")
_LOGGED = ("step", "policy_version", "reward_revision", "reward", "kl", "response_length", "step_s", "control_share", "tokens_per_s")


class Sink(Protocol):
    """Somewhere else that metrics go."""

    def add_step(self, step: StepMetrics) -> None:
        """Take the metrics of a step, which have the key `step`; None for a number that is not finite."""
        ...

    def add_evaluation(self, evaluation: LoggedEvaluation) -> None:
        """Take an evaluation."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class JsonLinesSink:
    """Appends to metrics.jsonl and evaluations.jsonl, one line a step and an evaluation."""

    def __init__(self, folder: Path) -> None:
        """Open both files.

        Raises: ConfigError: the run's folder cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Line buffering: a reader, and a crash, see whole lines.
            self._steps, self._evaluations = (
                (folder / name).open("a", encoding="utf-8", buffering=1) for name in (METRICS_NAME, EVALUATIONS_NAME)
            )
        except OSError as error:
            raise ConfigError(f"cannot write {folder} ({error.strerror}); set run.folder to a folder that can be written") from error

    def add_step(self, step: StepMetrics) -> None:
        """Append a step."""
        self._steps.write(json.dumps(step, allow_nan=False) + "\n")

    def add_evaluation(self, evaluation: LoggedEvaluation) -> None:
        """Append an evaluation."""
        self._evaluations.write(json.dumps(evaluation.as_json(), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close both files."""
        self._steps.close()
        self._evaluations.close()


class PrometheusSink:
    """Shows the last step and evaluation as gauges."""

    def add_step(self, step: StepMetrics) -> None:
        """Set the step's gauges and count it."""
        for key, value in step.items():
            _STEP_METRIC.labels(metric=key).set(math.nan if value is None else value)
        version = step.get("policy_version")
        _POLICY_VERSION.set(math.nan if version is None else version)
        _STEPS.inc()
        _SAMPLES.inc(step.get("num_samples") or 0)
        _TOKENS.inc(step.get("num_tokens") or 0)

    def add_evaluation(self, evaluation: LoggedEvaluation) -> None:
        """Set the evaluation's gauges."""
        for key, value in evaluation.metrics().items():
            _EVALUATION_METRIC.labels(metric=key).set(value)

    def close(self) -> None:
        """Nothing is open."""


class MetricsSink:
    """Passes metrics on and keeps the last KEPT_STEPS; a context manager that closes the sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._steps: deque[StepMetrics] = deque(maxlen=KEPT_STEPS)
        self.num_steps = 0
        self.num_samples = 0
        self.num_tokens = 0

    def __enter__(self) -> MetricsSink:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self._sinks:
            sink.close()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Record one step; needs the key `step`. A value that is not finite becomes None."""
        step: StepMetrics = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._steps.append(step)
        self.num_steps += 1
        self.num_samples += int(step.get("num_samples") or 0)
        self.num_tokens += int(step.get("num_tokens") or 0)
        for sink in self._sinks:
            sink.add_step(step)
        log.info("step_completed", **{key: step[key] for key in _LOGGED if key in step})

    def add_evaluation(self, evaluation: LoggedEvaluation) -> None:
        """Record an evaluation."""
        for sink in self._sinks:
            sink.add_evaluation(evaluation)
        log.info("evaluated", **evaluation.metrics())

    def after(self, step: int, limit: int) -> list[StepMetrics]:
        """Up to limit kept steps with a higher number than step, oldest first."""
        newer = (kept for kept in self._steps if (kept["step"] or 0) > step)
        return list(itertools.islice(newer, limit))

    def kept(self) -> tuple[StepMetrics, ...]:
        """All kept steps, oldest first."""
        return tuple(self._steps)
