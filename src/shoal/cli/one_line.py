"""Text from files and services, made fit for a line of a terminal."""

from __future__ import annotations


def one_line(text: str, max_chars: int | None = None) -> str:
    """Escape line breaks, terminal controls and halves of a character, which no terminal can print; cut what is longer than max_chars."""
    cut = text if max_chars is None or len(text) <= max_chars else f"{text[: max_chars - 1]}…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)
