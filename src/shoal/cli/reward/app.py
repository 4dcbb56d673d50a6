"""`shoal reward`: its commands."""

from __future__ import annotations

import typer

from shoal.cli.reward.route_commands import route_app
from shoal.cli.reward.service_commands import service_app

reward_app = typer.Typer(no_args_is_help=True, help="Reward services, and the reward of a run: try, compare and swap it while it trains.")
reward_app.add_typer(service_app)
reward_app.add_typer(route_app)
