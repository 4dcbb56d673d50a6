"""Samples to score, drawn from a seed: the same on both sides of a comparison, and no text twice, so that no cache helps either side."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from shoal.types import FinishReason, ScoreSample

_SENTENCES = (
    "Let us write down what is given.",
    "We move every term to one side and simplify.",
    "Both sides are divided by the common factor.",
    "A quick check with small numbers agrees.",
    "Substituting this back gives the same value.",
)
_RIGHT_SHARE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class MathItem:
    """A right answer in LaTeX, and a response with its answer in a box."""

    gold: str
    response: str


def text_samples(num_samples: int, *, seed: int = 0) -> list[ScoreSample]:
    """Sums with a solution of a few sentences; three of five are right."""
    draw = random.Random(seed)
    samples = []
    for index in range(num_samples):
        left, right = draw.randrange(10_000), draw.randrange(10_000)
        answer = left + right if draw.random() < _RIGHT_SHARE else draw.randrange(20_000)
        prompt, response = f"What is {left} + {right}?", f"{_solution(draw, 3)} The answer is {answer}."
        samples.append(_sample(f"bench-{index}/0/1", prompt, response, str(left + right)))
    return samples


def math_items(num_items: int, *, seed: int) -> list[MathItem]:
    """Answers of the kinds that occur in data sets of mathematics, written in another way than the right one where there is one."""
    draw = random.Random(seed)
    return [_math_item(draw, _WRITERS[index % len(_WRITERS)]) for index in range(num_items)]


def math_samples(items: list[MathItem], name: str) -> list[ScoreSample]:
    """The items as samples of a reward server; name makes their ids."""
    return [_sample(f"{name}-{index}/0/1", "Solve.", item.response, item.gold) for index, item in enumerate(items)]


def _math_item(draw: random.Random, write: Callable[[random.Random], tuple[str, str, str]]) -> MathItem:
    gold, same, other = write(draw)
    answer = same if draw.random() < _RIGHT_SHARE else other
    return MathItem(gold=gold, response=f"{_solution(draw, 4)} So the answer is \\boxed{{{answer}}}.")


def _integer(draw: random.Random) -> tuple[str, str, str]:
    value = draw.randrange(-10_000, 1_000_000)
    return str(value), f"{value:,}".replace(",", r"{,}"), str(value + draw.randrange(1, 9))


def _fraction(draw: random.Random) -> tuple[str, str, str]:
    top, bottom, factor = draw.randrange(1, 400), draw.randrange(2, 400), draw.randrange(2, 9)
    same = rf"\frac{{{top * factor}}}{{{bottom * factor}}}"
    return rf"\frac{{{top}}}{{{bottom}}}", same, rf"\frac{{{top + 1}}}{{{bottom}}}"


def _root(draw: random.Random) -> tuple[str, str, str]:
    factor, inner = draw.randrange(2, 60), draw.choice((2, 3, 5, 6, 7, 10, 11, 13))
    return rf"{factor}\sqrt{{{inner}}}", rf"\sqrt{{{factor * factor * inner}}}", rf"{factor + 1}\sqrt{{{inner}}}"


def _polynomial(draw: random.Random) -> tuple[str, str, str]:
    first, second = draw.randrange(1, 90), draw.randrange(1, 90)
    return rf"(x+{first})(x+{second})", rf"x^2+{first + second}x+{first * second}", rf"x^2+{first + second}x+{first * second + 1}"


def _pair(draw: random.Random) -> tuple[str, str, str]:
    first, second = draw.randrange(-500, 500), draw.randrange(-500, 500)
    return rf"({first}, {second})", rf"\left({first}, {second}\right)", rf"({first}, {second + 1})"


def _decimal(draw: random.Random) -> tuple[str, str, str]:
    value = draw.randrange(1, 100_000)
    return f"{value / 100:.2f}", rf"\frac{{{value}}}{{100}}", f"{value / 100 + 0.5:.2f}"


_WRITERS = (_integer, _fraction, _root, _polynomial, _pair, _decimal)


def _solution(draw: random.Random, num_sentences: int) -> str:
    return " ".join(draw.choice(_SENTENCES) for _ in range(num_sentences))


def _sample(sample_id: str, prompt: str, response: str, answer: str) -> ScoreSample:
    return ScoreSample(
        sample_id=sample_id,
        prompt=prompt,
        response=response,
        row={"answer": answer, "data_source": "bench"},
        finish_reason=FinishReason.STOP,
        num_response_tokens=len(response) // 4,
    )
