"""Prompts, issued in a seeded order that a position of two numbers continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import DataError
from shoal.types import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A usable row. prompt_ids: [P] int32. text is what scorers see; row has all columns, for the scorers too."""

    row_index: int
    prompt_ids: Int32Array
    text: str
    row: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTask:
    """A prompt issued for one group; uid and group_id depend on the position alone."""

    uid: str
    group_id: str
    prompt_ids: Int32Array
    text: str
    row: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPosition:
    """The next prompt to issue: place `index` of the order of `epoch`. Plain state for ledgers and checkpoints."""

    epoch: int = 0
    index: int = 0


class PromptSource:
    """Issues prompts epoch after epoch. An epoch's rest that is smaller than a batch is completed from the next epoch."""

    def __init__(self, rows: Sequence[PromptRow], *, seed: int, shuffle: bool, position: PromptPosition | None = None) -> None:
        """Args:
        rows: at least one.
        seed: with the epoch's number it gives the epoch's order.
        shuffle: False keeps the file's order.
        position: where to go on; None starts at the beginning.
        """
        if not rows:
            raise DataError("there are no prompts to issue")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._position = PromptPosition()
        self._order = self._order_of(0)
        if position is not None:
            self.seek(position)

    @property
    def position(self) -> PromptPosition:
        """The next prompt to issue."""
        return self._position

    def seek(self, position: PromptPosition) -> None:
        """Go on at a position: what follows is what followed when it was the next to issue, row by row and id by id.

        Raises: DataError: there is no such position in these rows.
        """
        if position.epoch < 0 or not 0 <= position.index < len(self._rows):
            raise DataError(
                f"epoch {position.epoch}, row {position.index} is no position in {len(self._rows)} prompts: has the data changed since "
                "the position was saved? Restore it, or start a new run"
            )
        self._position = position
        self._order = self._order_of(position.epoch)

    def take(self, num_prompts: int) -> list[PromptTask]:
        """Issue the next prompts and advance the position."""
        return [self._next() for _ in range(num_prompts)]

    def _next(self) -> PromptTask:
        epoch, index = self._position.epoch, self._position.index
        row = self._rows[int(self._order[index])]
        if index + 1 < len(self._rows):
            self._position = PromptPosition(epoch=epoch, index=index + 1)
        else:
            self._position = PromptPosition(epoch=epoch + 1, index=0)
            self._order = self._order_of(epoch + 1)
        return as_task(row, f"e{epoch}-i{index}")

    def _order_of(self, epoch: int) -> Int32Array:
        order = np.arange(len(self._rows), dtype=np.int32)
        return np.random.default_rng([self._seed, epoch]).permutation(order) if self._shuffle else order


def as_task(row: PromptRow, uid: str) -> PromptTask:
    """Issue a row under an id."""
    return PromptTask(uid=uid, group_id=uid, prompt_ids=row.prompt_ids, text=row.text, row=row.row)
