"""The outcomes of the failure matrix as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.helpers.push_matrix_cells import AUDIT_CELLS, CELLS, WIRE_CELLS, Cell

HEADER = ("process", "stage", "fault", "the push", "rollout-0 after it", "rollout-1 after it", "took")


def outcome_table(outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """One row for each cell that was played.

    Args:
        outcomes: by the cell's name.
    """
    rows = [_row(outcomes[cell.name]) for cell in (*CELLS, *AUDIT_CELLS, *WIRE_CELLS) if cell.name in outcomes]
    lines = [_line(HEADER), _line(["---"] * len(HEADER)), *map(_line, rows)]
    return "\n".join(lines)


def _row(outcome: Mapping[str, Any]) -> list[str]:
    cell: Cell = outcome["cell"]
    report = outcome["report"]
    fault = {"kill": "killed", "stop": "stopped"}.get(cell.kind, cell.meaning)
    state = report["state"] if report else "ends with the coordinator"
    took = f"{report['elapsed_s']:.2f} s" if report else "-"
    found = ", found by the audit" if cell.audited else ""
    wire = "" if cell.transport == "shm" else f" ({cell.transport})"
    return [cell.victim, f"{cell.stage.upper()}{wire}", fault, f"{state}{found}", str(cell.victim_server), str(cell.other_server), took]


def _line(cells: Any) -> str:  # noqa: ANN401 - a list or tuple of texts
    return "| " + " | ".join(cells) + " |"
