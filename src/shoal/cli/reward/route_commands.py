"""The commands about the reward routes of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shoal.cli.addresses import DEFAULT_ADDRESS
from shoal.cli.reward.api import Signature, login_name
from shoal.cli.reward.routes import RouteCommand

route_app = typer.Typer(no_args_is_help=True)

Address = Annotated[str, typer.Option(help="the coordinator's REST address")]
Who = Annotated[str | None, typer.Option(help="who asks, for the audit log; your login name if not given")]
Why = Annotated[str, typer.Option(help="why, for the audit log")]
AsJson = Annotated[bool, typer.Option("--json", help="print the API's answer")]
Number = Annotated[int, typer.Argument(metavar="REVISION", min=1, help="number of the revision, as `shoal reward list` shows it")]

NO_REASON = "no reason given"


def _command(address: str, as_json: bool, who: str | None = None, why: str = NO_REASON) -> RouteCommand:
    signature = Signature(who=login_name() if who is None else who, why=why)
    return RouteCommand(address=address, signature=signature, console=Console(), as_json=as_json)


@route_app.command("list")
def list_command(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Show the revisions of the reward, and the servers that score."""
    from shoal.cli.reward.routes import list_routes

    list_routes(_command(address, as_json))


@route_app.command()
def add(
    components: Annotated[list[str] | None, typer.Argument(metavar="SCORER[@VERSION][*WEIGHT]", help="the reward is their sum")] = None,
    file: Annotated[
        Path | None, typer.Option(help="YAML with label: and components: instead, for everything that a component can be")
    ] = None,
    label: Annotated[str, typer.Option(help="your name for the revision; its components if not given")] = "",
    optional: Annotated[list[str] | None, typer.Option(help="scorer that a group may do without; may be repeated")] = None,
    source: Annotated[list[str] | None, typer.Option(help="SOURCE=SCORER: rows that a scorer is for; may be repeated")] = None,
    timeout_s: Annotated[float | None, typer.Option(min=0.001, help="deadline of scoring one group, in seconds")] = None,
    server: Annotated[list[str] | None, typer.Option(help="HOST:PORT of a server that cannot register; may be repeated")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="wait until it is ready or rejected")] = False,
    wait_s: Annotated[float, typer.Option(min=1, help="how long at most, in seconds")] = 600.0,
    address: Address = DEFAULT_ADDRESS,
    who: Who = None,
    why: Why = NO_REASON,
    as_json: AsJson = False,
) -> None:
    """Add a revision of the reward; it is checked and warmed up, and scores nothing until it is activated."""
    from shoal.cli.reward.components import RouteOptions
    from shoal.cli.reward.routes import add_route

    options = RouteOptions(
        components=components or (),
        file=file,
        label=label,
        optional=optional or (),
        sources=source or (),
        timeout_s=timeout_s,
        servers=server or (),
    )
    raise typer.Exit(add_route(_command(address, as_json, who, why), options, wait_s if wait else None))


@route_app.command()
def shadow(
    number: Number,
    share: Annotated[float, typer.Option(min=0, max=1, help="share of the groups that it scores too; 0 ends it")] = 1.0,
    address: Address = DEFAULT_ADDRESS,
    who: Who = None,
    why: Why = NO_REASON,
    as_json: AsJson = False,
) -> None:
    """Let a revision score live groups beside the active one, without any effect on the training."""
    from shoal.cli.reward.routes import shadow_route

    shadow_route(_command(address, as_json, who, why), number, share)


@route_app.command()
def compare(
    number: Number,
    plot: Annotated[Path | None, typer.Option(help="also draw it into this PNG file")] = None,
    worst: Annotated[int, typer.Option(min=0, help="samples to show on which they differ most")] = 5,
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Compare a shadow revision with the active one, on the same responses."""
    from shoal.cli.reward.compare import compare_route

    compare_route(_command(address, as_json), number, plot, worst)


@route_app.command()
def activate(
    number: Number,
    min_samples: Annotated[int | None, typer.Option(min=0, help="gate: samples that both have scored")] = None,
    min_rank_correlation: Annotated[float | None, typer.Option(min=-1, max=1, help="gate: Spearman's, with the active revision")] = None,
    max_p99_ms: Annotated[float | None, typer.Option(min=0, help="gate: 99th percentile of its latency")] = None,
    max_error_share: Annotated[float | None, typer.Option(min=0, max=1, help="gate: share of samples that are errors")] = None,
    when_gates_pass: Annotated[bool, typer.Option("--when-gates-pass", help="later, by itself, instead of refusing now")] = False,
    address: Address = DEFAULT_ADDRESS,
    who: Who = None,
    why: Why = NO_REASON,
    as_json: AsJson = False,
) -> None:
    """Score the next groups by this revision; groups that were issued before keep theirs."""
    from shoal.cli.reward.routes import activate_route

    gates = {
        "min_samples": min_samples,
        "min_rank_correlation": min_rank_correlation,
        "max_p99_ms": max_p99_ms,
        "max_error_share": max_error_share,
    }
    activate_route(_command(address, as_json, who, why), number, gates, when_gates_pass)


@route_app.command()
def rollback(address: Address = DEFAULT_ADDRESS, who: Who = None, why: Why = NO_REASON, as_json: AsJson = False) -> None:
    """Go back to the revision that was active before, from the next group on."""
    from shoal.cli.reward.routes import roll_back

    roll_back(_command(address, as_json, who, why))


@route_app.command()
def retire(number: Number, address: Address = DEFAULT_ADDRESS, who: Who = None, why: Why = NO_REASON, as_json: AsJson = False) -> None:
    """End a revision that is not in use."""
    from shoal.cli.reward.routes import retire_route

    retire_route(_command(address, as_json, who, why), number)


@route_app.command("log")
def log_command(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="at most so many, the newest")] = 20,
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Show who changed the reward, when and why."""
    from shoal.cli.reward.routes import show_log

    show_log(_command(address, as_json), limit)


@route_app.command()
def slow(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Show the samples that took longest to score."""
    from shoal.cli.reward.routes import show_slow

    show_slow(_command(address, as_json))
