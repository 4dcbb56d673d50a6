"""What every section of the configuration has in common."""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """A part of the configuration: docstrings of fields are their help.

    Unknown fields, infinities and NaN are refused, values cannot be changed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False)


def _false_is_none(value: object) -> object:
    """YAML reads a bare off, no or false as a bool; quoted it is a text."""
    is_false = value is False or (isinstance(value, str) and value.strip().lower() in ("false", "off", "no"))
    return "none" if is_false else value


FALSE_IS_NONE = BeforeValidator(_false_is_none)
"""For a choice with a `none`: false, as bool or as text, chooses it too."""
