"""What a user may write into the reward route: components that can make a reward, and texts that fit into a line of the audit log."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.errors import InvalidRequestError
from shoal.reward import NAME_PATTERN, VERSION_PATTERN
from shoal_coordinator.rewards.results import number_problem
from shoal_coordinator.rewards.route import RouteComponent

MAX_COMPONENTS = 32
MAX_NAME_CHARS = 128
"""Of a part or a source."""


def check_components(components: Sequence[RouteComponent]) -> None:
    """Refuse components that cannot make a reward.

    Raises: InvalidRequestError: says which, the value, and what to do.
    """
    if not 1 <= len(components) <= MAX_COMPONENTS:
        raise InvalidRequestError(f"components has {len(components)} entries; give 1 to {MAX_COMPONENTS}")
    for index, component in enumerate(components):
        where = f"component {index + 1} ({component.scorer!r})"
        _check_scorer(where, component)
        _check_numbers(where, component)
        _check_names(where, component)
        for earlier in components[:index]:
            _refuse_same(where, earlier, component)
    if not any(component.is_required for component in components):
        raise InvalidRequestError("no component is required, so a reward could be a sum of nothing; set is_required of one")


def check_text(what: str, text: str, max_chars: int) -> None:
    """Refuse a text that is blank, too long, or would break a line or a terminal.

    Raises: InvalidRequestError: says what is wrong with it.
    """
    if not text.strip() or len(text) > max_chars:
        raise InvalidRequestError(f"{what} has {len(text)} characters; give 1 to {max_chars}, not only blanks")
    if not text.isprintable():
        raise InvalidRequestError(f"{what} {text[:80]!r} has control characters or line breaks; leave them out")


def _check_scorer(where: str, component: RouteComponent) -> None:
    if not component.scorer:
        raise InvalidRequestError(f"{where} names no scorer; give one of /v1/rewards")
    # No server can offer another one: its own check would fail.
    if not NAME_PATTERN.fullmatch(component.scorer):
        raise InvalidRequestError(f"{where} is no name of a scorer: a lower-case letter, then up to 62 of a-z 0-9 _ . -")
    if component.version and not VERSION_PATTERN.fullmatch(component.version):
        raise InvalidRequestError(f"{where} has version {component.version!r}; give a letter or digit, then up to 31 of those and .+_-")


def _check_numbers(where: str, component: RouteComponent) -> None:
    if not component.timeout_s > 0 or not math.isfinite(component.timeout_s):
        raise InvalidRequestError(f"{where} has timeout_s {component.timeout_s}; give seconds above 0")
    for weight in (component.weight, *component.parts.values()):
        if (problem := number_problem("weight", weight)) is not None:
            raise InvalidRequestError(f"{where} cannot be weighed: {problem}; give a smaller number")


def _check_names(where: str, component: RouteComponent) -> None:
    for part in component.parts:
        check_text(f"{where}: a name of its parts", part, MAX_NAME_CHARS)
    for source in filter(None, component.sources):
        check_text(f"{where}: a name of its sources", source, MAX_NAME_CHARS)


def _refuse_same(where: str, earlier: RouteComponent, component: RouteComponent) -> None:
    if (earlier.scorer, earlier.version) != (component.scorer, component.version):
        return
    if not earlier.sources or not component.sources or set(earlier.sources) & set(component.sources):
        raise InvalidRequestError(f"{where} scores the same rows twice; put its parts into one component, or give other sources")
