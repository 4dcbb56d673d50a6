"""The answer is JSON that a schema accepts."""

from __future__ import annotations

import functools
import importlib
import json
import re
from typing import Any, Literal

from pydantic import Field

from shoal.config.base import Section
from shoal.errors import ConfigError, DataError
from shoal.reward import Row
from shoal_reward.kinds import BuiltScorer, ScorerKind
from shoal_reward.verifiers.extraction import Rule, find_answer
from shoal_reward.verifiers.gold import shared_code

# Both take linear time: bounded blanks, and a string that is not closed goes on to the end.
_FENCE = re.compile(r"```[ \t]{0,4}[A-Za-z0-9_+-]{0,32}[ \t]{0,4}\r?\n(.*?)```", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


class JsonSchemaSettings(Section):
    """The schema, and where the JSON stands."""

    json_schema: dict[str, Any] | bool | None = None
    """A JSON schema (the dialect that its $schema names, else 2020-12; no references to other documents); None takes the row's."""
    column: str = Field(default="json_schema", min_length=1)
    """Column with the row's schema, an object or its text, where the settings have none."""
    fence: Literal["optional", "required", "forbidden"] = "optional"
    """Whether the JSON may, must or must not stand in a ``` block; of several the last counts."""
    extract: tuple[Rule, ...] = Field(default=(Rule.TAG, Rule.BOX, Rule.WHOLE), min_length=1)
    """Where the answer stands in a response."""
    max_depth: int = Field(default=64, gt=0, le=200)
    """Nesting above which JSON is refused; validation recurses."""
    valid_json_reward: float = Field(default=0.0, ge=0)
    """What JSON that reads gives, beside 1 if the schema accepts it."""


def build(settings: JsonSchemaSettings) -> BuiltScorer:
    """Make a scorer of JSON.

    Raises: ConfigError: the schema is none.
    """
    fixed = None
    if settings.json_schema is not None:
        fixed = json.dumps(settings.json_schema)
        try:
            _validator(fixed)
        except DataError as error:
            raise ConfigError(f"json_schema is no JSON schema: {error}") from None

    def score(prompt: str, response: str, row: Row) -> dict[str, float] | None:
        schema = _row_schema(row, settings.column) if fixed is None else fixed
        if schema is None:
            return None
        text = _unfenced(find_answer(response, settings.extract), settings.fence)
        is_read, value = (False, None) if text is None else _read(text, settings.max_depth)
        components = {"correct": float(is_read and _accepts(schema, value))}
        return components if settings.valid_json_reward == 0 else {**components, "format": settings.valid_json_reward * is_read}

    return BuiltScorer(function=score, prepare=prepare, content=shared_code(libraries=("jsonschema",)))


def prepare() -> None:
    """Import jsonschema."""
    importlib.import_module("jsonschema")


def _row_schema(row: Row, column: str) -> str | None:
    value = row.get(column)
    if isinstance(value, str):
        return value.strip() or None
    if not isinstance(value, dict | bool):
        raise DataError(f"the row's column {column!r} is {type(value).__name__}, not a JSON schema: give an object or its text")
    return json.dumps(value)


@functools.lru_cache(maxsize=256)
def _validator(schema_text: str) -> Any:  # noqa: ANN401 - jsonschema's classes are made at run time
    from jsonschema import SchemaError, validators
    from referencing import Registry

    try:
        schema = json.loads(schema_text)
        cls = validators.validator_for(schema, default=validators.Draft202012Validator)
        cls.check_schema(schema)
    except (ValueError, TypeError, AttributeError, RecursionError, SchemaError) as error:
        raise DataError(f"the schema cannot be used ({str(error).splitlines()[0][:200]}): mend it") from None
    # An empty registry: a reference to another document fails instead of being fetched.
    return cls(schema, registry=Registry())


def _accepts(schema: str, value: object) -> bool:
    from referencing.exceptions import Unresolvable

    try:
        return bool(_validator(schema).is_valid(value))
    except Unresolvable as error:
        raise DataError(f"the schema refers to another document, or to what is not there ({str(error)[:200]}): write it out") from None


def _unfenced(answer: str, fence: str) -> str | None:
    blocks = _FENCE.findall(answer)
    if fence == "forbidden" or not blocks:
        return None if fence == "required" else answer
    return str(blocks[-1])


def _read(text: str, max_depth: int) -> tuple[bool, object]:
    if _depth(text) > max_depth:
        return False, None
    try:
        return True, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _depth(text: str) -> int:
    """Nesting of the brackets outside strings."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


KIND = ScorerKind(description="1 if the answer is JSON that the schema accepts, else 0.", settings=JsonSchemaSettings, build=build)
