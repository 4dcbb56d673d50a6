"""Mathematical answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_reward.kinds import build_scorer
from shoal_reward.verifiers import math as math_kind

from shoal.config.reward_service import ScorerDefinition
from shoal.errors import DataError
from shoal.reward import NotScoredError, Row

Score = Callable[[str, str, Row], Any]


def scorer(**settings: object) -> Score:
    return build_scorer("mine", ScorerDefinition(kind="math", settings=settings)).function


@pytest.fixture(scope="module")
def score() -> Score:
    return scorer()


def correct(score: Score, gold: object, response: str) -> float | None:
    try:
        return float(score("", response, {"answer": gold})["correct"])
    except NotScoredError:
        return None


@pytest.mark.parametrize(
    ("gold", "response", "expected"),
    [
        ("1/2", r"\boxed{\frac{1}{2}}", 1.0),
        ("1/2", r"\boxed{\frac{1}{3}}", 0.0),
        ("42", r"\fbox{42}", 1.0),
        ("42", r"\boxed{42", 0.0),
        ("42", r"\boxed{}", 0.0),
        ("42", "", 0.0),
        ("E", r"\boxed{\text{E}}", 1.0),
        ("5", "5", 1.0),
        ("5", r"\boxed{5}", 1.0),
        (r"\boxed{5}", "5", 1.0),
        ("so 2 + 3 = 5\n#### 5", r"\boxed{5}", 1.0),
        ("1/2004!", r"\boxed{1/2006!}", 0.0),
        (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", 0.0),
        (r"\frac{1}{2004!}", r"\boxed{1/2004!}", 1.0),
        ("1/2^99", r"\boxed{1/2^98}", 0.0),
        ("1/2^{99}", r"\boxed{1/2^{98}}", 0.0),
        ("1/2^{99}", r"\boxed{2^{-99}}", 1.0),
        ("x/2^{99}", r"\boxed{x/2^{98}}", 0.0),
        ("x = 1/2^{99}", r"\boxed{x = 1/2^{98}}", 0.0),
        (r"\{1/2^{99}, 1\}", r"\boxed{\{1/2^{98}, 1\}}", 0.0),
        ("0", r"\boxed{1/2^{99}}", 0.0),
        ("2^{200}+1", "2^{200}", 0.0),
        ("0.0000001", "0.0000002", 0.0),
        ("dog", "", 0.0),
        ("dog", r"\boxed{}", 0.0),
        ("dog", "dog", 1.0),
        ("dog", "do", 0.0),
        ("dog", "god", 0.0),
        ("Monday", r"\boxed{\text{monday}}", 1.0),
        ("no", "on", 0.0),
        ("50", r"\boxed{50\%}", 1.0),
        (r"50\%", r"\boxed{0.5}", 0.0),
        (r"50\%", "50 percent", 1.0),
    ],
)
def test_reported_cases(score: Score, gold: str, response: str, expected: float) -> None:
    assert correct(score, gold, response) == expected


SAME = [
    ("1/3", "0.333333"),
    (r"\frac{3}{2}", "1 1/2"),
    (r"-\frac{3}{2}", r"-1\frac{1}{2}"),
    ("1000", "1,000"),
    ("1000", r"1{,}000"),
    ("1000", r"1\,000"),
    ("1 000", "1000"),
    ("150000", "1.5e5"),
    (r"1.5 \times 10^5", "150,000"),
    ("12 million", "12000000"),
    (r"\frac13", r"0.\overline{3}"),
    ("5", r"5 \text{ cm}^2"),
    ("5 cm", "5"),
    ("5", "5 km/h"),
    ("5", r"\$5.00"),
    ("90", r"90^\circ"),
    ("12 m", "12m"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"3\sqrt{5}", "3 sqrt(5)"),
    (r"\pi/2", "0.5π"),
    (r"\pi", "3.14159265"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sin 2x", r"2\sin x\cos x"),
    ("1", r"\sin^2 x+\cos^2 x"),
    ("-1", "i^2"),
    ("5", "x = 5"),
    ("x = 5", "5"),
    ("x = 2", "2x = 4"),
    ("y = 1/x", "xy = 1"),
    ("x > 1", "1 < x"),
    ("1 < x < 2", "2 > x > 1"),
    ("1 < x < 2", "(1, 2)"),
    (r"x \in [1, 2]", "[1, 2]"),
    ("1, 2, 3", "3, 2, 1"),
    ("3, 5", r"x = 3 \text{ or } x = 5"),
    (r"\{1, \frac12\}", r"\{0.5, 1\}"),
    ("(1, 2)", "1, 2"),
    ("(a, b)", "a, b"),
    (r"(\frac12, 3)", r"\left(0.5, 3\right)"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)"),
    (r"\pm 2", r"x = \pm 2"),
    (r"\begin{pmatrix}1/2&0\end{pmatrix}", r"\begin{bmatrix}0.5&0\end{bmatrix}"),
    (r"\binom{5}{2}", "10"),
    (r"2^{2^{10}}", "2^{1024}"),
    (r"\text{(B)}", "B"),
    (r"\emptyset", r"\{\}"),
]
DIFFERENT = [
    ("1/3", "0.33"),
    ("1 1/2", "1"),
    ("2m", "2"),
    ("x+2t", "x+2"),
    ("(1, 2)", "(2, 1)"),
    ("(1, 2)", "(1, 2]"),
    (r"\{1, 2\}", "(1, 2)"),
    ("1, 2", "1, 2, 3"),
    ("1, 2", "1, 1"),
    ("x = 1", "y = 1"),
    ("x^2 = 4", "x = 2"),
    ("x > 1", "x < 1"),
    ("x > 1", r"x \ge 1"),
    ("1 < 2", "1 < 3"),
    (r"\sqrt{x^2}", "x"),
    ("x", "y"),
    (r"\infty", r"-\infty"),
    ("12_5", "12_7"),
    ("3+4i", "3-4i"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1&3\end{pmatrix}"),
    ("7", "3 dozen"),
    ("3", "3 dozen"),
    ("5", "1/0"),
    ("5", r"\frac{5"),
    ("5", "((((("),
    ("5", "five"),
    ("100", "10"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_the_same_in_another_form_is_right(score: Score, gold: str, answer: str) -> None:
    assert correct(score, gold, rf"\boxed{{{answer}}}") == 1.0


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_something_else_is_wrong(score: Score, gold: str, answer: str) -> None:
    assert correct(score, gold, f"<answer>{answer}</answer>") == 0.0


@pytest.mark.parametrize("gold", ["", "  ", r"\boxed{}", r"\frac{1", "x + = 1", "1/0", r"10^{10^{10}}", "1" * 20_000, "5\0"])
def test_an_unreadable_gold_is_not_scored_and_is_reported(score: Score, gold: str) -> None:
    for response in ("5", gold):
        with pytest.raises(NotScoredError, match="right answer"):
            score("", response, {"answer": gold})


def test_a_readable_gold_is_scored(score: Score) -> None:
    for gold in (*(pair[0] for pair in SAME), 42, 0.5, ["1", "2"]):
        assert correct(score, gold, "5") is not None


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": True}, {"answer": {"x": 1}}])
def test_a_gold_that_is_no_text_is_an_error_of_the_row(score: Score, row: Row) -> None:
    with pytest.raises(DataError, match="'answer'"):
        score("", "5", row)


def test_any_of_several_golds_is_right(score: Score) -> None:
    assert correct(score, ["1/2", "7"], "0.5") == 1.0
    assert correct(score, ["1/2", "7"], "8") == 0.0


@pytest.mark.parametrize(
    ("rule", "fifty", "half", "expected"),
    [("sign_dropped", "50", "0.5", (1.0, 0.0)), ("hundredth", "50", "0.5", (0.0, 1.0))],
)
@pytest.mark.parametrize("percent", [r"50\%", "50%", "50 percent", r"50\text{ percent}", r"\frac{100}{2}\%"])
def test_the_percent_rule_holds_in_both_directions(rule: str, fifty: str, half: str, expected: tuple[float, float], percent: str) -> None:
    score = scorer(percent=rule)
    assert (correct(score, percent, fifty), correct(score, percent, half)) == expected
    assert (correct(score, fifty, percent), correct(score, half, percent)) == expected
    assert correct(score, percent, "50%") == 1.0


async def test_any_thread_gives_the_same_score(score: Score) -> None:
    def third() -> float | None:
        return correct(score, "1/3", r"\boxed{\frac{1}{3}}")

    def thirds_of_x() -> float | None:
        return correct(score, "x/3", rf"\boxed{{\frac{{x}}{{3}} + {threading.get_ident()} - {threading.get_ident()}}}")

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(third).result(timeout=30) == 1.0
        assert pool.submit(thirds_of_x).result(timeout=30) == 1.0
        assert await asyncio.get_running_loop().run_in_executor(pool, third) == 1.0
    assert await asyncio.to_thread(thirds_of_x) == 1.0
    assert third() == thirds_of_x() == 1.0


def test_an_exception_while_comparing_is_no_zero(score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(gold: object, answer: object) -> bool:
        raise ValueError("signal only works in main thread of the main interpreter")

    monkeypatch.setattr("shoal_reward.verifiers.math_compare.same", broken)
    with pytest.raises(ValueError, match="signal only"):
        score("", "x+2", {"answer": "2+x"})


def test_a_broken_parser_scores_nothing(score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(latex: str) -> object:
        raise RuntimeError("no grammar")

    math_kind._parsed.cache_clear()
    monkeypatch.setattr("math_verify.parser.parse_latex_cached", broken)
    try:
        assert correct(score, "x+2", "x+3") is None
    finally:
        math_kind._parsed.cache_clear()


@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}",
        "9^{9^{9^{9}}}",
        "9^9^9^9",
        "x^{9999999999}",
        "99999999!",
        r"2^{1000!}",
        r"\binom{1000000}{500000}",
        r"\sum_{k=1}^{100000000} \frac{1}{k}",
        "1" * 100_000,
        "(" * 5_000 + "1" + ")" * 5_000,
        "{" * 100_000 + "5" + "}" * 100_000,
        r"\frac{" * 300 + "1" + "}{2}" * 300,
        r"\sqrt{" * 900 + "1" + "}" * 900,
        "5\0",
        "\ud800",
        "5" + " " * 10_000_000 + "6",
        "{" * 1_000_000,
        "+-" * 240,
        "9" * 1_000 + "." + "9" * 1_000,
    ],
    ids=lambda answer: answer[:20].encode("unicode_escape").decode(),
)
def test_hostile_answers_are_wrong_at_once(score: Score, answer: str) -> None:
    start = time.process_time()
    assert correct(score, "7", rf"\boxed{{{answer}}}") == 0.0
    assert correct(score, "x+7", f"<answer>{answer}</answer>") == 0.0
    assert time.process_time() - start < 4


def test_a_boxed_answer_can_give_a_reward_of_its_own() -> None:
    score = scorer(format_reward=0.25)
    assert score("", r"\boxed{6}", {"answer": "5"}) == {"correct": 0.0, "format": 0.25}
    assert score("", "5", {"answer": "5"}) == {"correct": 1.0, "format": 0.0}


def test_the_rules_of_extraction_can_be_chosen() -> None:
    assert correct(scorer(extract=["box"]), "5", "5") == 0.0
    assert correct(scorer(extract=["last_number"]), "5", "first 4 and then 5 of them") == 1.0


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6), st.integers(1, 50))
@settings(max_examples=50, deadline=None)
def test_a_fraction_equals_itself_expanded_and_not_its_neighbour(numerator: int, denominator: int, factor: int) -> None:
    score = scorer()
    gold = rf"\frac{{{numerator}}}{{{denominator}}}"
    assert correct(score, gold, f"{numerator * factor}/{denominator * factor}") == 1.0
    assert correct(score, gold, f"{numerator * factor + 1}/{denominator * factor}") == 0.0


PIECES = st.sampled_from(
    [
        *"0123456789xyzi+-*/^_=<>()[]{},.;:!%$ ",
        *(rf"\{name} " for name in ("frac", "sqrt", "pi", "infty", "cup", "in", "le", "text", "pm", "sin")),
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=30))
@settings(max_examples=50, deadline=None)
def test_whatever_an_answer_says_it_is_right_or_wrong(answer: str) -> None:
    assert correct(scorer(), "7/3", f"<answer>{answer}</answer>") in (0.0, 1.0)
    assert correct(scorer(), "x+1", f"<answer>{answer}</answer>") in (0.0, 1.0)
