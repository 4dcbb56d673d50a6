"""The function whose scoring is measured: called in a loop here, and served by a reward server there."""

from __future__ import annotations

from shoal.reward import Row, reward

NAME = "bench_function"
VERSION = "1"


@reward(name=NAME, version=VERSION)
def holds_answer(prompt: str, response: str, row: Row) -> float:
    """1 if the response ends with the row's `answer`, less a little for every word."""
    right = response.rstrip(" .").endswith(str(row["answer"]))
    return float(right) - 0.001 * len(response.split())
