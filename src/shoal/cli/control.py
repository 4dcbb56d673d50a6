"""`shoal pause`, `shoal resume`, `shoal stop`."""

from __future__ import annotations

from rich.console import Console

from shoal.cli.api import CoordinatorApi
from shoal.cli.progress import alert_text, waiting_text


def send_command(address: str, command: str, console: Console) -> None:
    """Ask a run to pause, resume or stop, and print where it is then.

    Raises: StateError: not possible in the run's state. UnavailableError: nothing answers at the address.
    """
    with CoordinatorApi(address) as api:
        status = api.command(command)
    console.print(f"run {status['run_id']}: {waiting_text(status)}{_to_come(status)}", highlight=False, soft_wrap=True, markup=False)
    alert = alert_text(status)
    # A run that has just been told to go on has not done so yet.
    if alert and command == "resume":
        console.print("it goes on: samples without a score are scored again by the active revision", highlight=False, soft_wrap=True)
    elif alert:
        console.print(alert, style="bold red", highlight=False, soft_wrap=True, markup=False)


def _to_come(status: dict[str, object]) -> str:
    if status.get("stop_requested"):
        return "; it ends after the current step"
    return "; it pauses before the next step" if status.get("pause_requested") and status.get("state") != "paused" else ""
