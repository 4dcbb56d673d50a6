"""Picking the one error to show out of what a TaskGroup raises."""

from __future__ import annotations

from shoal.errors import ShoalError


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The most telling error of a group, however deeply nested: the first ShoalError if there is one."""
    flat: list[BaseException] = []
    pending: list[BaseException] = [errors]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, ShoalError)), flat[0])
