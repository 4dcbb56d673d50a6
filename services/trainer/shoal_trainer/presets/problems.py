"""Sums of two operands, split so that no part can be read off another.

A sum and its mirror image ("12+34=", "34+12=") always land in the same part.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass

Row = dict[str, object]

MAX_OPERAND = 99
NUM_HELD_OUT_PAIRS = 270
NUM_VALIDATION_PAIRS = 400
NUM_WARM_UP_PAIRS = 2000

_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """Disjoint parts: warm_up and validation belong to supervised warm-up, train and held_out to the run."""

    warm_up: tuple[Row, ...]
    validation: tuple[Row, ...]
    train: tuple[Row, ...]
    held_out: tuple[Row, ...]


def make_problems(seed: int) -> Problems:
    """Split all sums of operands 0 to 99 into disjoint parts; the same seed gives the same rows in the same order."""
    rng = random.Random(f"shoal/arithmetic/{seed}")
    pairs = list(itertools.combinations_with_replacement(range(MAX_OPERAND + 1), 2))
    rng.shuffle(pairs)
    rest = iter(pairs)
    problems = Problems(
        held_out=_rows(itertools.islice(rest, NUM_HELD_OUT_PAIRS), rng),
        validation=_rows(itertools.islice(rest, NUM_VALIDATION_PAIRS), rng),
        warm_up=_rows(itertools.islice(rest, NUM_WARM_UP_PAIRS), rng),
        train=_rows(rest, rng),
    )
    _check_disjoint(problems)
    return problems


def _rows(pairs: Iterable[_Pair], rng: random.Random) -> tuple[Row, ...]:
    ordered = [order for a, b in pairs for order in sorted({(a, b), (b, a)})]
    rng.shuffle(ordered)
    return tuple({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in ordered)


def _check_disjoint(problems: Problems) -> None:
    parts = (problems.warm_up, problems.validation, problems.train, problems.held_out)
    num_rows = sum(len(part) for part in parts)
    num_prompts = len({row["prompt"] for part in parts for row in part})
    if num_rows != num_prompts:
        raise AssertionError(f"{num_rows - num_prompts} prompts are in more than one part; fix make_problems")
