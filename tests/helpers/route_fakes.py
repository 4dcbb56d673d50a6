"""Route books with ready-made revisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal_coordinator.rewards.book import RouteBook
from shoal_coordinator.rewards.route import RouteComponent
from shoal_coordinator.rewards.route_stages import RouteStage

WHO, WHY = "ada", "because"


def component(scorer: str = "math", version: str = "1", fingerprint: str = "f1", **fields: Any) -> RouteComponent:  # noqa: ANN401
    """A pinned component."""
    return RouteComponent(scorer=scorer, version=version, fingerprint=fingerprint, **fields)


def open_book(folder: Path, run_id: str = "run") -> RouteBook:
    """The book of a folder, as a coordinator that starts opens it."""
    return RouteBook.open(folder, run_id)


async def add_in(book: RouteBook, stage: RouteStage, **fields: Any) -> int:  # noqa: ANN401
    """A new revision that has come to a stage on the shortest way; its number."""
    number = (await book.add("label", [component(**fields)], who=WHO, why=WHY)).number
    if stage is RouteStage.REJECTED:
        await book.reject(number, "it is bad")
    if stage in (RouteStage.REGISTERED, RouteStage.REJECTED):
        return number
    await book.note_checked(number, [component(**fields)])
    if stage is RouteStage.CHECKED:
        return number
    await book.note_ready(number)
    await _beyond_ready(book, number, stage)
    return number


async def _beyond_ready(book: RouteBook, number: int, stage: RouteStage) -> None:
    if stage is RouteStage.SHADOW:
        await book.shadow(number, 0.5, who=WHO, why=WHY)
    elif stage is RouteStage.RETIRED:
        await book.retire(number, who=WHO, why=WHY)
    elif stage in (RouteStage.ACTIVE, RouteStage.DRAINING, RouteStage.DRAINED):
        await book.activate(number, who=WHO, why=WHY)
    if stage in (RouteStage.DRAINING, RouteStage.DRAINED):
        pin = book.pin()
        await book.activate(await add_in(book, RouteStage.READY), who=WHO, why=WHY)
        if stage is RouteStage.DRAINED:
            pin.release()
            await book.drain()


async def begin(folder: Path) -> RouteBook:
    """A book whose revision 1 is active."""
    book = open_book(folder)
    await add_in(book, RouteStage.ACTIVE)
    return book
