"""Kinds of scorers that need no code of the user: a name, a version and settings give a scorer.

A kind lives in a module of its own, which is imported when a definition or a grader asks for it: some need heavy libraries.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from shoal.config.base import Section
from shoal.config.explain import explain, shortened
from shoal.config.reward_service import ScorerDefinition
from shoal.errors import ConfigError
from shoal.fingerprint import fingerprint_of
from shoal.reward import Isolation, Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltScorer:
    """What a kind makes of its settings; the fields are those of `Scorer`.

    content: digest of files that the settings name, such as a model's; it goes into the fingerprint.
    """

    function: Callable[..., object]
    is_batch: bool = False
    isolation: Isolation = Isolation.PROCESS
    prepare: Callable[[], None] | None = None
    needs_token_ids: bool = False
    content: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerKind:
    """A kind: a line about it, its settings, and how to build a scorer of it. A module of KINDS has one under the name KIND."""

    description: str
    settings: type[Section]
    build: Callable[[Any], BuiltScorer]


KINDS = MappingProxyType(
    {
        "choice": "shoal_reward.verifiers.choice",
        "code": "shoal_reward.code.scorer",
        "exact": "shoal_reward.verifiers.exact",
        "format": "shoal_reward.verifiers.format",
        "json_schema": "shoal_reward.verifiers.json_schema",
        "judge": "shoal_reward.judge.scorer",
        "length": "shoal_reward.verifiers.length",
        "math": "shoal_reward.verifiers.math",
        "model": "shoal_reward.models.scorer",
        "model_server": "shoal_reward.models.server_scorer",
        "reasoning_gym": "shoal_reward.verifiers.reasoning_gym",
        "regex": "shoal_reward.verifiers.regex",
    }
)
"""Kind -> the module that has it."""


def build_scorer(name: str, definition: ScorerDefinition) -> Scorer:
    """Make the scorer that a definition asks for.

    Raises: ConfigError: an unknown kind, wrong settings, or a library or file that the kind needs and does not find.
    """
    kind = find_kind(name, definition.kind)
    try:
        settings = kind.settings.model_validate(definition.settings)
    except ValidationError as error:
        what = shortened(explain(error, kind.settings))
        raise ConfigError(f"scorer {name!r} of kind {definition.kind!r} has wrong settings: {what}") from None
    built = kind.build(settings)
    return Scorer(
        name=name,
        version=definition.version,
        description=kind.description,
        function=built.function,
        is_batch=built.is_batch,
        is_async=inspect.iscoroutinefunction(built.function),
        isolation=built.isolation,
        prepare=built.prepare,
        needs_token_ids=built.needs_token_ids,
        fingerprint=fingerprint_of(kind.build, json.dumps(settings.model_dump(mode="json"), sort_keys=True) + built.content),
    )


def find_kind(name: str, kind: str) -> ScorerKind:
    """Import a kind.

    Args:
        name: of the scorer, for messages.
        kind: a key of KINDS.
    Raises: ConfigError: no such kind, or a library that it needs is missing.
    """
    if kind not in KINDS:
        raise ConfigError(f"scorer {name!r} has the unknown kind {kind!r}; choose one of {', '.join(KINDS)}")
    try:
        found = importlib.import_module(KINDS[kind]).KIND
    except ImportError as error:
        raise ConfigError(f"scorer {name!r} of kind {kind!r} needs a library that is missing ({error}); install it") from error
    assert isinstance(found, ScorerKind)  # noqa: S101 - the table above is ours
    return found
