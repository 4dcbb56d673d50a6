"""Runs `prepare` of the scorers that run in this process, each once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from shoal.reward import Scorer

RETRY_S = 10.0
"""How long the error of a failed `prepare` stands before it is tried again."""


class Preparation:
    """What is prepared, being prepared, or has failed to."""

    def __init__(self, submit: Callable[[Callable[[], None]], asyncio.Future[None]]) -> None:
        """Make it; submit runs a function in a thread."""
        self._submit = submit
        self._runs: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._failed_at: dict[tuple[str, str], float] = {}

    async def problem(self, scorer: Scorer, timeout_s: float) -> str | None:
        """Wait until a scorer is prepared; None if it is, else why not."""
        if scorer.prepare is None:
            return None
        run = self._run(scorer, scorer.prepare)
        if not run.done():
            await asyncio.wait((run,), timeout=timeout_s)
        if not run.done():
            return f"deadline: scorer {scorer.name!r} was still preparing when the request's time was up"
        error = run.exception()
        if error is None:
            return None
        self._failed_at.setdefault((scorer.name, scorer.version), time.monotonic())
        return f"scorer {scorer.name!r} could not prepare: {type(error).__name__}: {error}"

    def _run(self, scorer: Scorer, prepare: Callable[[], None]) -> asyncio.Future[None]:
        key = (scorer.name, scorer.version)
        if time.monotonic() - self._failed_at.get(key, time.monotonic()) > RETRY_S:
            del self._failed_at[key], self._runs[key]
        if key not in self._runs:
            self._runs[key] = self._submit(prepare)
        return self._runs[key]
