"""Tables, lines and JSON of `shoal reward`; no text of others is taken for markup, or can move the cursor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.one_line import one_line

_WIDE = 400


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print one line, however long."""
    console.print(one_line(text), style=style, highlight=False, soft_wrap=True, markup=False)


def print_json(console: Console, document: object) -> None:
    """Print one JSON document."""
    console.print(json.dumps(document, indent=2), highlight=False, soft_wrap=True, markup=False)


def print_table(console: Console, titles: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print a table; the columns named in `right` are numbers. Long cells continue on the next line, nothing is left out."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(one_line(str(cell))) for cell in row))
    # A file or a pipe has no width: cells are not to be folded there.
    console.print(table, width=None if console.is_terminal else _WIDE, crop=console.is_terminal)


def number_text(value: Any, pattern: str = "{:.4g}") -> str:  # noqa: ANN401 - JSON
    """A number; `-` for null."""
    return "-" if value is None else pattern.format(value)


def time_text(unix_s: float) -> str:
    """A wall-clock time of this machine's zone, to the second."""
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
