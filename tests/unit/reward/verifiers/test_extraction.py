"""Finding the answer in a response."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_reward.verifiers.extraction import Rule, find_answer, last_boxed, peel

FRAGMENTS = st.sampled_from(
    [
        *(
            "\\boxed{",
            "\\fbox {",
            "\\boxed 5",
            "{",
            "}",
            "\\{",
            "\\}",
            "\\",
            "<answer>",
            "</answer>",
            "</think>",
            "#### ",
            "The answer is ",
            "answer:",
        ),
        *("$", "$$", "\\(", "\\)", "**", "\\text{", "\\mathrm{", "5", " ", "\n", ".", "x = 3.5", "\0", "\ud800", "é", "1,000", "%"),
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=25).map("".join) | st.text(max_size=200)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("5", "5"),
        ("", ""),
        (r"\boxed{5}", "5"),
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\fbox{42}", "42"),
        (r"\boxed {42}", "42"),
        (r"\boxed 42", "42"),
        (r"$\boxed 7$ apples", "7"),
        (r"\boxed{42", ""),
        (r"first \boxed{41}, then \boxed{42", ""),
        (r"\boxed{}", ""),
        (r"\boxed{ }", ""),
        (r"\boxed", ""),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed{\text{E}}", "E"),
        (r"\boxed{\mathrm{E}}", "E"),
        (r"\boxed{\text{a} \text{b}}", r"\text{a} \text{b}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxedfoo{5}", r"\boxedfoo{5}"),
        ("<answer> 5 </answer>", "5"),
        ("<answer>4</answer> no <answer>5</answer>", "5"),
        ("<answer>5", ""),
        ("<answer></answer>", ""),
        (r"\boxed{4} <answer>\boxed{5}</answer>", "5"),
        (r"<think>\boxed{4}</think>5", "5"),
        (r"<think>\boxed{4}</think>", ""),
        ("1 + 1 = 2\n#### 2", "2"),
        ("#### 1,000\nthat is it", "1,000"),
        ("The answer is 5. I hope so.", "5"),
        ("The answer is 3.5.", "3.5"),
        ("**Answer:** 5", "5"),
        ("The final answer is: $7$", "7"),
        ("answer = 4!", "4!"),
        ("The answer to this is unknown", "The answer to this is unknown"),
        ("$x$", "x"),
        ("**5**", "5"),
    ],
)
def test_find_answer(response: str, answer: str) -> None:
    assert find_answer(response) == answer


@pytest.mark.parametrize(
    ("rules", "response", "answer"),
    [
        ((Rule.BOX,), "5", ""),
        ((Rule.BOX,), r"\boxed{5}", "5"),
        ((Rule.TAG, Rule.WHOLE), r"\boxed{5}", r"\boxed{5}"),
        ((Rule.LAST_NUMBER,), "from 3 to 1,250.5 it is", "1,250.5"),
        ((Rule.LAST_NUMBER,), "none", ""),
        ((Rule.LAST_LATEX,), "so $x$ and $y^2$ hold", "y^2"),
        ((Rule.LAST_LATEX,), "so $$x$$", "x"),
        ((Rule.LAST_LATEX,), "5$", ""),
        ((Rule.WHOLE,), " 5\n", "5"),
    ],
)
def test_find_answer_looks_only_where_the_rules_say(rules: tuple[Rule, ...], response: str, answer: str) -> None:
    assert find_answer(response, rules) == answer


def test_last_boxed_tells_no_box_from_an_empty_one() -> None:
    assert last_boxed("5") is None
    assert last_boxed(r"\boxed{}") == last_boxed(r"\boxed{5") == ""


@given(TEXTS)
@settings(max_examples=400, deadline=None)
def test_finding_an_answer_in_an_answer_changes_nothing(text: str) -> None:
    answer = find_answer(text)
    assert find_answer(answer) == answer
    assert peel(answer) == answer


@given(TEXTS, st.sets(st.sampled_from(list(Rule)), min_size=1))
@settings(max_examples=300, deadline=None)
def test_an_answer_is_a_piece_of_the_text(text: str, rules: set[Rule]) -> None:
    assert find_answer(text, tuple(rules)) in text


@given(st.text(alphabet=st.characters(exclude_characters="\\{}$*<>#"), min_size=1, max_size=50).filter(lambda text: text.strip() == text))
def test_a_box_and_nothing_else_changes_no_answer(text: str) -> None:
    assert find_answer(rf"\boxed{{{text}}}") == find_answer(text)


@pytest.mark.parametrize(
    ("piece", "num"),
    [
        ("{", 1_000_000),
        ("{", 10_000_000),
        ("\\boxed{", 100_000),
        ("\\boxed{", 300_000),
        ("\\boxed", 300_000),
        ("\\boxedx", 300_000),
        ("\\text{", 300_000),
        ("<answer>", 300_000),
        ("</answer><answer>", 200_000),
        ("answer is ", 200_000),
        ("answer" + " " * 50, 20_000),
        ("####", 500_000),
        ("$", 1_000_000),
        ("1,111", 300_000),
        ("9", 10_000_000),
        ("\\", 1_000_000),
        (" ", 10_000_000),
        ("\0\ud800", 1_000_000),
    ],
)
def test_long_texts_take_no_long_time(piece: str, num: int) -> None:
    text = piece * num
    start = time.process_time()
    find_answer(text, tuple(Rule))
    assert time.process_time() - start < 2


def test_nested_braces_are_balanced_to_the_last() -> None:
    deep = "{" * 100_000 + "5" + "}" * 100_000
    assert last_boxed(rf"\boxed{deep}") == deep[1:-1]
    assert last_boxed(rf"\boxed{deep[:-1]}") == ""
