"""From a judge's answer to numbers, strictly: what is not exactly the asked form is an error, never a score.

A line or an object that stands in the judged text as well is never taken for the judge's own: a model that is told to write
"Score: 10" gains nothing by it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

from shoal.errors import DataError
from shoal_reward.judge.settings import ScoreRange

_NUMBER = r"[-+]?(?:\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})"
_SCORE_LINE = re.compile(rf"[*_]{{0,2}}score[*_]{{0,2}}\s*:\s*[*_]{{0,2}}\s*({_NUMBER})(?:\s*/\s*(\d{{1,15}}))?\s*[*_]{{0,2}}\.?", re.I)
_MAX_LINE_CHARS = 100
_BLOCK = "```"
_BLOCK_STARTS = ("", "json")
_END_OF_THOUGHT = "</think>"
_EXCERPT_CHARS = 120


def read_score_line(answer: str, score: ScoreRange, judged: Sequence[str]) -> float:
    """Read the number of the last line.

    Args:
        answer: of the judge; a thought that ends with </think> is left out.
        score: allowed range.
        judged: texts that the judge read; their lines do not count.
    Raises: DataError: no line of its own, several that differ, text behind it, or out of range.
    """
    lines = [line.strip() for line in _behind_thought(answer).splitlines() if line.strip()]
    quoted = _quoted_numbers(judged)
    matches = [(line, match) for line in lines if (match := _score_in(line))]
    if not matches or lines[-1] != matches[-1][0]:
        raise DataError(f"the judge's answer does not end with a line `Score: x`: {_excerpt(answer)}")
    own = {_value(match, score) for _, match in matches if float(match[1]) not in quoted}
    if not own:
        raise DataError(f"the judge's only score line {lines[-1]!r} stands in the judged text too: it may be a quotation")
    last = _value(matches[-1][1], score)
    if own != {last}:
        raise DataError(f"the judge's answer has several score lines that differ: {_excerpt(answer)}")
    return _in_range(last, "the score", score)


def read_object(answer: str, fields: Mapping[str, ScoreRange], judged: Sequence[str]) -> dict[str, float]:
    """Read the numbers of an answer that is one JSON object, alone or in a ``` block; other members are ignored.

    Args:
        answer: of the judge; a thought that ends with </think> is left out.
        fields: names and ranges of the numbers.
        judged: texts that the judge read; an object that stands there does not count.
    Raises: DataError: it is not one object, or a number is missing, given twice, no number or out of range.
    """
    text = _without_block(_behind_thought(answer).strip())
    members = _members(text, answer)
    if any(_without_blanks(text) in _without_blanks(other) for other in judged):
        raise DataError("the judge's object stands in the judged text too: it may be a quotation")
    return {name: _in_range(_number(members, name, answer), name, allowed) for name, allowed in fields.items()}


def _members(text: str, answer: str) -> dict[str, object]:
    try:
        members = json.loads(text, object_pairs_hook=_once_each)
    except (ValueError, RecursionError):
        raise DataError(f"the judge's answer is not one JSON object: {_excerpt(answer)}") from None
    if not isinstance(members, dict):
        raise DataError(f"the judge's answer is JSON, but not an object: {_excerpt(answer)}")
    return members


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member is given twice")
    return members


def _number(members: Mapping[str, object], name: str, answer: str) -> float:
    value = members.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DataError(f"the judge's object has no number {name!r}: {_excerpt(answer)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _value(match: re.Match[str], score: ScoreRange) -> float:
    if match[2] is not None and float(match[2]) != score.high:
        raise DataError(f"the judge's score is out of {match[2]}, not out of {score.high:g}")
    return float(match[1])


def _in_range(value: float, what: str, allowed: ScoreRange) -> float:
    if not allowed.low <= value <= allowed.high:
        raise DataError(f"{what} of the judge is {value:g}, which is outside {allowed.low:g} to {allowed.high:g}")
    return value


def _quoted_numbers(texts: Sequence[str]) -> frozenset[float]:
    """Numbers of score lines in the judged texts."""
    lines = (line for text in texts for line in text.splitlines())
    return frozenset(float(match[1]) for line in lines if (match := _score_in(line)))


def _score_in(line: str) -> re.Match[str] | None:
    # Long runs of blanks would keep the pattern busy for hours.
    short = " ".join(line.split())
    return _SCORE_LINE.fullmatch(short) if len(short) <= _MAX_LINE_CHARS else None


def _without_block(text: str) -> str:
    """What stands in a text that is one ``` block; another text as it is."""
    first, _, rest = text.partition("\n")
    is_block = first.startswith(_BLOCK) and first.removeprefix(_BLOCK).strip() in _BLOCK_STARTS and rest.endswith(_BLOCK)
    return rest.removesuffix(_BLOCK).strip() if is_block else text


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _behind_thought(answer: str) -> str:
    return answer.rpartition(_END_OF_THOUGHT)[2]


def _excerpt(answer: str) -> str:
    tail = " ".join(answer[-4 * _EXCERPT_CHARS :].split())
    return repr(tail if len(tail) <= _EXCERPT_CHARS else "…" + tail[1 - _EXCERPT_CHARS :])
