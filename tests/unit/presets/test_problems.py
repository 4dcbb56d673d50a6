"""The arithmetic problems: complete, disjoint, seeded."""

from __future__ import annotations

import pytest
from shoal_trainer.presets.problems import MAX_OPERAND, Problems, Row, make_problems


def parts_of(problems: Problems) -> dict[str, tuple[Row, ...]]:
    return {
        "warm_up": problems.warm_up,
        "validation": problems.validation,
        "train": problems.train,
        "held_out": problems.held_out,
    }


def operands(row: Row) -> tuple[int, int]:
    left, right = str(row["prompt"]).removesuffix("=").split("+")
    return int(left), int(right)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_problems_parts_share_no_prompt_nor_its_mirror_image(seed: int) -> None:
    seen: dict[tuple[int, ...], str] = {}
    for name, rows in parts_of(make_problems(seed)).items():
        for row in rows:
            assert seen.setdefault(tuple(sorted(operands(row))), name) == name


def test_problems_hold_every_sum_once_with_its_answer() -> None:
    rows = [row for part in parts_of(make_problems(0)).values() for row in part]
    assert len(rows) == len({row["prompt"] for row in rows}) == (MAX_OPERAND + 1) ** 2
    assert all(sum(operands(row)) == int(str(row["answer"])) for row in rows)


def test_problems_are_the_same_for_the_same_seed_only() -> None:
    assert make_problems(3) == make_problems(3)
    assert make_problems(3).train != make_problems(4).train


def test_problems_parts_are_large_enough() -> None:
    sizes = {name: len(rows) for name, rows in parts_of(make_problems(0)).items()}
    assert sizes["held_out"] > 500
    assert sizes["validation"] > 700
    assert sizes["warm_up"] > 2000
    assert sizes["train"] > 4000
