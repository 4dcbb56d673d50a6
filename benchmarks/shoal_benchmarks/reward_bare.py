"""Mathematical answers compared in a loop, without a server, limits or a pool: what the math verifier's service is compared with.

    python -m shoal_benchmarks.reward_bare --worker 0 --workers 2

math_verify: the library, as its documentation shows it. verifier: Shoal's scorer of the kind `math`, called as a function.

A line {"seed", "num_items", "way"} makes it draw the items and answer that it is ready; the next line starts the loop over its part.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from shoal.config.reward_service import ScorerDefinition
from shoal.process import die_with_parent
from shoal_benchmarks.reward_corpus import MathItem, math_items

ItemT = TypeVar("ItemT")


def part_of(items: Sequence[ItemT], worker: int, workers: int) -> Sequence[ItemT]:
    """The items of one of several workers: a stretch of them, since kinds take turns and every other one may be the slow ones."""
    first, end = (len(items) * number // workers for number in (worker, worker + 1))
    return items[first:end]


def by_math_verify(item: MathItem) -> bool:
    """Whether math-verify finds an item right."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${item.gold}$"), parse(item.response)))


def by_verifier() -> Callable[[MathItem], bool]:
    """Whether Shoal's verifier finds an item right, as a function."""
    from shoal_reward.kinds import build_scorer

    scorer = build_scorer("bench_math", ScorerDefinition(kind="math"))
    if scorer.prepare is not None:
        scorer.prepare()
    return lambda item: scorer.function("", item.response, {"answer": item.gold})["correct"] == 1.0  # type: ignore[index]


def count_right(items: Sequence[MathItem], is_right: Callable[[MathItem], bool]) -> int:
    """How many items are right."""
    return sum(map(is_right, items))


def main(argv: list[str] | None = None) -> None:
    """Answer lines until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m shoal_benchmarks.reward_bare", description=__doc__)
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    args = parser.parse_args(argv)
    logging.disable(logging.ERROR)
    ways = {"math_verify": by_math_verify, "verifier": by_verifier()}
    for is_right in ways.values():
        # Builds their tables.
        count_right(math_items(12, seed=-1), is_right)
    while line := sys.stdin.readline():
        asked = json.loads(line)
        items = part_of(math_items(asked["num_items"], seed=asked["seed"]), args.worker, args.workers)
        _answer({"is_ready": True})
        sys.stdin.readline()
        _answer({"num_right": count_right(items, ways[asked["way"]]), "num_items": len(items)})


def _answer(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    die_with_parent()
    main()
