"""Child processes of tests are forks of one process that has imported what they need and done nothing else.

Starting Python with torch takes seconds, a fork none. There is one such process for a whole run of pytest, started when it is first needed;
what it has imported is settled then, so every test module must agree on it.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = (
    "pytest",
    "tests.helpers.adapter_jobs",
    "tests.helpers.bulk_server",
    "tests.helpers.collective_rank",
    "tests.helpers.push_gang",
    "tests.helpers.sharding_jobs",
    "tests.helpers.trainer_jobs",
    "tests.helpers.trainer_layouts",
    "tests.helpers.transport_gang",
)
"""Whatever else a child needs it imports itself."""


def fork_context() -> ForkServerContext:
    """For processes, pools and pipes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context
