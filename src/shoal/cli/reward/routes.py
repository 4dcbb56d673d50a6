"""What the commands about reward routes do: ask the coordinator, say what came out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from shoal.cli.addresses import DEFAULT_ADDRESS
from shoal.cli.api import CoordinatorApi
from shoal.cli.reward.api import RewardRoutes, Route, Signature
from shoal.cli.reward.components import RouteOptions, did_you_mean, route_body
from shoal.cli.reward.printing import number_text, print_json, print_line, print_table, time_text
from shoal.errors import ConfigError, DeadlineError

_POLL_S = 0.5
_ON_THE_WAY = ("registered", "checked")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteCommand:
    """What every command about routes gets: where the coordinator is, who asks and why, and how to print."""

    address: str
    signature: Signature
    console: Console
    as_json: bool

    @contextmanager
    def routes(self) -> Iterator[RewardRoutes]:
        """The run's routes."""
        with CoordinatorApi(self.address) as api:
            yield RewardRoutes(api)

    @property
    def at(self) -> str:
        """What a suggested command needs to reach the same coordinator."""
        return "" if self.address == DEFAULT_ADDRESS else f" --address {self.address}"

    def show(self, document: object, *lines: str) -> None:
        """Print the answer as JSON if that was asked for, else the lines."""
        if self.as_json:
            print_json(self.console, document)
            return
        for line in lines:
            print_line(self.console, line)


def list_routes(command: RouteCommand) -> None:
    """Show all revisions and reward servers."""
    with command.routes() as routes:
        found = routes.all()
    if command.as_json:
        print_json(command.console, found)
        return
    titles = ("revision", "stage", "since", "label", "reward", "open groups")
    print_table(command.console, titles, (_route_cells(route) for route in found["revisions"]), right=("revision", "open groups"))
    for route in found["revisions"]:
        for remark in _remarks(route):
            print_line(command.console, remark)
    print_table(command.console, ("server", "address", "state", "scorers"), map(_server_cells, found["servers"]))
    for server in found["servers"]:
        if server.get("problem"):
            print_line(command.console, f"{server['service_id']}: {server['problem']}")
    if found.get("rows"):
        print_line(command.console, _rows_text(found["rows"]))


def _rows_text(rows: dict[str, int]) -> str:
    """What the check of the data at the start of the run has found."""
    unscored, not_correct = rows["num_unscored"], rows["num_not_correct"]
    text = f"data: {rows['num_checked']} rows checked with their own answer, {unscored} without a score, {not_correct} not correct"
    return f"{text}; unscored_rows.jsonl in the run's folder has them" if unscored or not_correct else text


def _route_cells(route: Route) -> tuple[object, ...]:
    reward = reward_text(route)
    return route["number"], route["stage"], time_text(route["stage_since_unix_s"]), route["label"] or "-", reward, route["num_open_groups"]


def reward_text(route: Route) -> str:
    """The sum that a revision is, such as `math@2 + 0.1 length@1 (optional)`."""
    return " + ".join(map(_component_text, route["components"]))


def _component_text(component: dict[str, Any]) -> str:
    weight = "" if component["weight"] == 1 else f"{component['weight']:g} "
    # A version that was left out is pinned when the revision is checked.
    name = f"{component['scorer']}@{component['version']}" if component["version"] else component["scorer"]
    parts = [f"{part} x{factor:g}" for part, factor in (component["parts"] or {}).items()]
    notes = [*parts, *(["for " + ", ".join(component["sources"])] if component["sources"] else [])]
    notes += [] if component["is_required"] else ["optional"]
    return f"{weight}{name} ({'; '.join(notes)})" if notes else f"{weight}{name}"


def _remarks(route: Route) -> list[str]:
    head = f"revision {route['number']}"
    remarks = [f"{head}: {route['problem']}"] if route["problem"] else []
    if route["shadow_share"]:
        remarks.append(
            f"{head} scores {route['shadow_share']:.0%} of the groups beside the active one; see shoal reward compare {route['number']}"
        )
    if route["gates"]:
        waiting = "; ".join(route["gate_problems"]) or "they pass"
        remarks.append(f"{head} becomes active when its gates pass ({gates_text(route['gates'])}): {waiting}")
    return remarks


def gates_text(gates: dict[str, Any]) -> str:
    """The gates that are set."""
    return ", ".join(f"{name} {value:g}" for name, value in gates.items() if value is not None)


def _server_cells(server: dict[str, Any]) -> tuple[object, ...]:
    state = f"{server['state']}, asked at its address" if server["is_static"] else server["state"]
    scorers = ", ".join(f"{scorer['name']}@{scorer['version']}" for scorer in server["scorers"])
    return server["service_id"], server["address"], state, scorers or "-"


def add_route(command: RouteCommand, options: RouteOptions, wait_s: float | None) -> int:
    """Add a revision and, if asked to, wait until it is ready or rejected.

    Returns: exit code: 1 if it was rejected.
    Raises: ConfigError: the components or the file cannot be used. DeadlineError: it was not ready within wait_s.
    """
    body = route_body(options)
    with command.routes() as routes:
        if not body["addresses"] and not command.as_json:
            _warn_of_unknown(command, body["components"], routes.all()["servers"])
        route = routes.add(body, command.signature)
        if not command.as_json:
            print_line(command.console, f"revision {route['number']}: {route['stage']}: {reward_text(route)}")
        if wait_s is not None:
            route = _wait_until_ready(command, routes, route, wait_s)
    command.show(route, _next_step(route, command.at))
    return 1 if route["stage"] == "rejected" else 0


def _warn_of_unknown(command: RouteCommand, components: Sequence[dict[str, Any]], servers: Sequence[dict[str, Any]]) -> None:
    offered = sorted({scorer["name"] for server in servers for scorer in server["scorers"]})
    for component in components:
        if component["scorer"] not in offered:
            there_is = ", ".join(offered) or "none"
            hint = did_you_mean(component["scorer"], offered)
            text = f"no server offers scorer {component['scorer']!r} yet{hint}; offered are: {there_is}"
            print_line(command.console, text, style="yellow")


def _wait_until_ready(command: RouteCommand, routes: RewardRoutes, route: Route, wait_s: float) -> Route:
    deadline = time.monotonic() + wait_s
    while route["stage"] in _ON_THE_WAY:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"revision {route['number']} is still {route['stage']} after {wait_s:g} s; look again with shoal reward list"
            )
        time.sleep(_POLL_S)
        before, route = route, _of_number(routes.all(), route["number"])
        if route["stage"] != before["stage"] and not command.as_json:
            print_line(command.console, f"revision {route['number']}: {route['stage']}")
    return route


def _of_number(found: dict[str, Any], number: int) -> Route:
    for route in found["revisions"]:
        if route["number"] == number:
            return dict(route)
    raise ConfigError(f"the coordinator lists no revision {number} any more; was it started anew? see shoal reward list")


def _next_step(route: Route, at: str) -> str:
    number = route["number"]
    if route["stage"] == "rejected":
        return f"rejected: {route['problem']}"
    if route["stage"] == "ready":
        return f"try it beside the active one with: shoal reward shadow {number}{at}"
    return f"it is being checked; see: shoal reward list{at} (or add with --wait); then: shoal reward shadow {number}{at}"


def shadow_route(command: RouteCommand, number: int, share: float) -> None:
    """Let a revision score live groups beside the active one, or end that."""
    with command.routes() as routes:
        route = routes.shadow(number, share, command.signature)
    if share:
        command.show(
            route,
            f"revision {number} scores {share:.0%} of the groups beside the active one; it reaches no advantage",
            f"compare with: shoal reward compare {number}{command.at}",
        )
    else:
        command.show(route, f"revision {number} scores live groups no more; it is {route['stage']}")


def activate_route(command: RouteCommand, number: int, gates: dict[str, Any], when_gates_pass: bool) -> None:
    """Make a revision the active one, now or when its gates pass.

    Raises: StateError: a gate fails; says which.
    """
    chosen = gates if any(value is not None for value in gates.values()) else None
    if when_gates_pass and chosen is None:
        raise ConfigError("--when-gates-pass needs a gate: give --min-samples, --min-rank-correlation, --max-p99-ms or --max-error-share")
    with command.routes() as routes:
        route = routes.activate(number, chosen, when_gates_pass, command.signature)
    if route["stage"] == "active":
        command.show(route, f"revision {number} is active: the next groups are scored by {reward_text(route)}")
    else:
        command.show(route, *_remarks(route) or [f"revision {number} is {route['stage']}"])


def roll_back(command: RouteCommand) -> None:
    """Make the revision active again that was so before."""
    with command.routes() as routes:
        route = routes.rollback(command.signature)
    command.show(route, f"revision {route['number']} is active again: the next groups are scored by {reward_text(route)}")


def retire_route(command: RouteCommand, number: int) -> None:
    """End a revision."""
    with command.routes() as routes:
        route = routes.retire(number, command.signature)
    command.show(route, f"revision {number} is {route['stage']}")


def show_log(command: RouteCommand, limit: int) -> None:
    """Show who changed what, when and why."""
    with command.routes() as routes:
        found = routes.log(limit)
    if command.as_json:
        print_json(command.console, found)
        return
    titles = ("no.", "when", "who", "action", "revision", "stage", "active", "why", "detail")
    print_table(command.console, titles, map(_log_cells, found["entries"]), right=("no.", "revision", "active"))


def _log_cells(entry: dict[str, Any]) -> tuple[object, ...]:
    cells = [entry[key] or "-" for key in ("who", "action", "revision", "stage", "active", "why")]
    return entry["seq"], time_text(entry["unix_s"]), *cells, _detail_text(entry["detail"])


def _detail_text(detail: dict[str, Any]) -> str:
    """What belongs to an action, in short: the whole of it is in the JSON."""
    texts = []
    for name, value in detail.items():
        if name == "components":
            texts.append(reward_text({"components": value}))
        elif name == "gates" and value:
            texts.append(f"gates: {gates_text(value)}")
        elif value not in (None, "", [], {}):
            texts.append(f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    return "; ".join(texts) or "-"


def show_slow(command: RouteCommand) -> None:
    """Show the samples that took longest."""
    with command.routes() as routes:
        found = routes.slow()
    if command.as_json:
        print_json(command.console, found)
        return
    if not found["samples"]:
        print_line(command.console, "no sample has taken longer than the 99th percentile of its scorer so far")
        return
    titles = ("sample", "scorer", "server", "ms", "p99 ms")
    print_table(command.console, titles, map(_slow_cells, found["samples"]), right=("ms", "p99 ms"))


def _slow_cells(sample: dict[str, Any]) -> tuple[object, ...]:
    times = (number_text(sample["latency_ms"], "{:.1f}"), number_text(sample["p99_ms"], "{:.1f}"))
    return sample["sample_id"], f"{sample['scorer']}@{sample['version']}", sample["service"], *times
