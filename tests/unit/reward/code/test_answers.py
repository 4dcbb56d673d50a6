"""Finding the code in a response."""

from __future__ import annotations

import pytest
from shoal_reward.code.answers import code_of
from shoal_reward.code.settings import CodePlace


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("text\n```python\nx = 1\n```\nmore\n```py\ny = 2\n```\nend", "y = 2"),
        ("```python\nx = 1\n```\n```bash\nls\n```", "x = 1"),
        ("```Python title=a.py\nx = 1\n```", "x = 1"),
        ("```bash\n```python\n```\n```python3\ny = 2\n```", "y = 2"),
        ("```python\nx = '\x0c\u2028'\n```", "x = '\x0c\u2028'"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r"),
        ("```python\n```", ""),
        ("```python\nx = 1", None),
        ("```\nx = 1\n```", None),
        ("```pythonic\nx = 1\n```", None),
        ("x = 1", None),
        ("", None),
    ],
)
def test_fence_is_the_last_closed_one_of_python(response: str, expected: str | None) -> None:
    assert code_of(response, CodePlace.FENCE) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<answer>x = 1</answer>", "x = 1"),
        ("<answer>x = 1</answer> no, <answer>\ny = 2\n</answer>", "\ny = 2\n"),
        ("<answer>so:\n```python\nx = 1\n```\n</answer>", "x = 1"),
        ("</answer><answer>x = 1", None),
        ("<answer>x = 1", None),
        ("x = 1", None),
    ],
)
def test_answer_is_the_last_closed_tag(response: str, expected: str | None) -> None:
    assert code_of(response, CodePlace.ANSWER) == expected


def test_whole_is_everything() -> None:
    assert code_of("```python\nx\n```", CodePlace.WHOLE) == "```python\nx\n```"


@pytest.mark.parametrize("place", [CodePlace.FENCE, CodePlace.ANSWER])
@pytest.mark.parametrize("piece", ["<answer>", "```python\n", "`", "</answer>", "{"])
def test_long_responses_are_read_in_linear_time(piece: str, place: CodePlace) -> None:
    assert code_of(piece * (5_000_000 // len(piece)), place) is None or "```" in piece
