"""What verifiers have in common: reading a row's right answer, and the settings that say where answers stand."""

from __future__ import annotations

import hashlib
import math
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import Field

from shoal.config.base import Section
from shoal.errors import DataError
from shoal.reward import Row
from shoal_reward.verifiers.extraction import ANSWER_RULES, Rule, find_answer


class AnswerSettings(Section):
    """Where the right answer and the response's stand."""

    column: str = Field(default="answer", min_length=1)
    """Column of the row with the right answer: a text, a number, or a list of these, any of which is right."""
    extract: tuple[Rule, ...] = Field(default=ANSWER_RULES, min_length=1)
    """Where the answer stands in a response: of tag, box, hash, phrase, last_latex, last_number, whole."""


def shared_code(*files: str, libraries: tuple[str, ...] = ()) -> str:
    """Digest what a kind's scores depend on beside its own module: the extraction, other files of this folder, versions of libraries.

    Args:
        files: names of modules of this folder.
        libraries: names of distributions; one that is missing counts as such.
    """
    digest = hashlib.sha256()
    for name in ("extraction", "gold", *files):
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    for library in libraries:
        digest.update(f"{library} {_version(library)}".encode())
    return digest.hexdigest()[:16]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "missing"


def gold_answers(row: Row, settings: AnswerSettings) -> list[str]:
    """Return a row's right answers, found in their texts as a response's is; empty ones are left out.

    Raises: DataError: the column is missing or holds something else.
    """
    if settings.column not in row:
        raise DataError(f"the row has no column {settings.column!r}; it has: {', '.join(sorted(row)) or 'none'}")
    value = row[settings.column]
    texts = [_text(item, settings.column) for item in (value if isinstance(value, list | tuple) else [value])]
    found = [find_answer(text) for text in texts]
    return [text for text in found if text]


def column_text(row: Row, column: str) -> str:
    """Return a column's text.

    Raises: DataError: it is missing or no text.
    """
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"the row's column {column!r} is {type(value).__name__}, not text: give each row a string {column!r}")
    return value


def _text(value: object, column: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        # Tables have NaN where a value is missing; as a text it would be a word that an answer can guess.
        raise DataError(f"the row's column {column!r} holds {value}, which is no right answer: give each row its right answer there")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"the row's column {column!r} holds {type(value).__name__}, not a text or number: give each row its right answer there")
