"""In-memory rollout and reward clients, a tokenizer and a queue for the coordinator's unit tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from shoal_coordinator.dispatcher import GenerationRequest, RolloutEndpoint
from shoal_coordinator.prompts import PromptTask
from shoal_coordinator.rewards.endpoint import RewardEndpoint
from shoal_coordinator.server_pool import ServerPool
from shoal_coordinator.tokenizing import Prompt
from shoal_coordinator.waiting import WaitBoard

from shoal.types import (
    Completion,
    ExperienceRecord,
    FinishReason,
    Int32Array,
    PolicyVersionSpan,
    SamplingParams,
    ScorerDescription,
    ScoreResult,
    ScoreSample,
    ScoreStatus,
)
from tests.helpers.routes import FAKE_VERSION

VOCAB_SIZE = 100


def make_task(uid: str = "e0-i0", num_prompt_tokens: int = 3, row: dict[str, object] | None = None) -> PromptTask:
    """A prompt of distinct small ids; its row has the uid as answer by default."""
    return PromptTask(
        uid=uid,
        group_id=uid,
        prompt_ids=np.arange(1, num_prompt_tokens + 1, dtype=np.int32),
        text=f"prompt {uid}",
        row={"answer": uid} if row is None else row,
    )


def make_request(num_samples: int = 2, *, seed: int | None = 7, min_policy_version: int = 0) -> GenerationRequest:
    """Four new tokens at most."""
    return GenerationRequest(
        sampling=SamplingParams(max_new_tokens=4), num_samples=num_samples, seed=seed, min_policy_version=min_policy_version
    )


def make_completion(
    sample_index: int, ids: Sequence[int], *, policy_version: int = 1, finish_reason: FinishReason = FinishReason.STOP
) -> Completion:
    """A completion with log-probability -1 for every id."""
    return Completion(
        sample_index=sample_index,
        response_ids=np.array(ids, np.int32),
        rollout_logprobs=np.full(len(ids), -1, np.float32),
        finish_reason=finish_reason,
        policy_version_spans=(PolicyVersionSpan(policy_version=policy_version, start=0, end=len(ids)),),
        latency_ms=1.0,
        engine_id="engine",
    )


def sampled_ids(seed: int) -> list[int]:
    """What FakeRollout samples for a seed: one to four ids."""
    return list(map(int, np.random.default_rng(seed).integers(0, VOCAB_SIZE, 1 + seed % 4)))


@dataclass
class FakeRollout:
    """Samples ids from the seeds; a script answers differently.

    script gets the request id and the completions to send, and returns what to send instead.
    fail_after: (number of completions, error raised after them).
    gate, if given, holds every call back until it is set; gates does so for single uids. requests: (request_id, seeds) of every
    call, sampling: its settings.
    """

    script: Callable[[str, list[Completion]], list[Completion]] = lambda request_id, completions: completions
    gate: asyncio.Event | None = None
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    fail_after: tuple[int, Exception] | None = None
    policy_version: int = 1
    requests: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    sampling: list[SamplingParams] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    num_open: int = 0
    num_cancelled: int = 0

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
        self.requests.append((request_id, tuple(seeds)))
        self.sampling.append(sampling)
        self.num_open += 1
        self.entered.set()
        try:
            gate = self.gates.get(request_id.split("/")[1], self.gate)
            if gate is not None:
                await gate.wait()
            ids = [sampled_ids(seed) for seed in seeds] or [[int(prompt_ids[0])]] * num_samples
            completions = [make_completion(index, own, policy_version=self.policy_version) for index, own in enumerate(ids)]
            for number, completion in enumerate(self.script(request_id, completions)):
                if self.fail_after is not None and number >= self.fail_after[0]:
                    raise self.fail_after[1]
                yield completion
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_open -= 1


def scored_one(sample: ScoreSample) -> ScoreResult:
    """Everything is worth 1."""
    return ScoreResult(sample_id=sample.sample_id, status=ScoreStatus.SCORED, value=1.0)


def offered(*names: str, version: str = FAKE_VERSION, fingerprint: str = "", needs_token_ids: bool = False) -> list[ScorerDescription]:
    """Descriptions of scorers."""
    return [
        ScorerDescription(name=name, version=version, description="", fingerprint=fingerprint, needs_token_ids=needs_token_ids)
        for name in names
    ]


@dataclass
class FakeReward:
    """Scores with a function, or fails with the next of failures.

    scorers: what it offers. gate, if given, holds every call back until it is set. calls holds the samples of every call, asked the name
    and version that it asked for; num_open and max_open count calls that are under way.
    """

    score_one: Callable[[ScoreSample], ScoreResult] = scored_one
    failures: list[Exception] = field(default_factory=list)
    scorers: list[ScorerDescription] = field(default_factory=lambda: offered("sum", "exact", "run", "judge", "arithmetic"))
    gate: asyncio.Event | None = None
    calls: list[list[ScoreSample]] = field(default_factory=list)
    timeouts_s: list[float] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0

    async def score(self, scorer: str, version: str, samples: Sequence[ScoreSample], *, timeout_s: float) -> tuple[str, list[ScoreResult]]:
        """See the class."""
        self.calls.append(list(samples))
        self.asked.append((scorer, version))
        self.timeouts_s.append(timeout_s)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.failures:
                raise self.failures.pop(0)
            return version or FAKE_VERSION, [self.score_one(sample) for sample in samples]
        finally:
            self.num_open -= 1


class FakeTokenizer:
    """Ids are character codes."""

    tokenizer_hash = "hash"
    bos_token_id: int | None = None

    def text(self, prompt: Prompt) -> str:
        """Strings as they are; messages joined."""
        return prompt if isinstance(prompt, str) else "".join(str(message["content"]) for message in prompt)

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        """One id a character."""
        return [np.array([ord(character) for character in text], np.int32) for text in texts]

    def decode(self, responses: Sequence[Int32Array]) -> list[str]:
        """Ids separated by blanks."""
        return [" ".join(map(str, ids.tolist())) for ids in responses]


@dataclass
class FakeQueue:
    """Remembers what was put; called is set with the first call."""

    groups: list[list[ExperienceRecord]] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)

    async def put_groups(self, groups: Sequence[Sequence[ExperienceRecord]], *, timeout_s: float) -> int:
        """See the class."""
        self.called.set()
        self.groups += [list(group) for group in groups]
        return sum(map(len, groups))


def rollout_pool(**servers: FakeRollout) -> ServerPool[RolloutEndpoint]:
    """A pool of fake rollout servers."""
    pool: ServerPool[RolloutEndpoint] = ServerPool("rollout server", WaitBoard())
    for server_id, server in servers.items():
        pool.add(server_id, server)
    return pool


def reward_pool(**servers: FakeReward) -> ServerPool[RewardEndpoint]:
    """A pool of fake reward servers."""
    pool: ServerPool[RewardEndpoint] = ServerPool("reward server", WaitBoard())
    for server_id, server in servers.items():
        pool.add(server_id, server)
    return pool
