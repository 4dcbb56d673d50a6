"""Reward SDK: turn a plain function into a named, versioned scorer.

    from shoal.reward import reward

    @reward(name="short", version="1")
    def score(prompt: str, response: str, row: dict[str, object]) -> float:
        return 1.0 if len(response) < 80 else 0.0

A scorer returns

    float               the reward of the whole response
    dict[str, float]    named components; the reward is their sum
    list[float]         one reward per response token; its length is the number of response tokens
    None                not scored: the sample reaches no advantage (which is not a reward of 0)

`raise NotScoredError("why")` is None with a reason. Any other exception, NaN or infinity makes that sample an error; the others
keep their scores. A scorer may be an `async def`; with
`batch=True` it takes lists (prompts, responses, rows) and returns a list with one of the above per sample; if that raises, the samples are
called one by one. Plain functions run in a pool of processes, in the main thread, one sample at a time; a process is killed when a sample
takes too long, and cannot get more than its share of memory. Async functions run in the server's event loop and must not block. With
`isolation=Isolation.THREAD` a plain function runs in threads of the server, which nothing can kill, so that a model is in memory once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias, TypeVar

from shoal.errors import ConfigError, NotFoundError
from shoal.fingerprint import fingerprint_of

Row: TypeAlias = dict[str, object]
Score: TypeAlias = float | Mapping[str, float] | Sequence[float] | None
ScoreFunction: TypeAlias = Callable[[str, str, Row], Score | Awaitable[Score]]
BatchScoreFunction: TypeAlias = Callable[[list[str], list[str], list[Row]], Sequence[Score] | Awaitable[Sequence[Score]]]

_Function = TypeVar("_Function", bound=Callable[..., object])

NAME_PATTERN = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
"""What the whole name of a scorer matches."""
VERSION_PATTERN = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,31}")
"""What the whole version of a scorer matches."""


class NotScoredError(Exception):
    """Raised by a scorer for a sample that has no score, with the reason; as returning None, which gives none."""


class Isolation(StrEnum):
    """Where a scorer runs.

    PROCESS: in one of a pool of killable processes. THREAD: in a thread of the server, which nothing can kill: for a model that is to be
    in memory once. LOOP: in the server's event loop: for coroutine functions, which wait for others.
    """

    PROCESS = "process"
    THREAD = "thread"
    LOOP = "loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """A registered function.

    is_batch: it takes lists. is_async: calling it gives an awaitable.
    prepare: called once in every process before its first sample (imports, models); it may take long, samples may not.
    needs_token_ids: rows get `prompt_ids` and `response_ids`, the policy's own, as lists of int. fingerprint: digest of its code and
    settings, see `shoal.fingerprint`.
    """

    name: str
    version: str
    description: str
    function: Callable[..., object]
    is_batch: bool
    is_async: bool
    isolation: Isolation = Isolation.PROCESS
    prepare: Callable[[], None] | None = None
    needs_token_ids: bool = False
    fingerprint: str = ""


@dataclass(slots=True)
class ScorerRegistry:
    """The scorers of one process, by name and version."""

    _scorers: dict[tuple[str, str], Scorer] = field(default_factory=dict)

    def add(self, scorer: Scorer) -> None:
        """Register a scorer.

        Raises: ConfigError: bad name or version, or the pair is taken.
        """
        if not NAME_PATTERN.fullmatch(scorer.name):
            raise ConfigError(f"scorer name {scorer.name!r} is invalid: use a lower-case letter, then up to 62 of a-z 0-9 _ . -")
        if not VERSION_PATTERN.fullmatch(scorer.version):
            raise ConfigError(
                f"version {scorer.version!r} of scorer {scorer.name!r} is invalid: use a letter or digit, then up to 31 of those and .+_-"
            )
        if (taken := self._scorers.get((scorer.name, scorer.version))) is not None:
            raise ConfigError(
                f"scorer {scorer.name!r} version {scorer.version!r} is registered twice "
                f"(first by {where(taken.function)}, now by {where(scorer.function)}): change the name or the version of one"
            )
        self._scorers[(scorer.name, scorer.version)] = scorer

    def get(self, name: str, version: str = "") -> Scorer:
        """Find a scorer; an empty version takes the newest, numbers compared as numbers (1.9 < 1.10rc1 < 1.10).

        Raises: NotFoundError: lists what there is.
        """
        versions = [scorer for scorer in self._scorers.values() if scorer.name == name and version in ("", scorer.version)]
        if not versions:
            there_is = ", ".join(f"{scorer.name} {scorer.version}" for scorer in self.all()) or "none at all"
            wanted = f"{name!r} version {version!r}" if version else repr(name)
            raise NotFoundError(f"no scorer {wanted}; there is: {there_is}")
        return max(versions, key=lambda scorer: version_key(scorer.version))

    def all(self) -> list[Scorer]:
        """All scorers, by name, oldest version first."""
        return sorted(self._scorers.values(), key=lambda scorer: (scorer.name, version_key(scorer.version)))


REGISTRY = ScorerRegistry()
"""Where `reward` registers unless told otherwise."""


def reward(
    *,
    name: str,
    version: str,
    batch: bool = False,
    description: str | None = None,
    isolation: Isolation | None = None,
    prepare: Callable[[], None] | None = None,
    needs_token_ids: bool = False,
    registry: ScorerRegistry = REGISTRY,
) -> Callable[[_Function], _Function]:
    """Register the decorated function as a scorer and return it unchanged.

    Args:
        version: raise it with every change that can alter a score; records carry it.
        batch: the function takes lists and returns a list.
        description: one line for listings; None takes the first line of the docstring.
        isolation: None: a coroutine function in the event loop, another in a process.
        prepare, needs_token_ids: see `Scorer`. registry: for tests; the process's own otherwise.
    Raises: ConfigError: bad or taken name and version, or a function that cannot take three arguments.
    """

    def register(function: _Function) -> _Function:
        _check_signature(name, function)
        is_async = inspect.iscoroutinefunction(function)
        line = _first_line(function) if description is None else description
        place = _isolation(name, is_async, isolation)
        scorer = Scorer(name=name, version=version, description=line, function=function, is_batch=batch, is_async=is_async)
        fingerprint = fingerprint_of(function)
        registry.add(replace(scorer, isolation=place, prepare=prepare, needs_token_ids=needs_token_ids, fingerprint=fingerprint))
        return function

    return register


def _isolation(name: str, is_async: bool, asked: Isolation | None) -> Isolation:
    if asked is None:
        return Isolation.LOOP if is_async else Isolation.PROCESS
    if is_async != (asked is Isolation.LOOP):
        kind = "a coroutine function" if is_async else "a plain function"
        raise ConfigError(f"scorer {name!r} is {kind}, which cannot have isolation {str(asked)!r}: leave isolation out")
    return asked


def where(function: Callable[..., object]) -> str:
    """Say where a function was written, for messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def _check_signature(name: str, function: Callable[..., object]) -> None:
    try:
        inspect.signature(function).bind("prompt", "response", {})
    except TypeError as error:
        raise ConfigError(f"scorer {name!r} ({where(function)}) must take (prompt, response, row): {error}") from None


def _first_line(function: Callable[..., object]) -> str:
    lines = (inspect.getdoc(function) or "").strip().splitlines()
    return lines[0] if lines else ""


def version_key(version: str) -> list[tuple[int, int, str]]:
    """Sorts versions, numbers as numbers: 1.9 < 1.10rc1 < 1.10."""
    parts = re.findall(r"\d+|[A-Za-z]+", version)
    # The closing (0, 1) puts 1.0rc1 before 1.0, and 1.0 before 1.0.1.
    return [*((1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts), (0, 1, "")]
