"""Tells whether two parsed answers are the same.

math-verify's own comparison rounds differences to 0, so that 1/2004! equals 1/2006!. Here numbers are compared by their relative
difference, to as many digits as they need, and expressions with variables by their values at points. What a form may be
written as (x = 5 for 5, {5} for 5, (1, 2) as a pair or an interval) follows math-verify.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify.grader import (
    is_assignment_relation,
    is_equation,
    is_relation,
    sympy_compare_symbols,
    take_first_relation,
    take_last_relation,
    unwrap_fcs,
)
from sympy.core.relational import Relational

DIGITS = 50
TOLERANCE = sympy.Float("1e-40", 10)
"""Relative difference up to which exact numbers are equal at DIGITS digits."""
DECIMAL_TOLERANCE = sympy.Float("5e-7", 10)
"""Difference up to which a decimal is a number that it rounds: half a unit of the sixth decimal place ..."""
DECIMAL_RELATIVE_TOLERANCE = sympy.Float("1e-4", 10)
"""... and the relative difference up to which it is, so that small numbers are not all equal."""
FLOAT_NOISE = sympy.Float("1e-12", 10)
"""Relative difference that decimals of machine precision may have."""
MAX_DIGITS = 12_000
MAX_SOLVED_OPERATIONS = 60
NUM_POINTS = 6
MIN_POINTS = 3

_SWAPPED = {
    sympy.StrictGreaterThan: sympy.StrictLessThan,
    sympy.GreaterThan: sympy.LessThan,
}
Expression = Any  # sympy has no types; any sympy object


def same(gold: Expression, answer: Expression) -> bool:
    """Tell whether two parsed answers are the same.

    Args:
        gold, answer: sympy objects, `canonical`.
    """
    gold, answer = _unwrapped(gold, answer)
    if gold == answer:
        return True
    if is_relation(gold) and is_relation(answer):
        return _same_relations(gold, answer)
    if is_relation(gold) and isinstance(answer, sympy.Set):
        gold = _as_set(gold)
    if isinstance(gold, sympy.Set | sympy.Tuple) or isinstance(answer, sympy.Set | sympy.Tuple):
        return _same_collections(gold, answer)
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return gold.shape == answer.shape and all(same(g, a) for g, a in zip(gold.flat(), answer.flat(), strict=True))
    if isinstance(gold, sympy.Symbol) or isinstance(answer, sympy.Symbol):
        return bool(sympy_compare_symbols(gold, answer))
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        return _same_expressions(gold, answer)
    return False


def canonical(parsed: Expression) -> Expression:
    """Take the parser's own marks out: assumptions of symbols, the imaginary unit as a letter, unevaluated hundredths of percent."""
    if isinstance(parsed, sympy.MatrixBase):
        return parsed.applyfunc(canonical)
    if isinstance(parsed, Relational):
        # Evaluated, x in [1, 2] or x = +-2 would become false: the parser writes them as equations.
        return parsed.func(canonical(parsed.lhs), canonical(parsed.rhs), evaluate=False)
    if isinstance(parsed, And | FiniteSet):
        return type(parsed)(*map(canonical, parsed._unsorted_args), evaluate=False)
    if isinstance(parsed, sympy.Tuple):
        return sympy.Tuple(*map(canonical, parsed))
    symbols = {symbol: sympy.I if symbol.name == "i" else sympy.Symbol(symbol.name) for symbol in parsed.free_symbols if symbol.is_Symbol}
    kept = {mark: mark.args[0] for mark in parsed.atoms(sympy.UnevaluatedExpr)} if parsed.has(sympy.UnevaluatedExpr) else {}
    return parsed.xreplace({**symbols, **kept}) if symbols or kept else parsed


def _unwrapped(gold: Expression, answer: Expression) -> tuple[Expression, Expression]:
    """Make x = 2 + 3 = 5 into x = 5, and leave the left side out where the other one has none."""
    names_gold = is_assignment_relation(gold)
    gold, answer = (_shortened(side) if is_assignment_relation(side) else side for side in (gold, answer))
    if is_equation(answer) and not is_equation(gold):
        return gold, take_last_relation(answer).rhs
    if names_gold and not is_equation(answer):
        return take_last_relation(gold).rhs, answer
    return gold, answer


def _shortened(chain: Expression) -> Expression:
    return sympy.Eq(take_first_relation(chain).lhs, take_last_relation(chain).rhs, evaluate=False)


def _as_set(relation: Expression) -> Expression:
    try:
        return unwrap_fcs(relation).as_set()
    except (NotImplementedError, ValueError, TypeError, AttributeError):
        return relation


def _same_relations(gold: Expression, answer: Expression) -> bool:
    golds, answers = _relations(gold), _relations(answer)
    return _matched(golds, answers, _same_relation)


def _relations(relation: Expression) -> Sequence[Relational]:
    return list(relation._unsorted_args) if isinstance(relation, And) else [relation]


def _same_relation(gold: Relational, answer: Relational) -> bool:
    (gold_kind, gold_difference, gold_sides), (kind, difference, sides) = _sorted_sides(gold), _sorted_sides(answer)
    if gold_kind is not kind:
        return False
    if gold_difference is None or difference is None or not gold.free_symbols:
        return all(same(g, a) for g, a in zip(gold_sides, sides, strict=True))
    factor = _constant_factor(gold_difference, difference)
    if kind in (sympy.Eq, sympy.Ne):
        return factor is not None or (kind is sympy.Eq and _same_solutions(gold, answer))
    return factor is not None and bool(factor > 0)


def _sorted_sides(relation: Relational) -> tuple[type, Expression | None, tuple[Expression, Expression]]:
    """A relation as kind, left minus right (None where these are not numbers) and sides; > and >= turned into < and <=."""
    kind, left, right = type(relation), relation.lhs, relation.rhs
    if kind in _SWAPPED:
        kind, left, right = _SWAPPED[kind], right, left
    is_number = isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)
    return kind, left - right if is_number else None, (left, right)


def _constant_factor(gold: Expression, answer: Expression) -> Expression | None:
    """What gold must be multiplied with to be the answer, if that is the same number everywhere."""
    tolerance = _tolerance(gold, answer)
    factors = [answer_value / gold_value for gold_value, answer_value in _values(gold, answer) if gold_value != 0]
    if len(factors) < MIN_POINTS or not factors[0].is_comparable or factors[0] == 0:
        return None
    return factors[0] if all(_close(factor, factors[0], tolerance) for factor in factors) else None


def _same_solutions(gold: Relational, answer: Relational) -> bool:
    symbols = sorted(gold.free_symbols, key=str)
    is_small = sympy.count_ops(gold) + sympy.count_ops(answer) <= MAX_SOLVED_OPERATIONS
    if not symbols or gold.free_symbols != answer.free_symbols or not is_small:
        return False
    try:
        solutions, answers = sympy.solve(gold, symbols[0]), sympy.solve(answer, symbols[0])
    except (NotImplementedError, ValueError, TypeError):
        return False
    return bool(solutions) and _matched(solutions, answers, same)


def _same_collections(gold: Expression, answer: Expression) -> bool:
    if isinstance(gold, sympy.Interval) and isinstance(answer, sympy.Interval):
        is_open_alike = gold.left_open == answer.left_open and gold.right_open == answer.right_open
        return bool(is_open_alike) and same(gold.start, answer.start) and same(gold.end, answer.end)
    golds, answers = _items(gold, answer), _items(answer, gold)
    if golds is not None and answers is not None:
        if isinstance(gold, sympy.FiniteSet) and not isinstance(answer, sympy.Tuple | sympy.Interval):
            return _matched(golds, answers, same)
        return len(golds) == len(answers) and all(same(g, a) for g, a in zip(golds, answers, strict=True))
    if type(gold) is type(answer) and isinstance(gold, sympy.Union | sympy.Intersection):
        return _matched(list(gold.args), list(answer.args), _same_collections)
    return False


def _items(collection: Expression, other: Expression) -> Sequence[Expression] | None:
    """What a collection holds, in the order written; an open interval beside something else than a set of numbers is a pair."""
    if isinstance(collection, sympy.Tuple):
        return list(collection)
    if isinstance(collection, sympy.FiniteSet):
        return list(getattr(collection, "_unsorted_args", collection.args))
    if isinstance(collection, sympy.Interval):
        is_pair = collection.left_open and collection.right_open and isinstance(other, sympy.Tuple | sympy.FiniteSet)
        return [collection.start, collection.end] if is_pair else None
    return None if isinstance(collection, sympy.Set) else [collection]


def _matched(golds: Sequence[Expression], answers: Sequence[Expression], equal: Callable[[Expression, Expression], bool]) -> bool:
    """Whether each gold has an answer of its own, in any order."""
    rest = list(answers)
    for gold in golds:
        place = next((index for index, answer in enumerate(rest) if equal(gold, answer)), None)
        if place is None:
            return False
        del rest[place]
    return not rest


def _same_expressions(gold: Expression, answer: Expression) -> bool:
    if not gold.free_symbols and not answer.free_symbols:
        return same_numbers(gold, answer)
    tolerance, num_points = _tolerance(gold, answer), 0
    for gold_value, answer_value in _values(gold, answer):
        if not _close(gold_value, answer_value, tolerance):
            return False
        num_points += 1
    return num_points >= MIN_POINTS or bool(sympy.simplify(gold - answer) == 0)


def same_numbers(gold: Expression, answer: Expression) -> bool:
    """Tell whether two numbers are the same: exact ones exactly, as far as that can be computed; a decimal as far as it rounds."""
    gold_value, answer_value = gold.evalf(DIGITS), answer.evalf(DIGITS)
    if not _is_finite(gold_value) or not _is_finite(answer_value):
        return bool(gold_value == answer_value and gold_value not in (sympy.nan, sympy.zoo))
    if gold.has(sympy.Float) or answer.has(sympy.Float):
        return same_decimals(gold_value, answer_value)
    if not _close(gold_value, answer_value, TOLERANCE):
        return False
    digits = _num_digits(gold_value)
    if digits <= DIGITS // 2:
        return True
    digits = min(digits + DIGITS, MAX_DIGITS)
    return _close(gold.evalf(digits), answer.evalf(digits), sympy.Float(10, 10) ** (10 - digits))


def same_decimals(gold: Expression, answer: Expression) -> bool:
    """Tell whether two values are the same of which one is a decimal, and so may be rounded."""
    difference, size = _distance(gold, answer)
    is_rounded = difference <= DECIMAL_TOLERANCE and difference <= size * DECIMAL_RELATIVE_TOLERANCE
    return bool(is_rounded or difference <= size * FLOAT_NOISE)


def _tolerance(*expressions: Expression) -> Expression:
    return FLOAT_NOISE if any(expression.has(sympy.Float) for expression in expressions) else TOLERANCE


def _values(gold: Expression, answer: Expression) -> Iterator[tuple[Expression, Expression]]:
    """Values of both at points of either sign, where both have one."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    for point in range(NUM_POINTS):
        places = {symbol: _coordinate(point, index) for index, symbol in enumerate(symbols)}
        values = gold.evalf(DIGITS, subs=places), answer.evalf(DIGITS, subs=places)
        if all(_is_finite(value) for value in values):
            yield values


def _coordinate(point: int, index: int) -> Expression:
    size = sympy.Rational((7919 * (point + 1) * (index + 2)) % 10007 + 1, 2003)
    return size if (point >> (index % 3)) % 2 == 0 else -size


def _is_finite(value: Expression) -> bool:
    return all(part.is_Float or part.is_Rational for part in value.as_real_imag()) if value.is_number else False


def _close(first: Expression, second: Expression, tolerance: Expression) -> bool:
    difference, size = _distance(first, second)
    return bool(difference <= size * tolerance)


def _distance(first: Expression, second: Expression) -> tuple[Expression, Expression]:
    """The difference of two values and the larger one's size, by real and imaginary parts."""
    parts = [[_significant(part) for part in value.as_real_imag()] for value in (first, second)]
    difference = max(abs(a - b) for a, b in zip(*parts, strict=True))
    return difference, max(abs(part) for both in parts for part in both)


def _significant(part: Expression) -> Expression:
    # One bit of precision is what sympy leaves where all digits cancelled.
    return sympy.Integer(0) if part.is_Float and part._prec <= 1 else part


def _num_digits(value: Expression) -> int:
    """How many places before or after the point a value's size takes."""
    exponents = [part._mpf_[2] + part._mpf_[3] for part in value.as_real_imag() if part.is_Float and part != 0]
    return int(max((abs(exponent) for exponent in exponents), default=0) * 0.30103) + 1
