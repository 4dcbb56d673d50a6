"""Multiple choice: the answer names the right option by its label or by its text, never by a part of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from shoal.errors import DataError
from shoal.reward import Row
from shoal_reward.kinds import BuiltScorer, ScorerKind
from shoal_reward.verifiers.extraction import find_answer, peel
from shoal_reward.verifiers.gold import AnswerSettings, gold_answers, shared_code

_LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LABEL = re.compile(r"[(\[]?\s*([A-Za-z0-9])\s*[)\].:]*", re.DOTALL)
_LABEL_AND_TEXT = re.compile(r"(?:[(\[]\s*([A-Za-z0-9])\s*[)\]]|([A-Za-z0-9])\s*[).:])[).:]*\s*(\S.*)", re.DOTALL)
_NAMED = re.compile(r"(?:option|choice)\s+", re.IGNORECASE)


class ChoiceSettings(AnswerSettings):
    """Where the options stand."""

    options_column: str = Field(default="options", min_length=1)
    """Column with the options' texts (a list: A is the first), or label -> text; a row may lack it."""


def build(settings: ChoiceSettings) -> BuiltScorer:
    """Make a scorer of multiple choice."""

    def score(prompt: str, response: str, row: Row) -> dict[str, float] | None:
        golds = gold_answers(row, settings)
        if not golds:
            return None
        options = _options(row, settings.options_column)
        chosen = _chosen(find_answer(response, settings.extract), options)
        return {"correct": float(chosen is not None and chosen in [_chosen(gold, options) for gold in golds])}

    return BuiltScorer(function=score, content=shared_code())


def _options(row: Row, column: str) -> dict[str, str]:
    """Label -> text as it is compared."""
    options = row.get(column)
    if options is None:
        return {}
    if isinstance(options, Sequence) and not isinstance(options, str) and len(options) <= len(_LABELS):
        options = dict(zip(_LABELS, options, strict=False))
    if not isinstance(options, dict):
        raise DataError(f"the row's column {column!r} is {type(options).__name__}; give a list of up to 26 options, or label: text")
    return {str(label).strip().upper(): _plain(str(text)) for label, text in options.items()}


def _chosen(answer: str, options: dict[str, str]) -> str | None:
    """The label that an answer names, else its text; None for an empty one."""
    answer = peel(_NAMED.sub("", answer, count=1) if _NAMED.match(answer) else answer)
    by_text = [label for label, text in options.items() if text == _plain(answer)]
    if by_text:
        return by_text[0]
    if (alone := _LABEL.fullmatch(answer)) is not None:
        return alone.group(1).upper()
    if (both := _LABEL_AND_TEXT.fullmatch(answer)) is not None:
        label = str(both.group(1) or both.group(2)).upper()
        # "B) 7" where 7 is option A contradicts itself: it names nothing.
        return label if options.get(label, _plain(both.group(3))) == _plain(both.group(3)) else None
    return _plain(answer) or None


def _plain(text: str) -> str:
    return " ".join(peel(text).rstrip(".").split()).casefold()


KIND = ScorerKind(description="1 if the answer names the right option, by label or text, else 0.", settings=ChoiceSettings, build=build)
