"""`shoal status`: what a run is doing, from its REST API."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shoal.cli.api import CoordinatorApi
from shoal.cli.progress import cells, waiting_text


def show_status(address: str, console: Console) -> None:
    """Print state, services and the newest step.

    Raises: UnavailableError: nothing answers at the address.
    """
    with CoordinatorApi(address) as api:
        status, services = api.status(), api.services()
        steps = api.steps(max(0, int(status["step"]) - 1))
    console.print(f"run {status['run_id']}: {waiting_text(status)}", highlight=False)
    console.print(f"step {status['step']} of {status['total_steps']}, policy version {status['policy_version']}", highlight=False)
    if status.get("error"):
        console.print(f"error: {status['error']}", highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("service", "kind", "address", "version", "state"):
        table.add_column(title)
    for service in services:
        table.add_row(*(str(service.get(key, "")) for key in ("service_id", "kind", "address", "policy_version", "state")))
    console.print(table)
    for step in steps[-1:]:
        console.print("last step: " + "  ".join(cells(step)), highlight=False)
