"""Mathematical answers, read by math-verify's parser and compared safely.

Equal are: integers, decimals, fractions, mixed numbers, LaTeX and plain writing, with or without units, dollars and thousands separators;
a decimal and a number that it rounds in its sixth place; expressions of the same value; equations and inequalities that say the same;
sets in any order, tuples in order, intervals with the same ends.

Percent: with `sign_dropped` (the rule of the MATH benchmark's normalisation) a percent sign says nothing: 50% is 50, and is not 0.5.
With `hundredth` p% is p/100: 50% is 0.5, and is not 50. Either holds for the right answer and for the response's.

Nothing here sets an alarm: it works in any thread. What takes too long is ended by the grader's time limit; limits on the length,
depth and numbers of expressions come first. A right answer that is empty or cannot be read is not scored, an answer that cannot be
read is wrong, and what fails while two readable answers are compared is an error of the sample.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pydantic import Field

from shoal.reward import NotScoredError, Row
from shoal_reward.kinds import BuiltScorer, ScorerKind
from shoal_reward.verifiers.extraction import find_answer, last_boxed
from shoal_reward.verifiers.gold import AnswerSettings, gold_answers, shared_code
from shoal_reward.verifiers.math_text import Percent, is_words, plain, plain_number, refusal, rewritten, same_bases, without_unit

LIBRARIES = ("math-verify", "latex2sympy2_extended", "sympy")
DECIMAL_TOLERANCE = Fraction(5, 10**7)
DECIMAL_RELATIVE_TOLERANCE = Fraction(1, 10**4)


class MathSettings(AnswerSettings):
    """What is read, and how."""

    percent: Percent = "sign_dropped"
    """sign_dropped: 50% is 50 and not 0.5, as in the MATH benchmark; hundredth: 50% is 0.5 and not 50."""
    max_expression_chars: int = Field(default=500, gt=0, le=10_000)
    """An expression that is longer is not computed with: the answer is wrong, unless the texts are the same."""
    format_reward: float = Field(default=0.0, ge=0)
    """What an answer in a box gives beside the 1 for a right one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """An answer as it is compared: the texts with and without a unit; the number, if it is a plain one; why it cannot be computed with."""

    texts: tuple[str, ...]
    number: tuple[Fraction, bool] | None
    refusal: str | None


def build(settings: MathSettings) -> BuiltScorer:
    """Make a scorer of mathematical answers."""

    def score(prompt: str, response: str, row: Row) -> dict[str, float]:
        golds = gold_answers(row, settings)
        if problem := _unreadable_gold(golds, settings):
            raise NotScoredError(problem)
        answer = find_answer(response, settings.extract)
        correct = float(any(equal(gold, answer, settings.percent, settings.max_expression_chars) for gold in golds))
        if settings.format_reward == 0:
            return {"correct": correct}
        return {"correct": correct, "format": settings.format_reward * bool(last_boxed(response))}

    return BuiltScorer(function=score, prepare=prepare, content=shared_code("math_text", "math_compare", libraries=LIBRARIES))


def prepare() -> None:
    """Import the parser and let it read once, which builds its tables."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    importlib.import_module("shoal_reward.verifiers.math_compare")
    _parsed(r"\frac{1}{2}x")


def _unreadable_gold(golds: Sequence[str], settings: MathSettings) -> str | None:
    """Why a row's right answers cannot be scored against; None if they can."""
    if not golds:
        return f"the row's column {settings.column!r} is empty: give the right answer"
    return next((why for gold in golds if (why := unreadable(gold, settings.percent, settings.max_expression_chars))), None)


def equal(gold: str, answer: str, percent: Percent = "sign_dropped", max_chars: int = 500) -> bool:
    """Tell whether an answer is the right one.

    Args:
        gold, answer: as `find_answer` gives them; gold is readable.
        percent, max_chars: see `MathSettings`.
    Raises: whatever sympy raises while it compares.
    """
    if not answer or len(answer) > 10 * max_chars:
        return False
    right, given = _reading(gold, percent, max_chars), _reading(answer, percent, max_chars)
    if right.number is not None and given.number is not None:
        return _same_numbers(right.number, given.number)
    pairs = list(zip(*_paired(right.texts, given.texts), strict=True))
    if any(plain(first) == plain(second) for first, second in pairs):
        return True
    if is_words(right.texts[0]) or is_words(given.texts[0]):
        return plain(right.texts[0]).casefold() == plain(given.texts[0]).casefold()
    if right.refusal is not None or given.refusal is not None:
        return False
    return any(_same_parsed(first, second) for first, second in pairs)


def unreadable(gold: str, percent: Percent = "sign_dropped", max_chars: int = 500) -> str | None:
    """Say why a right answer cannot be scored against; None if it can."""
    if len(gold) > 10 * max_chars:  # the caches are to hold no such texts
        return f"the right answer has {len(gold)} characters, and mathematics is read up to {max_chars}: score it with exact"
    reading = _reading(gold, percent, max_chars)
    if reading.number is not None or is_words(reading.texts[0]):
        return None
    if reading.refusal is not None:
        return f"the right answer {gold[:100]!r} is not computed with: {reading.refusal}"
    parsed = _parsed(reading.texts[-1])
    if parsed is None:
        return f"the right answer {gold[:100]!r} cannot be read as mathematics: mend it, or score it with exact"
    return None


@functools.lru_cache(maxsize=4096)
def _reading(text: str, percent: Percent, max_chars: int) -> Reading:
    literal = rewritten(text, percent)
    bare = rewritten(without_unit(literal), percent)
    texts = (literal,) if bare == literal else (literal, bare)
    return Reading(texts=texts, number=plain_number(bare), refusal=refusal(literal, max_chars))


def _paired(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Pair the readings: as written with as written, without units with without units."""
    num_readings = max(len(first), len(second))
    return tuple((texts * 2)[:num_readings] if len(texts) == 1 else texts for texts in (first, second))  # type: ignore[return-value]


def _same_numbers(right: tuple[Fraction, bool], given: tuple[Fraction, bool]) -> bool:
    """Compare as `math_compare.same_decimals` does, without sympy."""
    if not right[1] and not given[1]:
        return right[0] == given[0]
    difference = abs(right[0] - given[0])
    return difference <= DECIMAL_TOLERANCE and difference <= max(abs(right[0]), abs(given[0])) * DECIMAL_RELATIVE_TOLERANCE


def _same_parsed(right: str, given: str) -> bool:
    from shoal_reward.verifiers.math_compare import same

    gold, answer = _parsed(right), _parsed(given)
    # Braces are a set, parentheses a pair or an interval, though the parser lets either pass for the other.
    is_set_beside_pair = right.startswith("\\{") and given.startswith(("(", "["))
    if gold is None or answer is None or is_set_beside_pair or not same_bases(right, given):
        return False
    return same(gold, answer)


@functools.lru_cache(maxsize=4096)
def _parsed(latex: str) -> Any | None:  # noqa: ANN401 - sympy has no types
    """Read an expression; None if it cannot be read."""
    from latex2sympy2_extended import NormalizationConfig, normalize_latex
    from math_verify.parser import parse_latex_cached

    from shoal_reward.verifiers.math_compare import canonical

    config = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False)
    try:
        parsed = canonical(parse_latex_cached(normalize_latex(latex, config)))
    except Exception:  # noqa: BLE001 - the parser raises all sorts on text that is no mathematics; were it broken, no right answer would be read
        return None
    return None if _has_no_value(parsed) else parsed


def _has_no_value(parsed: Any) -> bool:  # noqa: ANN401 - as above
    from sympy import Expr, nan, zoo

    return isinstance(parsed, Expr) and parsed.has(nan, zoo)


KIND = ScorerKind(description="1 if the answer is mathematically the row's, else 0.", settings=MathSettings, build=build)
