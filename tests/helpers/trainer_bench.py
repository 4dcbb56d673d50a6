"""Small policies, records and ranks to test the trainer with: no services, no Redis."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from shoal_trainer.actor import Actor
from shoal_trainer.building import build_actor, build_critic
from shoal_trainer.critic import Critic
from shoal_trainer.distributed import RankContext, join_gang
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

from shoal.config.models import RunConfig
from shoal.errors import NotFoundError
from shoal.types import (
    Batch,
    ExperienceRecord,
    FinishReason,
    Float32Array,
    MiniBatch,
    PolicyVersionSpan,
    RecordRef,
    SamplingParams,
    ScoreStatus,
)
from tests.helpers.forked import fork_context

RUN_ID = "test-run"
VOCAB_SIZE = 61


def save_policy(folder: Path, architecture: str = "qwen2", *, tied: bool = True, dropout: float = 0.0, seed: int = 0) -> Path:
    """Write a random two-layer model without any pad, bos or eos id."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_architecture(architecture, tied, dropout), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Wider than the usual initialisation, so that a wrong position or mask shows.
            parameter.mul_(4.0) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    return folder


def _architecture(name: str, tied: bool, dropout: float) -> PretrainedConfig:
    if name == "gpt2":
        return GPT2Config(
            vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=dropout, bos_token_id=None, eos_token_id=None, tie_word_embeddings=tied,
        )  # fmt: skip
    cls = {"qwen2": Qwen2Config, "llama": LlamaConfig}[name]
    return cls(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=tied, attention_dropout=dropout, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip


def make_record(
    index: int,
    *,
    group: int = 0,
    num_prompt: int = 3,
    num_response: int = 5,
    reward: float = 1.0,
    **changes: Any,  # noqa: ANN401
) -> ExperienceRecord:
    """A scored record with seeded tokens; the last trained token carries the reward."""
    rng = np.random.default_rng(1000 + index)
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "uid": f"u{group}",
        "group_id": f"u{group}",
        "sample_index": index,
        "attempt": 0,
        "prompt_ids": rng.integers(0, VOCAB_SIZE, num_prompt).astype(np.int32),
        "response_ids": rng.integers(0, VOCAB_SIZE, num_response).astype(np.int32),
        "response_mask": np.ones(num_response, np.bool_),
        "rollout_logprobs": -rng.random(num_response).astype(np.float32) * 4,
        "policy_version_spans": (PolicyVersionSpan(policy_version=0, start=0, end=num_response),),
        "sampling": SamplingParams(max_new_tokens=max(num_response, 1)),
        "finish_reason": FinishReason.STOP,
        "reward_status": ScoreStatus.SCORED,
        "reward": reward,
    }
    return ExperienceRecord(**(fields | changes))


def ragged_records(num: int = 6) -> list[ExperienceRecord]:
    """Records of different lengths, groups of two, rewards that differ, one with a masked hole."""
    records = []
    for index in range(num):
        num_response = 2 + (index * 3) % 7
        mask = np.ones(num_response, np.bool_)
        if index == 1:
            mask[1] = False
        records.append(
            make_record(
                index,
                group=index // 2,
                num_prompt=1 + index % 4,
                num_response=num_response,
                reward=float(index % 3) - 0.5,
                response_mask=mask,
            )
        )
    return records


def key_of(record: ExperienceRecord) -> str:
    """Redis key of a record."""
    return f"shoal:{record.run_id}:record:{record.uid}:{record.sample_index}:{record.attempt}"


def ref_of(record: ExperienceRecord) -> RecordRef:
    """Reference to a record."""
    return RecordRef(
        key=key_of(record),
        group_id=record.group_id,
        num_prompt_tokens=len(record.prompt_ids),
        num_response_tokens=len(record.response_ids),
        reward=record.reward,
    )


Split = Sequence[Sequence[Sequence[Sequence[int]]]]
"""ranks -> mini-batches -> micro-batches -> indices of records."""


def make_batch(records: Sequence[ExperienceRecord], split: Split, step: int = 1) -> Batch:
    """Split records over ranks, mini-batches and micro-batches."""
    refs = [ref_of(record) for record in records]
    ranks = tuple(
        tuple(MiniBatch(micro_batches=tuple(tuple(refs[i] for i in micro) for micro in mini)) for mini in minis) for minis in split
    )
    return Batch(run_id=RUN_ID, step=step, ranks=ranks)


def even_split(num_records: int, num_ranks: int, num_micro: int) -> Split:
    """One mini-batch; records dealt round robin to ranks, then to micro-batches; some may be empty."""
    return [[[list(range(num_records))[rank::num_ranks][micro::num_micro] for micro in range(num_micro)]] for rank in range(num_ranks)]


class MemoryRecords:
    """Records and columns in memory, with the errors of the real reader."""

    def __init__(self, records: Sequence[ExperienceRecord]) -> None:
        self.records = {key_of(record): record for record in records}
        self.columns: dict[tuple[str, str], Float32Array] = {}

    def fetch(self, record_keys: Sequence[str]) -> list[ExperienceRecord]:
        """Read records."""
        missing = [key for key in record_keys if key not in self.records]
        if missing:
            raise NotFoundError(f"record {missing[0]!r} is not there")
        return [self.records[key] for key in record_keys]

    def write_columns(self, name: str, columns: Mapping[str, Float32Array]) -> None:
        """Write one column."""
        self.columns |= {(name, key): value for key, value in columns.items()}

    def read_column(self, name: str, record_keys: Sequence[str]) -> list[Float32Array]:
        """Read one column."""
        missing = [key for key in record_keys if (name, key) not in self.columns]
        if missing:
            raise NotFoundError(f"column {name!r} of {missing[0]!r} is not there")
        return [self.columns[name, key] for key in record_keys]


def run_config(model: Path, /, **sections: Mapping[str, Any]) -> RunConfig:
    """A run's configuration around a model; `sections` override single fields."""
    tree: dict[str, Any] = {
        "run": {"id": RUN_ID, "folder": str(model.parent / "run")},
        "model": {"path": str(model)},
        "data": {"train": "unused.jsonl"},
        "actor": {"lr": 1e-3, "device": "cpu"},
        "critic": {"lr": 1e-3, "device": "cpu"},
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    return RunConfig.model_validate(tree)


@contextmanager
def one_rank(config: RunConfig) -> Iterator[RankContext]:
    """A gang of one in this process."""
    with _torchrun_environment(0, 1, _free_port()):
        context = join_gang(config.actor)
        try:
            yield context
        finally:
            dist.destroy_process_group()


@contextmanager
def _torchrun_environment(rank: int, world_size: int, port: int) -> Iterator[None]:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
    names = {name: str(value) for name, value in values.items()} | {"MASTER_ADDR": "127.0.0.1"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


RankJob = Callable[[RankContext, RunConfig, Path], None]


def run_ranks(job: RankJob, config: RunConfig, world_size: int, folder: Path) -> None:
    """Run a module-level function on gloo ranks in processes of their own; it leaves its results in `folder`."""
    if world_size == 1:
        with one_rank(config) as context:
            job(context, config, folder)
        return
    fork_context()  # which start_processes takes
    arguments = (job, config, world_size, _free_port(), folder)
    mp.start_processes(_rank_main, arguments, nprocs=world_size, start_method="forkserver")  # type: ignore[attr-defined,no-untyped-call]


def _rank_main(rank: int, job: RankJob, config: RunConfig, world_size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    with _torchrun_environment(rank, world_size, port):
        context = join_gang(config.actor)
        try:
            job(context, config, folder)
        finally:
            dist.destroy_process_group()


def whole_gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of all parameters, gathered from all ranks."""
    return {name: p.grad.full_tensor().clone() for name, p in module.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def whole_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, gathered from all ranks."""
    return {name: p.detach().full_tensor().clone() for name, p in module.named_parameters()}  # type: ignore[attr-defined]


def ppo_step(
    actor: Actor, critic: Critic | None, batch: Batch, kl_coef: float = 0.05, kl_loss_coef: float = 0.05
) -> tuple[dict[str, float], dict[str, float]]:
    """One whole training step; returns all metrics of both."""
    actor.forward_batch(batch)
    if critic is not None:
        critic.forward_batch(batch)
    metrics = actor.compute_advantages(batch.step, kl_coef, kl_loss_coef)
    critic_metrics = critic.update_batch(batch.step).metrics if critic is not None else {}
    return metrics | actor.update_batch(batch.step).metrics, critic_metrics


def build_pair(
    config: RunConfig, context: RankContext, records: Sequence[ExperienceRecord], *, overhead_tokens: float | None = None
) -> tuple[Actor, Critic, MemoryRecords]:
    """Actor and critic on one rank over records in memory; overhead_tokens 0 makes a pass of every length."""
    source = MemoryRecords(records)
    actor, critic = build_actor(config, context, source), build_critic(config, context, source)
    if overhead_tokens is not None:
        for loader in (actor._loader, critic._loader):
            loader._passes = replace(loader._passes, overhead_tokens=overhead_tokens)
    return actor, critic, source
