"""`shoal weights verify`: do the rollout servers compute with the trainer's weights?"""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.cli.api import CoordinatorApi

_COLUMNS = ("server", "weights", "parameters", "pieces", "differing", "logprob diff", "greedy equal")


def verify_weights(address: str, timeout_s: float, console: Console, *, as_json: bool) -> int:
    """Ask a run to compare its servers with its trainer, and print what was found.

    Args:
        address: the coordinator's REST address.
        timeout_s: how long to wait until the trainer's weights are free and the comparison is done.
        as_json: print the answer of the API as it is.
    Returns: exit code: 0 if every server was compared and is equal, else 1.
    Raises: UnavailableError: nothing answers. StateError: nothing was pushed yet. DeadlineError: not done within timeout_s.
    """
    with CoordinatorApi(address) as api:
        audit = api.verify_weights(timeout_s)
    if as_json:
        console.print(json.dumps(audit, indent=2), highlight=False, soft_wrap=True, markup=False)
    else:
        _show(audit, console)
    return 0 if audit["is_equal"] else 1


def _show(audit: dict[str, Any], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for title in _COLUMNS:
        table.add_column(title, justify="left" if title in _COLUMNS[:2] else "right")
    for server in audit["servers"]:
        table.add_row(*_cells(server))
    console.print(f"policy version {audit['policy_version']}, compared in {audit['duration_s']:.1f} s", highlight=False)
    console.print(table)
    for server in audit["servers"]:
        for line in _remarks(server):
            console.print(f"{server['server_id']}: {line}", highlight=False, soft_wrap=True, markup=False)


def _cells(server: dict[str, Any]) -> list[str]:
    probe = server["probe"]
    agreement = ["-", "-"] if probe is None else [_difference(probe["max_logprob_difference"]), f"{probe['greedy_share']:.1%}"]
    counts = [str(server[key]) for key in ("num_parameters", "num_pieces", "num_differing")]
    return [server["server_id"], server["result"], *counts, *agreement]


def _difference(nats: float | None) -> str:
    return "not finite" if nats is None else f"{nats:.2g}"


def _remarks(server: dict[str, Any]) -> list[str]:
    texts = {
        "first_difference": "the first parameter that differs is {}; it is fenced until a push has sent it everything",
        "error": "its weights could not be compared: {}",
        "probe_error": "no probe: {}",
    }
    return [text.format(server[key]) for key, text in texts.items() if server[key] is not None]
