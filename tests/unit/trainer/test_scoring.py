"""Scores of given responses: those of the plain model, whatever they are batched with, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_trainer.actor import Actor
from shoal_trainer.distributed import RankContext
from transformers import AutoModelForCausalLM

from shoal.errors import InvalidRequestError
from shoal.types import TokenSequence
from tests.helpers.trainer_bench import (
    VOCAB_SIZE,
    build_pair,
    even_split,
    make_batch,
    make_record,
    ppo_step,
    ragged_records,
    run_config,
    whole_parameters,
)

MAX_TOKENS = 256 + 8


def sequence(index: int, num_prompt: int, num_response: int) -> TokenSequence:
    record = make_record(index, num_prompt=num_prompt, num_response=max(num_response, 1))
    return TokenSequence(prompt_ids=tuple(record.prompt_ids.tolist()), response_ids=tuple(record.response_ids.tolist()[:num_response]))


SEQUENCES = [sequence(0, 3, 5), sequence(1, 1, 1), sequence(2, 7, 0), sequence(3, 2, 9), sequence(4, 4, 4)]


def actor_of(folder: Path, context: RankContext, **gang: Any) -> Actor:  # noqa: ANN401
    return build_pair(run_config(folder, actor=gang), context, ragged_records())[0]


def plain_scores(folder: Path, scored: TokenSequence) -> tuple[torch.Tensor, list[int]]:
    """The same by an ordinary forward of the one row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*scored.prompt_ids, *scored.response_ids]])).logits[0, len(scored.prompt_ids) - 1 : -1]
    chosen = torch.tensor(scored.response_ids, dtype=torch.int64)
    return torch.log_softmax(logits, dim=-1).gather(1, chosen[:, None])[:, 0], logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("pass_tokens", [1, 20, 16384])
def test_scores_are_those_of_the_plain_model_in_the_order_asked(policy_folder: Path, context: RankContext, pass_tokens: int) -> None:
    actor = actor_of(policy_folder, context, micro_batch_tokens=pass_tokens)
    scores = actor.score_tokens(SEQUENCES)
    assert [len(score.logprobs) for score in scores] == [5, 1, 0, 9, 4]
    for asked, score in zip(SEQUENCES, scores, strict=True):
        logprobs, greedy_ids = plain_scores(policy_folder, asked)
        assert torch.allclose(torch.tensor(score.logprobs), logprobs, atol=1e-5)
        assert list(score.greedy_ids) == greedy_ids
    assert actor.score_tokens([]) == []


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([sequence(0, 1, 1)] * 65, "65 sequences are to be scored; send at most 64"),
        ([TokenSequence(prompt_ids=(), response_ids=(1,))], "sequence 0 has no prompt"),
        ([sequence(0, 1, 1), TokenSequence(prompt_ids=(1,), response_ids=(1,) * MAX_TOKENS)], f"sequence 1 has {MAX_TOKENS + 1} tokens"),
        ([TokenSequence(prompt_ids=(1,), response_ids=(0, VOCAB_SIZE))], rf"has id {VOCAB_SIZE}; ids are in \[0, {VOCAB_SIZE}\)"),
        ([TokenSequence(prompt_ids=(-1,), response_ids=(0,))], r"has id -1; ids are in \[0, "),
    ],
)
def test_requests_beyond_the_bounds_are_refused(
    policy_folder: Path, context: RankContext, sequences: Sequence[TokenSequence], message: str
) -> None:
    actor = actor_of(policy_folder, context)
    with pytest.raises(InvalidRequestError, match=message):
        actor.score_tokens(sequences)
    assert len(actor.score_tokens([TokenSequence(prompt_ids=(1,), response_ids=(1,) * (MAX_TOKENS // 8))])) == 1


@pytest.mark.parametrize("retain_graph_tokens", [0, 10_000])
def test_scoring_between_the_commands_of_a_step_changes_nothing(
    policy_folder: Path, context: RankContext, retain_graph_tokens: int
) -> None:
    batch = make_batch(ragged_records(), even_split(6, 1, 2))
    undisturbed, disturbed = (actor_of(policy_folder, context, retain_graph_tokens=retain_graph_tokens) for _ in range(2))
    config = run_config(policy_folder)
    expected = []
    for actor, scores in ((undisturbed, False), (disturbed, True)):
        _, critic, source = build_pair(config, context, ragged_records())
        actor._loader._records = source

        def score(actor: Actor = actor, scores: bool = scores) -> None:
            if scores:
                actor.score_tokens(SEQUENCES)

        score()
        actor.forward_batch(batch)
        critic.forward_batch(batch)
        score()
        actor.compute_advantages(1, 0.05, 0.0)
        score()
        expected.append(actor.update_batch(1))
    for name in ("actor_loss", "grad_norm", "entropy", "kl", "ratio_max_deviation"):
        assert expected[0].metrics[name] == expected[1].metrics[name], name
    ours, theirs = whole_parameters(disturbed.module), whole_parameters(undisturbed.module)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert disturbed.policy_version == 1


def test_scores_follow_the_policy(policy_folder: Path, context: RankContext) -> None:
    actor, critic, _ = build_pair(run_config(policy_folder), context, ragged_records())
    before = actor.score_tokens(SEQUENCES)
    ppo_step(actor, critic, make_batch(ragged_records(), even_split(6, 1, 1)))
    assert actor.score_tokens(SEQUENCES) != before
