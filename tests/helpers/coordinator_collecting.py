"""The path from prompts to queued records over in-memory servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_coordinator.collected import CollectedExperience
from shoal_coordinator.dispatcher import Dispatcher, GenerationRequest
from shoal_coordinator.experience import CollectionPlan, ExperienceCollector
from shoal_coordinator.prompts import PromptTask
from shoal_coordinator.rewards.calls import ScorerCalls
from shoal_coordinator.rewards.scored import ScoredGroup
from shoal_coordinator.rewards.scoring import GroupScorer
from shoal_coordinator.stage_clock import StageClock

from shoal.config.models import RewardSection, RolloutSection
from shoal.types import ExperienceRecord, ScoreSample
from tests.helpers.coordinator_fakes import (
    VOCAB_SIZE,
    FakeQueue,
    FakeReward,
    FakeRollout,
    FakeTokenizer,
    make_request,
    make_task,
    reward_pool,
    rollout_pool,
)
from tests.helpers.routes import CountedRoutes, FakeAttention, FakeRoutes, revision_of


@dataclass
class CollectorSetup:
    """A collector with one rollout and one reward server; prompts are g0, g1, ..., their rows those of `rows` or the default.

    routes: by default what section asks for. repairs: what is done about each alert; without any the run is stopped.
    """

    rollout: FakeRollout = field(default_factory=FakeRollout)
    reward: FakeReward = field(default_factory=FakeReward)
    queue: FakeQueue = field(default_factory=FakeQueue)
    clock: StageClock = field(default_factory=StageClock)
    section: RewardSection = field(default_factory=lambda: RewardSection(scorer="sum"))
    routes: CountedRoutes | None = None
    attention: FakeAttention = field(default_factory=FakeAttention)
    offered: list[ScoredGroup] = field(default_factory=list)
    probes: list[ScoreSample] = field(default_factory=list)
    max_unscored_share: float = 0.5
    greedy: GenerationRequest | None = None
    max_refills: int | None = None
    rows: dict[str, dict[str, object]] = field(default_factory=dict)
    position: int = 0
    taken: list[int] = field(default_factory=list)

    async def collect(self, num_groups: int = 2, num_samples: int = 2) -> CollectedExperience:
        """One step."""
        dispatcher = Dispatcher(
            rollout_pool(a=self.rollout),
            RolloutSection(retries=0),
            run_id="run",
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
            wait_for_server_s=1.0,
        )
        if self.routes is None:
            self.routes = FakeRoutes(revision_of(self.section))
        scorer = GroupScorer(ScorerCalls(reward_pool(r=self.reward), max_open_requests=64), FakeTokenizer(), self.clock)
        collector = ExperienceCollector(
            dispatcher,
            scorer,
            self.queue,
            routes=self.routes,
            attention=self.attention,
            clock=self.clock,
            run_id="run",
            tokenizer_hash="hash",
            max_unscored_share=self.max_unscored_share,
            shadow=self,
            probes=self,
        )
        plan = CollectionPlan(num_groups=num_groups, request=make_request(num_samples), greedy=self.greedy, max_refills=self.max_refills)
        try:
            return await collector.collect(self.take, plan)
        finally:
            assert self.routes.num_open == 0, "every pin is released, however the step ends"

    def offer(self, scored: ScoredGroup) -> None:
        """Look on, as a shadow does."""
        self.offered.append(scored)

    def note(self, samples: Sequence[ScoreSample]) -> None:
        """Look on, as a probe set does."""
        self.probes += samples

    def take(self, num_prompts: int) -> list[PromptTask]:
        """Issue the next prompts."""
        self.taken.append(num_prompts)
        start, self.position = self.position, self.position + num_prompts
        return [make_task(f"g{index}", row=self.rows.get(f"g{index}")) for index in range(start, self.position)]

    @property
    def queued(self) -> dict[str, list[ExperienceRecord]]:
        """Records by group."""
        return {group[0].group_id: group for group in self.queue.groups}
