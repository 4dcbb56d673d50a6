"""The configuration that all processes of the failure matrix share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.config.load import load_config
from shoal.config.models import RunConfig
from shoal.telemetry.logs import setup_logging

RUN_ID = "matrix"
PREPARE_S, TRANSFER_S, VERIFY_S, COMMIT_S = 3.0, 2.0, 2.0, 2.0
DEADLINES_S = PREPARE_S + TRANSFER_S + VERIFY_S + COMMIT_S
LEASE_S = 1.5
READY_S = 15.0


def write(folder: Path, **sections: dict[str, Any]) -> None:
    """Write the configuration.

    Args:
        sections: overrides, by section.
    """
    (folder / "shm").mkdir()
    (folder / "train.jsonl").touch()
    tree: dict[str, dict[str, Any]] = {
        "run": {"id": RUN_ID, "folder": str(folder / "run")},
        "model": {"path": str(folder)},
        "data": {"train": str(folder / "train.jsonl")},
        "rollout": {"servers": 2, "min_servers": 1},
        "push": {
            "transport": "shm",
            "shm_dir": str(folder / "shm"),
            "bucket_bytes": 4096,
            "delta": "on",
            "prepare_timeout_s": PREPARE_S,
            "transfer_timeout_s": TRANSFER_S,
            "verify_timeout_s": VERIFY_S,
            "commit_timeout_s": COMMIT_S,
        },
        "coordinator": {"lease_s": LEASE_S, "ready_timeout_s": READY_S},
        "redis": {"url": "redis://127.0.0.1:1"},
        "telemetry": {"metrics_port": -1},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    # JSON is YAML.
    (folder / "run.yaml").write_text(json.dumps(tree))


def load(folder: Path, name: str) -> RunConfig:
    """Read it in a process called `name`, and log as that."""
    config = load_config(folder / "run.yaml", [])
    setup_logging(name, config.telemetry, run_id=config.run.id)
    return config
