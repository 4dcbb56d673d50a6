"""Names of staging files: what an engine worker gives them and what a clean-up looks for."""

from __future__ import annotations

import re

STAGING_FILE = re.compile(r"shoal-.+-p\d+-w\d+-\d+")
"""`shoal-<run id>-<service id>-p<pid>-w<worker rank>-<number>`; anything else in the folder is somebody else's."""


def server_staging(run_id: str, service_id: str, process_id: int) -> str:
    """Start of the names of a server's buffers; unique on a host while the process lives."""
    return f"{run_id}-{service_id}-p{process_id}"


def worker_staging(server_name: str, worker_rank: int, number: int) -> str:
    """Name of one buffer, to which its file adds `shoal-`; number counts the buffers that this worker has had."""
    return f"{server_name}-w{worker_rank}-{number}"
