"""`shoal reward score`: rows through the same service that training asks, and what came out, row by row."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from shoal.cli.local_run import interruptible
from shoal.cli.reward.components import split_scorer
from shoal.cli.reward.offline import Scored, find_scorer, score_rows
from shoal.cli.reward.own_server import own_server
from shoal.cli.reward.printing import print_json, print_line
from shoal.cli.reward.rows import BadLine, check_data_file, read_rows
from shoal.clients.reward import RewardClient
from shoal.config.models import SecuritySection
from shoal.errors import ConfigError, DataError
from shoal.types import ScorerDescription, ScoreStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """What was asked for. address None: a server of the command's own, with modules and serve."""

    scorer: str
    data: Path
    modules: Sequence[str]
    serve: Path | None
    address: str | None
    security: SecuritySection
    timeout_s: float
    out: Path | None
    as_json: bool


@dataclass(slots=True)
class Tally:
    """What has come out so far."""

    counts: Counter[ScoreStatus] = field(default_factory=Counter)
    num_bad_lines: int = 0
    mean: float = 0.0
    _sum_of_squares: float = 0.0

    def add(self, scored: Scored | BadLine) -> None:
        """Count a row."""
        if isinstance(scored, BadLine):
            self.num_bad_lines += 1
            return
        result = scored[1]
        self.counts[result.status] += 1
        if result.status is ScoreStatus.SCORED:
            # Welford's way, which loses nothing where the mean is large.
            from_old = result.value - self.mean
            self.mean += from_old / self.counts[ScoreStatus.SCORED]
            self._sum_of_squares += from_old * (result.value - self.mean)

    @property
    def is_complete(self) -> bool:
        """Whether every line was a row, and none was an error."""
        return not self.num_bad_lines and not self.counts[ScoreStatus.ERROR]

    @property
    def summary(self) -> dict[str, Any]:
        """Counts, and mean and standard deviation (of the population) of the scored rows; null where there are none."""
        num_scored = self.counts[ScoreStatus.SCORED]
        return {
            "num_rows": self.counts.total(),
            "num_scored": num_scored,
            "num_not_scored": self.counts[ScoreStatus.NOT_SCORED],
            "num_errors": self.counts[ScoreStatus.ERROR],
            "num_bad_lines": self.num_bad_lines,
            "mean": self.mean if num_scored else None,
            "std": math.sqrt(self._sum_of_squares / num_scored) if num_scored else None,
        }


def score_file(options: ScoreOptions, console: Console, errors: Console) -> int:
    """Score a file and print each row, then a summary.

    Args:
        errors: gets what is said beside the rows.
    Returns: exit code: 1 if a line was no row, or a row was an error.
    Raises: ShoalError: nothing could be scored at all: the file, the server or the scorer is missing.
    """
    name, version = split_scorer(options.scorer)
    if options.address is not None and (options.modules or options.serve):
        raise ConfigError("--module and --serve belong to a server of this command's own; leave them out, or --address")
    if options.address is None and not options.security.insecure:
        raise ConfigError("--ca-file, --cert-file and --key-file belong to --address; a server of this command's own listens on loopback")
    check_data_file(options.data)
    if options.serve is not None and not options.serve.is_file():
        raise ConfigError(f"--serve {options.serve} does not exist or is no file; give the YAML file of a reward service")
    with interruptible(), _server(options) as address, _opened(options.out) as out:
        return asyncio.run(_score(options, name, version, address, console, errors, out))


def _server(options: ScoreOptions) -> AbstractContextManager[str]:
    return own_server(options.modules, options.serve) if options.address is None else nullcontext(options.address)


def _opened(path: Path | None) -> AbstractContextManager[IO[str] | None]:
    if path is None:
        return nullcontext(None)
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise DataError(f"--out {path} cannot be written ({error.strerror}); give a file in a folder that exists") from error


async def _score(
    options: ScoreOptions, name: str, version: str, address: str, console: Console, errors: Console, out: IO[str] | None
) -> int:
    tally, documents = Tally(), list[dict[str, Any]]()
    async with RewardClient(address, options.security) as client:
        scorer = await find_scorer(client, name, version)
        _warn_of_ids(scorer, errors)
        async for scored in score_rows(client, scorer, read_rows(options.data), options.timeout_s):
            tally.add(scored)
            if out is not None:
                out.write(json.dumps(_document(scored)) + "\n")
            if options.as_json:
                documents.append(_document(scored))
            else:
                print_line(console, _line(options.data, scored))
    if options.as_json:
        print_json(console, {"scorer": scorer.name, "version": scorer.version, "rows": documents, "summary": tally.summary})
    else:
        print_line(console, _summary_text(scorer, tally))
    return 0 if tally.is_complete else 1


def _warn_of_ids(scorer: ScorerDescription, errors: Console) -> None:
    if scorer.needs_token_ids:
        print_line(errors, f"{scorer.name}@{scorer.version} scores token ids: rows need the columns prompt_ids and response_ids")


def _document(scored: Scored | BadLine) -> dict[str, Any]:
    if isinstance(scored, BadLine):
        return {"line": scored.line, "status": "bad_line", "value": None, "message": scored.problem}
    row, result = scored
    is_scored = result.status is ScoreStatus.SCORED
    return {
        "line": row.line,
        "status": result.status.value,
        "value": result.value if is_scored else None,
        "components": result.components if is_scored else {},
        "token_values": list(result.token_values) if is_scored else [],
        "message": result.message,
        "latency_ms": result.latency_ms,
    }


def _line(path: Path, scored: Scored | BadLine) -> str:
    if isinstance(scored, BadLine):
        return f"{path}:{scored.line}: bad line: {scored.problem}"
    row, result = scored
    head = f"{path}:{row.line}: {result.status.value.replace('_', ' ')}"
    if result.status is not ScoreStatus.SCORED:
        return f"{head}: {result.message}" if result.message else head
    parts = "  ".join(f"{name}={value:.6g}" for name, value in sorted(result.components.items()))
    tokens = f"  ({len(result.token_values)} tokens)" if result.token_values else ""
    return "  ".join(text for text in (f"{head}  {result.value:.6g}", parts) if text) + tokens


def _summary_text(scorer: ScorerDescription, tally: Tally) -> str:
    found = tally.summary
    bad = f", {found['num_bad_lines']} bad lines" if tally.num_bad_lines else ""
    counts = f"{found['num_scored']} scored, {found['num_not_scored']} not scored, {found['num_errors']} error{bad}"
    numbers = "" if found["mean"] is None else f"; mean {found['mean']:.6g}, standard deviation {found['std']:.6g}"
    return f"{scorer.name}@{scorer.version}: {found['num_rows']} rows: {counts}{numbers}"
