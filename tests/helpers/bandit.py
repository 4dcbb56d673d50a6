"""A contextual bandit small enough to be solved in seconds by the real actor and critic.

A prompt is one token, the right response two tokens that follow from it; each right token is worth half a point. The policy is a
random two-layer model over eight ids, so that a uniform one earns 1/8.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shoal_trainer.actor import Actor
from shoal_trainer.building import build_actor, build_critic
from shoal_trainer.distributed import RankContext
from transformers import AutoModelForCausalLM, LlamaConfig

from shoal.config.models import RunConfig
from shoal.types import Batch, ExperienceRecord, MiniBatch
from tests.helpers.trainer_bench import MemoryRecords, make_record, ref_of, run_config, whole_parameters

NUM_IDS = 8
NUM_PROMPTS = 4
NUM_TOKENS = 2
ACHIEVABLE_REWARD = 1.0


def save_bandit_policy(folder: Path, seed: int) -> Path:
    """Write a random policy, nearly uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=NUM_IDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=16, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def right_response(prompt: int) -> tuple[int, ...]:
    """The ids that earn the whole reward."""
    return ((prompt * 5 + 3) % NUM_IDS, (prompt * 7 + 6) % NUM_IDS)


def reward_of(prompt: int, response: list[int]) -> float:
    """Share of right ids."""
    return float(np.mean([given == right for given, right in zip(response, right_response(prompt), strict=True)]))


class Bandit:
    """Trains a policy on the bandit, sampling from the trained weights themselves.

    Args:
        sections: settings of the run.
        group_size: samples of each prompt in a step.
    """

    def __init__(
        self,
        folder: Path,
        context: RankContext,
        seed: int,
        sections: Mapping[str, Mapping[str, Any]],
        *,
        group_size: int = 16,
    ) -> None:
        self.config: RunConfig = run_config(save_bandit_policy(folder / f"policy-{seed}", seed), **sections)
        self._records = MemoryRecords([])
        self.actor: Actor = build_actor(self.config, context, self._records)
        self.critic = build_critic(self.config, context, self._records) if self.config.algorithm.has_critic else None
        self._engine = AutoModelForCausalLM.from_pretrained(self.config.model.path, dtype=torch.float32).eval()
        self._rng = np.random.default_rng(seed)
        self._group_size = group_size
        self.step = 0

    def train(self, num_steps: int) -> list[float]:
        """Mean sampled reward of every step, before its update."""
        return [self._train_step() for _ in range(num_steps)]

    def _train_step(self) -> float:
        self.step += 1
        records = self._sample()
        self._records.records = {ref_of(record).key: record for record in records}
        batch = self._split(records)
        self.actor.forward_batch(batch)
        if self.critic is not None:
            self.critic.forward_batch(batch)
        algorithm = self.config.algorithm
        self.actor.compute_advantages(self.step, algorithm.kl_coef, algorithm.kl_loss_coef)
        if self.critic is not None:
            self.critic.update_batch(self.step)
        self.actor.update_batch(self.step)
        return float(np.mean([record.reward for record in records]))

    def _split(self, records: list[ExperienceRecord]) -> Batch:
        """Whole groups to the mini-batches, one after the other."""
        refs = [ref_of(record) for record in records]
        count = self.config.algorithm.mini_batches
        size = len(refs) // count
        minis = tuple(MiniBatch(micro_batches=(tuple(refs[index * size : (index + 1) * size]),)) for index in range(count))
        return Batch(run_id=self.config.run.id, step=self.step, ranks=(minis,))

    def _sample(self) -> list[ExperienceRecord]:
        prompts = np.repeat(np.arange(NUM_PROMPTS), self._group_size)
        responses, logprobs = self._generate(prompts)
        return [
            make_record(
                index,
                group=self.step * NUM_PROMPTS + int(prompt),
                prompt_ids=np.array([prompt], np.int32),
                response_ids=responses[index],
                response_mask=np.ones(NUM_TOKENS, np.bool_),
                rollout_logprobs=logprobs[index],
                reward=reward_of(int(prompt), responses[index].tolist()),
            )
            for index, prompt in enumerate(prompts)
        ]

    @torch.no_grad()
    def _generate(self, prompts: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Sample token by token from a copy of the weights in a plain model, as an engine would."""
        self._engine.load_state_dict({name.removeprefix("language_model."): p for name, p in whole_parameters(self.actor.module).items()})
        ids = torch.tensor(prompts, dtype=torch.int64)[:, None]
        logprobs: list[torch.Tensor] = []
        for _ in range(NUM_TOKENS):
            distribution = torch.log_softmax(self._engine(input_ids=ids).logits[:, -1].double(), dim=-1)
            chosen = (distribution + torch.tensor(self._rng.gumbel(size=distribution.shape))).argmax(dim=-1, keepdim=True)
            logprobs.append(distribution.gather(1, chosen)[:, 0])
            ids = torch.cat((ids, chosen), dim=1)
        return ids[:, 1:].numpy().astype(np.int32), torch.stack(logprobs, dim=1).numpy().astype(np.float32)
