"""Checks of a server as a whole: what it says of itself, and what it says to names that it does not have."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

from shoal.conformance.probe import Probe
from shoal.conformance.report import Check, Problem, failure, ok, warning
from shoal.errors import NotFoundError
from shoal.reward import NAME_PATTERN, VERSION_PATTERN
from shoal.types import ScorerDescription, ScoreSample

UNKNOWN_SCORER = "no-such-scorer"
UNKNOWN_VERSION = "0.no-such-version"


def label(scorer: ScorerDescription) -> str:
    """name@version."""
    return f"{scorer.name}@{scorer.version}"


async def check_description(probe: Probe) -> tuple[list[Check], tuple[ScorerDescription, ...]]:
    """Ask the server for its scorers, and check what it says."""
    scorers, problem, duration_s = await probe.describe()
    if problem is not None:
        return [failure("describes itself", problem)], ()
    if not scorers:
        nothing = Problem(what="DescribeReward names no scorer", fix="offer at least one scorer, with name and version")
        return [failure("describes itself", nothing)], ()
    described = ok("describes itself", f"{len(scorers)} scorer{'s' if len(scorers) > 1 else ''} in {duration_s * 1e3:.0f} ms")
    return [described, _check_names(scorers), _check_fingerprints(scorers)], scorers


def _check_names(scorers: Sequence[ScorerDescription]) -> Check:
    problem = _name_problem(scorers)
    return ok("names and versions", ", ".join(map(label, scorers))) if problem is None else failure("names and versions", problem)


def _name_problem(scorers: Sequence[ScorerDescription]) -> Problem | None:
    for scorer in scorers:
        if not NAME_PATTERN.fullmatch(scorer.name):
            return Problem(what=f"name {scorer.name!r} is invalid", fix="use a lower-case letter, then up to 62 of a-z 0-9 _ . -")
        if not VERSION_PATTERN.fullmatch(scorer.version):
            what = f"version {scorer.version!r} of scorer {scorer.name!r} is invalid"
            return Problem(what=what, fix="use a letter or digit, then up to 31 of those and .+_-")
    twice = [name for name, number in Counter(map(label, scorers)).items() if number > 1]
    if twice:
        return Problem(what=f"{', '.join(twice)} is described twice", fix="describe each name and version once")
    return None


def _check_fingerprints(scorers: Sequence[ScorerDescription]) -> Check:
    without = [label(scorer) for scorer in scorers if not scorer.fingerprint]
    if without:
        fix = "set fingerprint to a digest of code and settings: it keeps servers of different code from sharing one version's work"
        return warning("fingerprints", f"none for {', '.join(without)}", fix)
    return ok("fingerprints", "all scorers have one")


def choose_scorers(offered: Sequence[ScorerDescription], wanted: Sequence[tuple[str, str]]) -> tuple[list[ScorerDescription], list[Check]]:
    """The offered scorers that are wanted (an empty version is every version; nothing wanted is all), and a failure per missing one."""
    if not wanted:
        return list(offered), []
    chosen: list[ScorerDescription] = []
    missing: list[Check] = []
    for name, version in wanted:
        found = [scorer for scorer in offered if scorer.name == name and version in ("", scorer.version)]
        chosen.extend(scorer for scorer in found if scorer not in chosen)
        if not found:
            missing.append(failure("offers the scorer", _missing(name, version, offered), scorer=f"{name}@{version}" if version else name))
    return chosen, missing


def _missing(name: str, version: str, offered: Sequence[ScorerDescription]) -> Problem:
    near = difflib.get_close_matches(name, [scorer.name for scorer in offered], n=1)
    hint = f"did you mean {near[0]}? " if near and near[0] != name else ""
    there_is = ", ".join(map(label, offered))
    what = f"scorer {name!r}{f' version {version!r}' if version else ''} is not offered"
    return Problem(what=what, fix=f"{hint}there is: {there_is}")


async def check_unknown(probe: Probe, name: str, samples: Sequence[ScoreSample]) -> list[Check]:
    """A scorer, and a version of scorer `name`, that do not exist must be answered with NOT_FOUND."""
    return [
        await _check_not_found(probe, "unknown scorer", UNKNOWN_SCORER, "", samples),
        await _check_not_found(probe, "unknown version", name, UNKNOWN_VERSION, samples),
    ]


async def _check_not_found(probe: Probe, check: str, scorer: str, version: str, samples: Sequence[ScoreSample]) -> Check:
    answer = await probe.score(scorer, version, samples[:1])
    asked = f"{scorer}@{version}" if version else scorer
    if isinstance(answer.error, NotFoundError):
        return ok(check, f"{asked} is answered with NOT_FOUND")
    got = "results" if answer.error is None else f"{type(answer.error).__name__.removesuffix('Error')} ({str(answer.error)[:200]})"
    fix = "answer a scorer or version that you do not have with status NOT_FOUND, and name those that you have"
    return failure(check, Problem(what=f"{asked} is answered with {got}", fix=fix))
