"""Where the metrics of a step go: metrics.jsonl (one line a step), Prometheus, the log, and memory for the REST API."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from shoal.errors import ConfigError
from shoal.telemetry.logs import get_logger
from shoal.telemetry.metrics import counter, gauge

KEPT_STEPS = 10_000
StepMetrics: TypeAlias = dict[str, float | None]

log = get_logger(__name__)
_STEP_METRIC = gauge("coordinator", "step_metric", "value", "Metrics of the last step, as in metrics.jsonl.", labels=("metric",))
_POLICY_VERSION = gauge("coordinator", "policy", "version", "Version that the rollout servers serve.")
_STEPS = counter("coordinator", "completed", "steps", "Training steps completed.")
_SAMPLES = counter("coordinator", "trained", "samples", "Samples of completed steps.")
_TOKENS = counter("coordinator", "trained", "tokens", "Prompt and response tokens of completed steps.")
_LOGGED = ("step", "policy_version", "reward", "kl", "response_length", "step_s", "control_share", "tokens_per_s")


class MetricsSink:
    """Appends steps to metrics.jsonl and keeps the last KEPT_STEPS; a context manager that closes the file."""

    def __init__(self, path: Path) -> None:
        """Open the file for appending.

        Raises: ConfigError: the run's folder cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Line buffering: a reader, and a crash, see whole steps.
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"cannot write {path} ({error.strerror}); set run.folder to a folder that can be written") from error
        self._steps: deque[StepMetrics] = deque(maxlen=KEPT_STEPS)
        self.num_steps = 0
        self.num_samples = 0
        self.num_tokens = 0

    def __enter__(self) -> MetricsSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Record one step; needs the key `step`. A value that is not finite becomes null."""
        step: StepMetrics = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._steps.append(step)
        self._file.write(json.dumps(step, allow_nan=False) + "\n")
        self._count(step)
        for key, value in metrics.items():
            _STEP_METRIC.labels(metric=key).set(value)
        _POLICY_VERSION.set(metrics.get("policy_version", math.nan))
        log.info("step_completed", **{key: step[key] for key in _LOGGED if key in step})

    def after(self, step: int, limit: int) -> list[StepMetrics]:
        """Up to limit kept steps with a higher number than step, oldest first."""
        newer = (kept for kept in self._steps if (kept["step"] or 0) > step)
        return list(itertools.islice(newer, limit))

    def kept(self) -> tuple[StepMetrics, ...]:
        """All kept steps, oldest first."""
        return tuple(self._steps)

    def _count(self, step: StepMetrics) -> None:
        samples, tokens = int(step.get("num_samples") or 0), int(step.get("num_tokens") or 0)
        self.num_steps += 1
        self.num_samples += samples
        self.num_tokens += tokens
        _STEPS.inc()
        _SAMPLES.inc(samples)
        _TOKENS.inc(tokens)
