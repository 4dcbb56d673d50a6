"""Scores rows through a reward server, a few batches at a time, in the order of the rows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from shoal.cli.reward.components import did_you_mean
from shoal.cli.reward.rows import BadLine, DataRow
from shoal.clients.reward import RewardClient
from shoal.errors import NotFoundError, ShoalError
from shoal.reward import version_key
from shoal.types import ScorerDescription, ScoreResult, ScoreStatus

BATCH_ROWS = 64
BATCH_CHARS = 8 << 20
MAX_OPEN_BATCHES = 4
DESCRIBE_TIMEOUT_S = 10.0

Scored = tuple[DataRow, ScoreResult]


async def find_scorer(client: RewardClient, name: str, version: str) -> ScorerDescription:
    """What the server says of a scorer; the newest version if none is given.

    Raises: NotFoundError: names what there is. ShoalError: the server does not answer.
    """
    offered = await client.describe(timeout_s=DESCRIBE_TIMEOUT_S)
    found = [scorer for scorer in offered if scorer.name == name and version in ("", scorer.version)]
    if not found:
        wanted = f"{name!r} version {version!r}" if version else repr(name)
        hint = did_you_mean(name, [scorer.name for scorer in offered])
        there_is = ", ".join(f"{scorer.name}@{scorer.version}" for scorer in offered) or "none"
        raise NotFoundError(f"no scorer {wanted}{hint or ';'} there is: {there_is}")
    return max(found, key=lambda scorer: version_key(scorer.version))


async def score_rows(
    client: RewardClient, scorer: ScorerDescription, rows: Iterable[DataRow | BadLine], timeout_s: float
) -> AsyncIterator[Scored | BadLine]:
    """Score rows; a batch whose call fails is an error of its rows.

    Args:
        timeout_s: deadline of a batch.
    """
    open_batches: deque[asyncio.Task[list[Scored | BadLine]]] = deque()
    try:
        for batch in _batches(rows):
            open_batches.append(asyncio.create_task(_score_batch(client, scorer, batch, timeout_s)))
            if len(open_batches) == MAX_OPEN_BATCHES:
                for scored in await open_batches.popleft():
                    yield scored
        while open_batches:
            for scored in await open_batches.popleft():
                yield scored
    finally:
        for task in open_batches:
            task.cancel()
        await asyncio.gather(*open_batches, return_exceptions=True)


def _batches(rows: Iterable[DataRow | BadLine]) -> Iterator[list[DataRow | BadLine]]:
    batch: list[DataRow | BadLine] = []
    num_chars = 0
    for row in rows:
        batch.append(row)
        if isinstance(row, DataRow):
            num_chars += len(row.sample.prompt) + len(row.sample.response)
        if len(batch) == BATCH_ROWS or num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


async def _score_batch(
    client: RewardClient, scorer: ScorerDescription, batch: Sequence[DataRow | BadLine], timeout_s: float
) -> list[Scored | BadLine]:
    rows = [row for row in batch if isinstance(row, DataRow)]
    results = iter(await _results(client, scorer, rows, timeout_s))
    return [row if isinstance(row, BadLine) else (row, next(results)) for row in batch]


async def _results(client: RewardClient, scorer: ScorerDescription, rows: Sequence[DataRow], timeout_s: float) -> list[ScoreResult]:
    if not rows:
        return []
    try:
        _, results = await client.score(scorer.name, scorer.version, [row.sample for row in rows], timeout_s=timeout_s)
    except ShoalError as error:
        message = f"the call failed: {error}"
        return [ScoreResult(sample_id=row.sample.sample_id, status=ScoreStatus.ERROR, message=message) for row in rows]
    return results
