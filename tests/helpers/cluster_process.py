"""A command process with a local cluster, for tests that kill it: python -m tests.helpers.cluster_process FOLDER.

Starts one service whose shell has a background child, writes a staging-like file, prints the pids as JSON and waits.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from shoal.cli.local.cluster import LocalCluster
from shoal.cli.local.protocol import ServiceSpec

NESTED = ["bash", "-c", "sleep 600 & echo $! > $FOLDER/grandchild; setsid sleep 600 & echo $! > $FOLDER/detached; wait"]


def nested_spec(folder: Path) -> ServiceSpec:
    """A service with a child in its own session and one in another."""
    return ServiceSpec(name="nested", argv=NESTED, env={"FOLDER": str(folder)}, log_path=str(folder / "nested.log"))


def written_pid(path: Path, timeout_s: float = 10.0) -> int:
    """The pid in a file that another process is about to write."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text().strip()):
            return int(text)
        time.sleep(0.01)
    raise TimeoutError(f"{path} was not written within {timeout_s} s")


def main() -> None:
    """Start, report, wait to be killed."""
    folder = Path(sys.argv[1])
    (folder / "staging-1").write_bytes(b"x")
    with LocalCluster([f"{folder}/staging-*"]) as cluster:
        cluster.start(nested_spec(folder))
        pids = [written_pid(folder / "grandchild"), written_pid(folder / "detached")]
        cluster.wait_until(lambda: "nested" in cluster.pids, "the service", 10)
        sys.stdout.write(json.dumps({"services": [*pids, cluster.pids["nested"]], "supervisor": cluster.supervisor_pid}) + "\n")
        sys.stdout.flush()
        while True:
            cluster.events()
            time.sleep(0.05)


if __name__ == "__main__":
    main()
