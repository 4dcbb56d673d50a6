"""`shoal status`: what a run is doing, from its REST API."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.cli.api import CoordinatorApi
from shoal.cli.progress import alert_text, cells, waiting_text


def show_status(address: str, console: Console) -> None:
    """Print state, services and the newest step.

    Raises: UnavailableError: nothing answers at the address.
    """
    with CoordinatorApi(address) as api:
        status, services = api.status(), api.services()
        steps = api.steps(max(0, int(status["step"]) - 1))
    console.print(f"run {status['run_id']}: {waiting_text(status)}", highlight=False)
    console.print(f"step {status['step']} of {status['total_steps']}, policy version {status['policy_version']}", highlight=False)
    if status.get("route_revision"):
        console.print(f"reward: revision {status['route_revision']} of the route (shoal reward list)", highlight=False)
    if alert := alert_text(status):
        console.print(alert, style="bold red", highlight=False, soft_wrap=True, markup=False)
    if status.get("pushes"):
        console.print(push_text(status["pushes"]), highlight=False, soft_wrap=True)
    if status.get("error"):
        console.print(f"error: {status['error']}", highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("service", "kind", "address", "version", "state"):
        table.add_column(title)
    for service in services:
        table.add_row(*(str(service.get(key, "")) for key in ("service_id", "kind", "address", "policy_version", "state")))
    console.print(table)
    for service in services:
        if service["state"] == "fenced" and service.get("fenced_because"):
            console.print(f"{service['service_id']} is fenced: {service['fenced_because']}", highlight=False, soft_wrap=True, markup=False)
    for step in steps[-1:]:
        console.print("last step: " + "  ".join(cells(step)), highlight=False)


def push_text(pushes: dict[str, Any]) -> str:
    """One line about the weight pushes: the last one, and what went wrong so far."""
    last = (
        f"last push: version {pushes['policy_version']} to {count_text(pushes['num_servers'], 'server')} in {pushes['total_s']:.2f} s, "
        f"sent {pushes['sent_bytes'] / 1e6:.1f} of {pushes['dense_bytes'] / 1e6:.1f} MB ({pushes['delta_share']:.1%}), "
        f"pause {pushes['max_pause_ms']:.1f} ms"
    )
    num_missed = pushes["num_failed_servers"]
    failures = f"; {count_text(num_missed, 'server')} missed in {pushes['num_pushes']} pushes" if num_missed else ""
    audit = f"; last audit: {pushes['last_audit']}" if pushes["last_audit"] else ""
    return last + failures + audit


def count_text(number: int, what: str) -> str:
    """A number and its noun."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
