"""`shoal reward compare`: what a shadow revision would have rewarded, beside what the active one did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.cli.reward.printing import number_text, print_json, print_line, print_table
from shoal.cli.reward.routes import RouteCommand

Comparison = dict[str, Any]

PERCENTILES = ("p50", "p95", "p99")


def compare_route(command: RouteCommand, number: int, plot: Path | None, num_worst: int) -> None:
    """Print the report of a shadow, and draw it if a file is given.

    Raises: StateError: the revision is no shadow. DataError: the plot cannot be written.
    """
    with command.routes() as routes:
        found = routes.comparison(number)
    if plot is not None:
        from shoal.cli.reward.comparison_plot import draw_comparison

        draw_comparison(found, plot)
    if command.as_json:
        print_json(command.console, found)
        return
    _show(command.console, found, num_worst)
    if plot is not None:
        print_line(command.console, f"drawn in {plot}")


def headline(found: Comparison) -> str:
    """The two revisions, how much was compared, and how far they agree."""
    agree = f"rank correlation {number_text(found['spearman'], '{:.3f}')}, correlation {number_text(found['pearson'], '{:.3f}')}"
    return f"revision {found['number']} beside {found['active']}: {found['num_samples']} samples, {agree}"


def _show(console: Console, found: Comparison, num_worst: int) -> None:
    print_line(console, headline(found))
    dropped = f", {found['num_dropped']} groups left out since it was too slow" if found["num_dropped"] else ""
    order = "" if found["ranking_disagreement"] is None else f", of which {found['ranking_disagreement']:.1%} are ordered otherwise"
    print_line(console, f"{found['num_groups']} groups{dropped}; {found['num_pairs']} pairs of siblings{order}")
    titles = ("", f"active ({found['active']})", f"shadow ({found['number']})")
    print_table(console, titles, _rows(found), right=titles[1:])
    if found.get("first_error"):
        print_line(console, f"first error of the shadow: {found['first_error']}")
    if found["worst"] and num_worst:
        print_line(console, "where they differ most:")
        for case in found["worst"][:num_worst]:
            print_line(console, f"  {case['sample_id']}: active {case['active']:.4g}, shadow {case['shadow']:.4g}")
            print_line(console, f"    prompt:   {case['prompt']}")
            print_line(console, f"    response: {case['response']}")


def _rows(found: Comparison) -> list[tuple[str, str, str]]:
    rows = [_row(name, found[key]) for name, key in (("mean", "mean"), ("standard deviation", "std"))]
    latency = found["latency_ms"]
    rows += [_row(f"latency {name} (ms)", {side: latency[side][name] for side in ("active", "shadow")}, "{:.3g}") for name in PERCENTILES]
    shares = (("errors", "error_share"), ("not scored", "not_scored_share"))
    return rows + [_row(name, found[key], "{:.2%}") for name, key in shares if key in found]


def _row(name: str, sides: dict[str, float | None], pattern: str = "{:.4g}") -> tuple[str, str, str]:
    return name, number_text(sides["active"], pattern), number_text(sides["shadow"], pattern)
