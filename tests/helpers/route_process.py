"""Changes the route book of a folder at random until it is killed; prints what it is about to do, and what has taken effect.

python -m tests.helpers.route_process FOLDER SEED
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from shoal_coordinator.rewards.book import RouteBook
from shoal_coordinator.rewards.route_stages import RouteStage

from shoal.errors import ShoalError
from tests.helpers.route_fakes import add_in, open_book


async def change(folder: Path, dice: random.Random) -> None:
    """Change until killed."""
    book = open_book(folder)
    while not book.active_number:
        await add_in(book, RouteStage.ACTIVE)
    while True:
        try:
            await _change_once(book, dice)
        except ShoalError:
            continue
        _say("active", book.active_number)


async def _change_once(book: RouteBook, dice: random.Random) -> None:
    usable = [record.revision.number for stage in _USABLE for record in book.in_stage(stage)]
    action = dice.choice(["add", "activate", "activate", "rollback", "retire"])
    if action == "add" or not usable:
        await add_in(book, dice.choice([RouteStage.READY, RouteStage.SHADOW]))
    elif action == "activate":
        number = dice.choice(usable)
        _say("try", number)
        await book.activate(number, who="dice", why="a test")
    elif action == "rollback":
        _say("try", book.previous_number)
        await book.rollback(who="dice", why="a test")
    else:
        await book.retire(dice.choice(usable), who="dice", why="a test")


def _say(what: str, number: int) -> None:
    sys.stdout.write(f"{what} {number}\n")
    sys.stdout.flush()


_USABLE = (RouteStage.READY, RouteStage.SHADOW, RouteStage.DRAINING, RouteStage.DRAINED)

if __name__ == "__main__":
    asyncio.run(change(Path(sys.argv[1]), random.Random(int(sys.argv[2]))))
