"""Finds the answer in a response: the one way in which every verifier does it, in training and in evaluation.

Every finder returns a piece of the text that holds its own marker no more, so finding the answer in an answer changes nothing:
a bare 5 and \\boxed{5} score alike. All of it takes linear time, on nested braces and on 10 MB of text too.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from enum import StrEnum

MAX_BOX_CHARS = 1 << 20
"""A box that is not closed within so many characters is not closed."""
MAX_PHRASE_CHARS = 1 << 18
"""The end of a text in which "the answer is" is looked for."""
MAX_PEELED_CHARS = 4096
"""Wrappers are peeled off texts up to this length: peeling layer by layer is quadratic in their number."""


class Rule(StrEnum):
    """Where an answer may stand.

    TAG: the last <answer></answer>. BOX: the last \\boxed{} or \\fbox{}. HASH: after the last ####.
    PHRASE: after the last "the answer is". LAST_LATEX: the last formula between dollars. LAST_NUMBER: the last number.
    WHOLE: the text itself, where no other rule finds its marker.
    """

    TAG = "tag"
    BOX = "box"
    HASH = "hash"
    PHRASE = "phrase"
    LAST_LATEX = "last_latex"
    LAST_NUMBER = "last_number"
    WHOLE = "whole"


ANSWER_RULES = (Rule.TAG, Rule.BOX, Rule.HASH, Rule.PHRASE, Rule.WHOLE)
"""The rules of every kind unless its settings say otherwise."""

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_PHRASE = re.compile(r"answer(?:\s{1,8}(?:is|equals)[ \t]{0,8}:?|[ \t]{0,8}[:=])(?:[ \t]|\*){0,8}", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?=\s|\Z)|\n")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?|[-+]?\.\d+%?")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox)\s*\{")
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))


def find_answer(response: str, rules: Sequence[Rule] = ANSWER_RULES) -> str:
    """Return the answer in a response.

    Thinking, up to the last </think>, is passed over. The rules are tried in the order of `Rule`, each on what the one before it found;
    a marker without an answer (an open or empty box, an open tag) means that there is none, whatever else the text says.

    Args:
        response: any text.
        rules: where the answer may stand.
    Returns: the answer without surrounding blanks, dollars and \\text{}; "" if there is none.
    """
    text = response[response.rfind("</think>") + len("</think>") :] if "</think>" in response else response
    is_marked = False
    for rule in _FINDERS:
        if rule in rules and (found := _FINDERS[rule](text)) is not None:
            text, is_marked = found, True
    return peel(text) if is_marked or Rule.WHOLE in rules else ""


def last_boxed(text: str) -> str | None:
    """Return what the last \\boxed or \\fbox holds; "" if it is open or empty; None without a box."""
    start = _last_box(text)
    if start is None:
        return None
    if text[start : start + 1] != "{":
        # TeX's \boxed 5 takes one token; models mean all that follows, up to the end of the formula.
        return re.split(r"[$\n]|\\[)\]]", text[start : start + MAX_BOX_CHARS], maxsplit=1)[0].strip()
    end = _closing_brace(text, start)
    return "" if end is None else text[start + 1 : end].strip()


def _last_box(text: str) -> int | None:
    """Where the contents of the last box begin."""
    found = _last_match(_BOX, text)
    return None if found is None else found.end()


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None


def _closing_brace(text: str, start: int) -> int | None:
    """The place of the brace that closes the one at start; escaped braces are text."""
    depth = 0
    for brace in _BRACE.finditer(text, start, start + MAX_BOX_CHARS):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return None


def last_tagged(text: str) -> str | None:
    """Return what the last <answer></answer> holds; "" if it is open; None without a tag."""
    start = text.rfind("<answer>")
    if start < 0:
        return None
    end = text.find("</answer>", start)
    return "" if end < 0 else text[start + len("<answer>") : end].strip()


def after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last ####, as GSM8K writes it; None without one."""
    place = text.rfind("####")
    return None if place < 0 else text[place + 4 :].strip().split("\n", 1)[0].strip()


def after_phrase(text: str) -> str | None:
    """Return the rest of the sentence after the last "answer is", "answer:" or "answer ="; None without one."""
    text = text[-MAX_PHRASE_CHARS:]
    found = _last_match(_PHRASE, text)
    return None if found is None else _SENTENCE_END.split(text[found.end() :].lstrip(), maxsplit=1)[0].strip()


def last_latex(text: str) -> str | None:
    """Return the last formula between dollars; None without one."""
    end = text.rfind("$")
    start = text.rfind("$", 0, end) if end > 0 else -1
    if start >= 0 and start + 1 == end:  # $$ ... $$
        end, start = start, text.rfind("$", 0, start)
    return None if start < 0 else text[start + 1 : end].strip()


def last_number(text: str) -> str | None:
    """Return the last number; None without one."""
    found = _last_match(_NUMBER, text)
    return None if found is None else found.group()


def peel(text: str) -> str:
    """Strip blanks, and what wraps all of the text: dollars, stars, \\text{} and its like."""
    text = text.strip()
    while len(text) <= MAX_PEELED_CHARS and (inner := _peeled(text)) != text:
        text = inner
    return text


def _peeled(text: str) -> str:
    for opening, closing in _WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)]
        if inner.strip() and text.startswith(opening) and text.endswith(closing) and opening not in inner and closing not in inner:
            return inner.strip()
    command = _TEXT_COMMAND.match(text)
    if command is not None and _closing_brace(text, command.end() - 1) == len(text) - 1:
        return text[command.end() : -1].strip()
    return text


_FINDERS = {
    Rule.TAG: last_tagged,
    Rule.BOX: last_boxed,
    Rule.HASH: after_hashes,
    Rule.PHRASE: after_phrase,
    Rule.LAST_LATEX: last_latex,
    Rule.LAST_NUMBER: last_number,
}
