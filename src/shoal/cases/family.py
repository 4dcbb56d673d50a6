"""What a family of cases consists of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from shoal.cases.inputs import Inputs, check_keys

Compute: TypeAlias = Callable[[Inputs], object]
"""Inputs -> found value, see `shoal.cases.comparing`."""

COMMON_INPUTS = ("dtype",)


def _no_part(key: str, value: object) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One function under test, or a few that belong together.

    required, optional: input keys. outputs: expected key -> how the value is found; a function where the keys depend on the inputs.
    is_part: whether a further input key is fine, as the name of a sub-batch.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    outputs: Mapping[str, Compute] | Callable[[Inputs], Mapping[str, Compute]]
    is_part: Callable[[str, object], bool] = _no_part

    def check_inputs(self, given: Mapping[str, object]) -> None:
        """Refuse unknown and missing input keys.

        Raises: DataError: naming the key.
        """
        own = {key: value for key, value in given.items() if not self.is_part(key, value)}
        check_keys(own, required=self.required, optional=(*self.optional, *COMMON_INPUTS), what="input")

    def computes(self, inputs: Inputs) -> Mapping[str, Compute]:
        """Expected keys of a case -> how each value is found."""
        return self.outputs(inputs) if inspect.isfunction(self.outputs) else self.outputs  # type: ignore[return-value]
