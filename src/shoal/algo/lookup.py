"""Names in the configuration -> functions, with an error that lists the valid names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from shoal.errors import ConfigError

Function = TypeVar("Function")


def lookup(registry: Mapping[str, Function], setting: str, name: str) -> Function:
    """Return the function registered under a name.

    Args:
        registry: name -> function.
        setting: field of the algorithm section, for the message.
        name: the configured name.
    Raises: ConfigError: unknown name; the message lists the valid ones.
    """
    if name not in registry:
        raise ConfigError(f"algorithm.{setting} is {name!r}; use one of {', '.join(sorted(registry))}")
    return registry[name]
