"""A real pool of graders with the scorers of `grader_scorers.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shoal_reward.grading.pool import GraderPool
from shoal_reward.loading import load_scorers

from shoal.codec.reward import score_result_from_proto, score_sample_to_proto
from shoal.config.reward_service import RewardServiceSettings
from shoal.reward import REGISTRY, Scorer
from shoal.rpc.v1 import reward_pb2
from shoal.types import ScoreResult
from tests.helpers.scoring import make_samples

SCORERS_FILE = str(Path(__file__).with_name("grader_scorers.py"))
LONG_S = 30.0
_loaded: list[str] = []


def grader_scorers() -> list[Scorer]:
    """The scorers of the file, registered once in this process."""
    if not _loaded:
        load_scorers(RewardServiceSettings(modules=(SCORERS_FILE,)))
        _loaded.append(SCORERS_FILE)
    return [scorer for scorer in REGISTRY.all() if Path(scorer.function.__code__.co_filename).name == "grader_scorers.py"]


def grader_scorer(name: str) -> Scorer:
    """One of them."""
    return next(scorer for scorer in grader_scorers() if scorer.name == name)


@asynccontextmanager
async def running_pool(**settings: Any) -> AsyncIterator[GraderPool]:  # noqa: ANN401 - fields of RewardServiceSettings
    """A pool of one grader, unless told otherwise; stopped at the end."""
    pool = GraderPool(RewardServiceSettings.model_validate({"modules": (SCORERS_FILE,), "workers": 1, **settings}), grader_scorers())
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def messages(responses: Sequence[str]) -> list[reward_pb2.ScoreSample]:
    """One sample for each response."""
    return [score_sample_to_proto(sample) for sample in make_samples(responses)]


async def do(pool: GraderPool, responses: Sequence[str], *, scorer: str = "deeds", budget_s: float = LONG_S) -> list[ScoreResult]:
    """Score responses, in a pool."""
    results = await pool.score(grader_scorer(scorer), messages(responses), budget_s)
    return [score_result_from_proto(result) for result in results]


def is_alive(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def wait_until_gone(processes: Sequence[int]) -> None:
    """Return when none of these processes runs; fails the test after a while."""
    async with asyncio.timeout(LONG_S):
        while any(map(is_alive, processes)):  # noqa: ASYNC110 - processes that are no children set no event
            await asyncio.sleep(0.01)


def children_of(process: int) -> list[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
