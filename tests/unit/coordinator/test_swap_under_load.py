"""Routes swapped at random moments while groups are generated and scored; the real book over fakes.

In every mode: no group mixes revisions, no record is lost, none is scored twice by the active route.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
from shoal_coordinator.evaluation import greedy_request
from shoal_coordinator.rewards.book import RouteBook
from shoal_coordinator.rewards.route import RouteRevision
from shoal_coordinator.rewards.scored import RoutePin

from shoal.config.models import RolloutSection
from shoal.types import Completion, SamplingParams, ScoreResult, ScoreSample, ScoreStatus
from tests.helpers.coordinator_collecting import CollectorSetup
from tests.helpers.coordinator_fakes import FakeReward, FakeRollout
from tests.helpers.routes import component

SCORERS = ("sum", "exact", "judge")
VALUES = {"sum": 1.0, "exact": 10.0, "judge": 100.0}
NUM_SWAPS = 100

pytestmark = pytest.mark.slow
"""The quick tests do this over real servers and a real queue: tests/integration/swap."""
NUM_GROUPS = 8
GREEDY = greedy_request(RolloutSection(max_new_tokens=4), (2,), 0)
MODES: dict[str, Callable[[CollectorSetup], None]] = {
    "plain": lambda setup: None,
    "greedy baseline": lambda setup: setattr(setup, "greedy", GREEDY),
    "dynamic sampling": lambda setup: setattr(setup, "max_refills", 3),
}


async def open_book(folder: Path) -> RouteBook:
    """Three revisions of one scorer each; the first is active."""
    book = RouteBook.open(folder, "run")
    for scorer in SCORERS:
        components = (component(scorer),)
        number = (await book.add(scorer, components, who="test", why="a swap")).number
        await book.note_checked(number, components, why="a swap")
        await book.note_ready(number, why="a swap")
    await book.activate(1, who="test", why="a swap")
    return book


@dataclass
class CountedBook:
    """A book as a route source that says how many groups are open."""

    book: RouteBook

    @property
    def active(self) -> RouteRevision:
        """What new groups are scored by."""
        return self.book.active

    @property
    def num_open(self) -> int:
        """Groups that are pinned."""
        return sum(self.book.num_open_groups(record.revision.number) for record in self.book.records())

    def pin(self) -> RoutePin:
        """Pin the active revision."""
        return self.book.pin()


class SwappedReward(FakeReward):
    """Takes a random number of turns for each call; the worth of a sample tells its scorer."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dice = dice
        self.seen: Counter[tuple[str, str]] = Counter()

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """See the class."""
        for _ in range(self.dice.randrange(6)):
            await asyncio.sleep(0)
        self.seen.update((sample.sample_id, scorer) for sample in samples)
        return version, [ScoreResult(sample_id=each.sample_id, status=ScoreStatus.SCORED, value=worth(each, scorer)) for each in samples]


def worth(sample: ScoreSample, scorer: str) -> float:
    """Groups with an even number have no spread."""
    uid, index, _ = sample.sample_id.split("/")
    spread = 0.0 if int(uid.removeprefix("g").removesuffix("-greedy")) % 2 == 0 else float(index)
    return VALUES[scorer] + 0.25 * spread


class SlowRollout(FakeRollout):
    """Finishes groups at different times."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dice = dice

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        num_samples: int,
        seeds: Sequence[int] = (),
        min_policy_version: int = 0,
        *,
        timeout_s: float,
    ) -> AsyncGenerator[Completion, None]:
        """See the class."""
        for _ in range(self.dice.randrange(40)):
            await asyncio.sleep(0)
        call = super().generate(request_id, prompt_ids, sampling, num_samples, seeds, min_policy_version, timeout_s=timeout_s)
        async with aclosing(call) as stream:
            async for completion in stream:
                yield completion


async def swap_at_random(book: RouteBook, dice: random.Random, done: list[int]) -> None:
    """Activate another revision, or roll back, again and again."""
    while True:
        for _ in range(dice.randrange(30)):
            await asyncio.sleep(0)
        if dice.random() < 0.3 and book.previous_number:
            await book.rollback(who="test", why="a swap")
        else:
            await book.activate(dice.choice([number for number in (1, 2, 3) if number != book.active_number]), who="test", why="a swap")
        done.append(book.active_number)
        await book.drain()


@pytest.mark.parametrize("mode", MODES)
async def test_hundred_swaps_at_random_moments_mix_lose_and_repeat_nothing(mode: str, tmp_path: Path) -> None:
    dice = random.Random(mode)
    book = await open_book(tmp_path)
    swaps: list[int] = []
    swapping = asyncio.create_task(swap_at_random(book, dice, swaps))
    used: Counter[int] = Counter()
    while len(swaps) < NUM_SWAPS:
        reward = SwappedReward(dice)
        setup = CollectorSetup(rollout=SlowRollout(dice), reward=reward, routes=CountedBook(book))
        MODES[mode](setup)
        collected = await setup.collect(num_groups=NUM_GROUPS)
        check_step(setup, reward, collected.num_groups)
        used.update(records[0].route_revision for records in setup.queue.groups)
        assert not swapping.done()
    swapping.cancel()
    await asyncio.wait([swapping])
    await book.drain()
    assert set(used) == {1, 2, 3}
    book.close()


def check_step(setup: CollectorSetup, reward: SwappedReward, num_groups: int) -> None:
    """What must hold of every step."""
    assert set(reward.seen.values()) == {1}, "no sample is scored twice"
    scorers_of: dict[str, set[str]] = {}
    for sample_id, scorer in reward.seen:
        scorers_of.setdefault(sample_id.split("/")[0].removesuffix("-greedy"), set()).add(scorer)
    assert all(len(scorers) == 1 for scorers in scorers_of.values()), "no group mixes revisions, its greedy answer included"
    assert len(setup.queue.groups) == num_groups == len(setup.queued), "no group is queued twice"
    for name, records in setup.queued.items():
        assert [record.sample_index for record in records] == [0, 1], "no record is lost"
        (number,) = {record.route_revision for record in records}
        assert scorers_of[name] == {SCORERS[number - 1]}
        assert {record.reward // 1 for record in records} == {VALUES[SCORERS[number - 1]]}
        assert {part.scorer for record in records for part in record.reward_components} == scorers_of[name]
    if setup.max_refills is None:
        assert sorted(setup.queued) == sorted(f"g{number}" for number in range(NUM_GROUPS))
