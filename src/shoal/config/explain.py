"""pydantic's errors as lines that say what, which value, and what to do."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from shoal.config.functions import FUNCTION_TAG, NAME_TAG
from shoal.config.masking import mask_url
from shoal.config.models import RunConfig

_SCALARS = ("bool", "int", "float", "str")
"""Members of the union of a scalar setting, as pydantic names them in the place of an error."""


def explain(error: ValidationError, root: type[BaseModel] = RunConfig) -> list[str]:
    """One line for each field of root that is wrong."""
    lines: dict[str, None] = {}
    for detail in error.errors(include_url=False):
        location = tuple(str(part) for part in detail["loc"] if part not in (NAME_TAG, FUNCTION_TAG))
        lines[_explained(location, detail, root)] = None
    return list(lines)


def shortened(lines: Sequence[str], limit: int = 5) -> str:
    """What is wrong, in one line."""
    more = len(lines) - limit
    return "; ".join([*lines[:limit], *([f"and {more} more"] if more > 0 else [])])


def _explained(location: tuple[str, ...], detail: Mapping[str, Any], root: type[BaseModel]) -> str:
    dotted = ".".join(location)
    if not location:
        # A rule about several fields of root itself; its message names them.
        return str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        return _unknown_key(location, root)
    if detail["type"] == "missing":
        return f"{dotted} is missing{_purpose(location, root)}; add it"
    if detail["type"] == "model_type":
        return f"{dotted} is {_shown(detail['input'])}, but it is a section; write its fields as a mapping"
    if NAME_TAG in detail["loc"]:
        wanted = "a name, or {entrypoint: package.module.function}"
        return f"{dotted} is {_shown(detail['input'])}, but it must be {wanted}{_purpose(location, root)}"
    if location[-1] in _SCALARS and len(location) > 1:
        return f"{'.'.join(location[:-1])} is {_shown(detail['input'])}, but it must be a number, a text or a truth value; change the value"
    if location[-1] == "entrypoint" and detail["type"] == "string_pattern_mismatch":
        return (
            f"{dotted} is {_shown(detail['input'])}, but it is no dotted path; write package.module.function, such as my_pkg.losses.my_loss"
        )
    return f"{dotted} is {_shown(detail['input'])}, but {_message(detail)}{_purpose(location, root)}{_hint(detail)}"


def _message(detail: Mapping[str, Any]) -> str:
    message = str(detail["msg"])
    return (message[0].lower() + message[1:]).removeprefix("input ")


def _hint(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "string_type" and detail["input"] is not None:
        return "; put the value in quotes"
    if detail["type"] == "string_type":
        return '; write "" for an empty text'
    return "; change the value"


def _unknown_key(location: tuple[str, ...], root: type[BaseModel]) -> str:
    valid = list(_all_keys(root))
    dotted = ".".join(location)
    parent = ".".join(_fields_on_the_way(location[:-1], root))
    siblings = [key for key in valid if key.rpartition(".")[0] == parent]
    nearest = _nearest(location[-1], siblings, valid)
    if nearest:
        return f"{dotted} is not a known key; did you mean {nearest}?"
    return f"{dotted} is not a known key; valid here: {', '.join(sorted(key.rpartition('.')[2] for key in siblings))}"


def _fields_on_the_way(location: tuple[str, ...], root: type[BaseModel]) -> Iterator[str]:
    """The parts of a place that are fields; the others are keys and indices within these."""
    model: type[BaseModel] | None = root
    for part in location:
        if model is not None and part in model.model_fields:
            yield part
            model = _section_in(model.model_fields[part].annotation)


def _nearest(name: str, siblings: Sequence[str], valid: Sequence[str]) -> str:
    """Return the most likely key: the same name in another section, a similar one here, a similar one elsewhere, or ""."""
    here = {key.rpartition(".")[2]: key for key in siblings}
    anywhere = {key.rpartition(".")[2]: key for key in valid}
    if name in anywhere:
        return anywhere[name]
    for names, cutoff in ((here, 0.5), (anywhere, 0.75)):
        near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
        if near:
            return names[near[0]]
    return ""


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        section = _section_in(field.annotation)
        if section is not None:
            yield from _all_keys(section, f"{prefix}{name}.")


def _section_in(annotation: Any) -> type[BaseModel] | None:  # noqa: ANN401 - any type form
    """The section that a field may hold: its type, or a member of its union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(part) for part in typing.get_args(annotation))
    return next((section for section in found if section is not None), None)


def required_keys(model: type[BaseModel]) -> list[str]:
    """Fields that must be given."""
    return [name for name, field in model.model_fields.items() if field.is_required()]


def _purpose(location: tuple[str, ...], root: type[BaseModel]) -> str:
    """Return the field's own documentation, in brackets."""
    model: type[BaseModel] | None = root
    description: str | None = None
    for part in location:
        field = None if model is None else model.model_fields.get(part)
        if field is None:
            break
        model, description = _section_in(field.annotation), field.description
    return "" if not description else f" ({' '.join(description.split()).rstrip('.')})"


def _shown(value: object) -> str:
    text = mask_url(repr(value))
    return text if len(text) <= 80 else f"{text[:80]}…"


def kind_of(value: object) -> str:
    """What a YAML value is, in words."""
    kinds = {list: "list", str: "text", dict: "mapping", int: "number", float: "number", bool: "truth value"}
    return kinds.get(type(value), type(value).__name__)
