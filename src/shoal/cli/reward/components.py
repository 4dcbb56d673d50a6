"""From what was typed, or a file, to the components of a reward route."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from shoal.config.base import Section
from shoal.config.explain import explain, shortened
from shoal.config.yaml_files import read_mapping
from shoal.errors import ConfigError

MAX_LABEL_CHARS = 64

_COMPONENT = re.compile(r"(?P<scorer>[^@*\s]+)(?:@(?P<version>[^@*\s]+))?(?:\*(?P<weight>[^@*\s]+))?")


class RouteFileComponent(Section):
    """One scorer's part of a reward."""

    scorer: str
    """Name of the scorer."""
    version: str = ""
    """Its version; empty is the newest."""
    weight: float = 1.0
    """Factor of what it gives."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Part of a scorer that gives several -> factor; empty takes its total."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Deadline of scoring one group, in seconds; null is the run's reward.timeout_s."""
    is_required: bool = True
    """Whether a sample without its score is not scored."""
    sources: tuple[str, ...] = ()
    """Sources of rows that it scores; empty is all."""


class RouteFile(Section):
    """A route revision to add."""

    label: str = ""
    """Your name for it; empty is what its reward is, in short."""
    components: tuple[RouteFileComponent, ...]
    """What the reward is made of."""
    addresses: tuple[str, ...] = ()
    """host:port of servers that cannot register; the coordinator asks them itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions:
    """What was typed after `shoal reward add`; None leaves the choice to the coordinator."""

    components: Sequence[str]
    file: Path | None
    label: str
    optional: Sequence[str]
    sources: Sequence[str]
    timeout_s: float | None
    servers: Sequence[str]


def route_body(options: RouteOptions) -> dict[str, Any]:
    """What to POST as a new revision, without who and why.

    Raises: ConfigError: says which component, source or file cannot be used.
    """
    if (options.file is None) == (not options.components):
        raise ConfigError("give either components, such as `shoal reward add math@2 'length*0.1'`, or --file route.yaml")
    if options.file is not None:
        return _from_file(options.file, options)
    components = [_component(text, options.timeout_s) for text in options.components]
    _set_optional(components, options.optional)
    _set_sources(components, options.sources)
    label = options.label or _short(options.components)
    return {"label": label, "components": components, "addresses": list(options.servers)}


def _short(texts: Sequence[str]) -> str:
    return " + ".join(texts)[:MAX_LABEL_CHARS]


def _component(text: str, timeout_s: float | None) -> dict[str, Any]:
    match = _COMPONENT.fullmatch(text)
    if match is None:
        raise ConfigError(f"component {text!r} is not SCORER[@VERSION][*WEIGHT]; write for example math, math@2 or 'math@2*0.5'")
    component: dict[str, Any] = {"scorer": match["scorer"]}
    if match["version"] is not None:
        component["version"] = match["version"]
    if match["weight"] is not None:
        component["weight"] = _weight(text, match["weight"])
    return component if timeout_s is None else {**component, "timeout_s": timeout_s}


def _weight(component: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ConfigError(f"weight {text!r} of component {component!r} is not a number; write for example 'math*0.5'")
    return weight


def _set_optional(components: list[dict[str, Any]], names: Sequence[str]) -> None:
    for name in names:
        for component in _of_scorer(components, name, "--optional"):
            component["is_required"] = False


def _set_sources(components: list[dict[str, Any]], texts: Sequence[str]) -> None:
    for text in texts:
        source, equals, name = text.rpartition("=")
        if not (equals and source and name):
            raise ConfigError(f"--source {text!r} is not SOURCE=SCORER; write for example --source gsm8k=math")
        for component in _of_scorer(components, name, "--source"):
            component.setdefault("sources", []).append(source)


def _of_scorer(components: list[dict[str, Any]], name: str, option: str) -> list[dict[str, Any]]:
    found = [component for component in components if component["scorer"] == name]
    if not found:
        names = [component["scorer"] for component in components]
        raise ConfigError(f"{option} names {name!r}, which is no component{did_you_mean(name, names)}; there is: {', '.join(names)}")
    return found


def split_scorer(text: str) -> tuple[str, str]:
    """NAME[@VERSION] as name and version, which is empty if it was left out.

    Raises: ConfigError: it is something else.
    """
    name, at, version = text.partition("@")
    if not name or (at and not version) or "@" in version:
        raise ConfigError(f"scorer {text!r} is not NAME[@VERSION]; write for example math or math@2")
    return name, version


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """`; did you mean X?` if a name is near to one there is, else nothing."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near and near[0] != name else ""


def _from_file(path: Path, options: RouteOptions) -> dict[str, Any]:
    if options.optional or options.sources or options.timeout_s is not None:
        raise ConfigError("--optional, --source and --timeout-s belong to components that are typed; write them into the file")
    tree = read_mapping(path, what="route", holds="a mapping with label: and components:")
    try:
        route = RouteFile.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path} cannot be used: {shortened(explain(error, RouteFile))}") from None
    if not route.components:
        raise ConfigError(f"{path} lists no components; write at least one, such as components: [{{scorer: math}}]")
    body = route.model_dump(mode="json", exclude_none=True)
    label = options.label or route.label or _short([component.scorer for component in route.components])
    return {**body, "label": label, "addresses": [*route.addresses, *options.servers]}
