"""Gangs under the real torchrun command with a real Redis server and real gRPC clients.

The tests share two gangs (starting one takes long) and run in order: work first, then ways to end.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from shoal.config.models import RunConfig
from shoal.errors import InvalidRequestError, NotFoundError, ShoalError, StateError
from shoal.queue.experience import ExperienceQueue
from shoal.types import Batch, TokenSequence, TrainerRole, UpdateResult
from tests.helpers.processes import wait_gone
from tests.helpers.trainer_bench import (
    RUN_ID,
    build_pair,
    even_split,
    make_batch,
    one_rank,
    ppo_step,
    ragged_records,
    run_config,
    save_policy,
    whole_parameters,
)
from tests.helpers.trainer_process import GangProcess, running_gang
from tests.helpers.valkey import running_valkey
from tests.helpers.weight_source import StagingServer, closing, here

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

KL_COEF = 0.05
NUM_STEPS = 2
TIMEOUT_S = 60.0


@dataclass(slots=True)
class Gangs:
    """An actor of two ranks and a critic of one."""

    config: RunConfig
    folder: Path
    actor: GangProcess
    critic: GangProcess


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gangs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gangs]:
    folder = tmp_path_factory.mktemp("gangs")
    model = save_policy(folder / "model")
    with running_valkey(folder / "redis") as server:
        config = run_config(model, redis={"url": server.url}, telemetry={"metrics_port": -1})
        await _put_records(server.url)
        async with AsyncExitStack() as stack:
            actor, critic = await asyncio.gather(
                *(stack.enter_async_context(running_gang(config, role, ranks, folder)) for role, ranks in (("actor", 2), ("critic", 1)))
            )
            yield Gangs(config=config, folder=folder, actor=actor, critic=critic)


async def _put_records(url: str) -> None:
    queue = await ExperienceQueue.connect(url, RUN_ID, max_pending_groups=16)
    records = ragged_records()
    for group in sorted({record.group_id for record in records}):
        await queue.put_group([record for record in records if record.group_id == group])
    await queue.close()


def batch_for(ranks: int, step: int) -> Batch:
    return make_batch(ragged_records(), even_split(6, ranks, 2), step)


async def step_of(gangs: Gangs, step: int) -> tuple[UpdateResult, UpdateResult]:
    """One training step as the coordinator drives it."""
    actor, critic = gangs.actor.trainer, gangs.critic.trainer
    await asyncio.gather(
        actor.forward_batch(batch_for(2, step), timeout_s=TIMEOUT_S), critic.forward_batch(batch_for(1, step), timeout_s=TIMEOUT_S)
    )
    await actor.compute_advantages(step, KL_COEF, 0.0, timeout_s=TIMEOUT_S)
    updates = await asyncio.gather(actor.update_batch(step, timeout_s=TIMEOUT_S), critic.update_batch(step, timeout_s=TIMEOUT_S))
    return updates[0], updates[1]


async def test_gang_describes_itself(gangs: Gangs) -> None:
    actor = await gangs.actor.trainer.describe(timeout_s=TIMEOUT_S)
    critic = await gangs.critic.trainer.describe(timeout_s=TIMEOUT_S)
    assert (actor.role, actor.world_size, actor.has_reference, actor.step) == (TrainerRole.ACTOR, 2, True, 0)
    assert (critic.role, critic.world_size, critic.has_reference) == (TrainerRole.CRITIC, 1, False)
    # The value head: one weight per hidden unit and a bias.
    assert critic.num_parameters == actor.num_parameters + 33


async def test_gang_refuses_what_it_cannot_do_and_goes_on(gangs: Gangs) -> None:
    actor, critic = gangs.actor.trainer, gangs.critic.trainer
    with pytest.raises(StateError, match="update_batch of step 1"):
        await actor.update_batch(1, timeout_s=TIMEOUT_S)
    with pytest.raises(InvalidRequestError, match="1 ranks"):
        await actor.forward_batch(batch_for(1, 1), timeout_s=TIMEOUT_S)
    with pytest.raises(InvalidRequestError, match="actor"):
        await critic.compute_advantages(1, KL_COEF, 0.0, timeout_s=TIMEOUT_S)
    with pytest.raises(InvalidRequestError, match="critic"):
        await critic.export_model("/nowhere", timeout_s=TIMEOUT_S)
    lost = batch_for(2, 1)
    lost_key = lost.ranks[1][0].micro_batches[0][0].key + "9"
    refs = tuple(tuple(rank for rank in ranks) for ranks in lost.ranks)
    assert lost_key not in str(refs)
    with pytest.raises(NotFoundError, match="rank 1"):
        await actor.forward_batch(_with_key(lost, lost_key), timeout_s=TIMEOUT_S)


def _with_key(batch: Batch, key: str) -> Batch:
    """The batch with the first record of rank 1 under another key."""
    from dataclasses import replace

    first, second = batch.ranks
    micro = second[0].micro_batches
    changed = ((replace(micro[0][0], key=key), *micro[0][1:]), *micro[1:])
    return replace(batch, ranks=(first, (replace(second[0], micro_batches=changed),)))


async def test_gang_of_two_trains_as_one_rank_does(gangs: Gangs) -> None:
    results = [await step_of(gangs, step) for step in range(1, NUM_STEPS + 1)]
    again = await gangs.actor.trainer.update_batch(NUM_STEPS, timeout_s=TIMEOUT_S)
    assert again == results[-1][0]
    exported = await gangs.actor.trainer.export_model(str(gangs.folder / "exported"), timeout_s=TIMEOUT_S)
    assert exported.policy_version == results[-1][0].policy_version == NUM_STEPS
    trained = AutoModelForCausalLM.from_pretrained(exported.folder, dtype=torch.float32)
    records = ragged_records()
    with one_rank(gangs.config) as context:
        actor, critic, _ = build_pair(gangs.config, context, records)
        alone = [ppo_step(actor, critic, batch_for(1, step), KL_COEF) for step in range(1, NUM_STEPS + 1)]
        expected = whole_parameters(actor.module)
    for (actor_result, critic_result), (actor_metrics, critic_metrics) in zip(results, alone, strict=True):
        assert actor_result.applied
        assert critic_result.applied
        for name in ("actor_loss", "grad_norm", "entropy", "kl", "logprob_max_difference"):
            assert actor_result.metrics[name] == pytest.approx(actor_metrics[name], abs=1e-5, rel=1e-4), name
        for name in ("critic_loss", "grad_norm", "value_mean"):
            assert critic_result.metrics[name] == pytest.approx(critic_metrics[name], abs=1e-5, rel=1e-4), name
    for name, value in expected.items():
        assert torch.allclose(trained.get_parameter(name.removeprefix("language_model.")), value, atol=1e-5), name


async def test_gang_pushes_the_weights_that_it_trained(gangs: Gangs) -> None:
    trained = AutoModelForCausalLM.from_pretrained(gangs.folder / "exported", dtype=torch.float32)
    parameters = dict(trained.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    source, settings = gangs.actor.weights, gangs.config.push
    servers = [StagingServer.copying(f"rollout-{index}", shapes, str(gangs.folder), place=here(settings)) for index in range(2)]
    with closing(*servers):
        layout, version = await source.describe(timeout_s=TIMEOUT_S)
        assert (version, len(layout.places)) == (NUM_STEPS, 2)
        planned = await source.prepare("push", version, [server.target() for server in servers], timeout_s=TIMEOUT_S)
        for server in servers:
            server.plan(layout, planned[server.layout.server_id].plan_hash, settings)
        servers[0].close()
        transferred = await source.transfer("push", {}, timeout_s=TIMEOUT_S)
        assert "rank 1" in transferred.servers["rollout-0"].error
        sent = transferred.servers["rollout-1"]
        assert (sent.error, sent.sent_bytes) == ("", sum(parameter.nbytes for parameter in parameters.values()))
        servers[1].verify(version, sent.pairs)
        for name, parameter in parameters.items():
            assert torch.equal(servers[1].parameters()[name], parameter), name
        hashes = {"rollout-1": planned["rollout-1"].plan_hash}
        (digests,) = (await source.digest(version, hashes, timeout_s=TIMEOUT_S)).values()
        assert {pair.rank for pair in digests} == {0, 1}
        await source.abort("push", timeout_s=TIMEOUT_S)
        with pytest.raises(StateError, match="push push is not prepared"):
            await source.transfer("push", {}, timeout_s=TIMEOUT_S)


async def test_gang_scores_tokens_without_changing(gangs: Gangs) -> None:
    trained = AutoModelForCausalLM.from_pretrained(gangs.folder / "exported", dtype=torch.float32)
    asked = TokenSequence(prompt_ids=(1, 2, 3), response_ids=(4, 5, 6))
    scores, version = await gangs.actor.trainer.score_tokens([asked, asked], timeout_s=TIMEOUT_S)
    with torch.no_grad():
        logits = trained(torch.tensor([[1, 2, 3, 4, 5, 6]])).logits[0, 2:-1]
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor([[4], [5], [6]]))[:, 0]
    assert version == NUM_STEPS
    assert len(scores) == 2
    for score in scores:
        assert torch.allclose(torch.tensor(score.logprobs), logprobs, atol=1e-5)
        assert list(score.greedy_ids) == logits.argmax(dim=-1).tolist()
    with pytest.raises(InvalidRequestError, match="ids are in"):
        await gangs.actor.trainer.score_tokens([TokenSequence(prompt_ids=(1,), response_ids=(9999,))], timeout_s=TIMEOUT_S)
    with pytest.raises(InvalidRequestError, match="only the actor scores"):
        await gangs.critic.trainer.score_tokens([asked], timeout_s=TIMEOUT_S)
    assert (await gangs.actor.trainer.describe(timeout_s=TIMEOUT_S)).step == NUM_STEPS


async def test_gang_ends_promptly_with_an_error_when_a_rank_is_killed(gangs: Gangs) -> None:
    ranks = gangs.actor.ranks()
    assert len(ranks) == 2
    running = asyncio.create_task(gangs.actor.trainer.forward_batch(batch_for(2, NUM_STEPS + 1), timeout_s=TIMEOUT_S))
    os.kill(max(ranks), signal.SIGKILL)
    assert await gangs.actor.wait_end(30) != 0
    assert wait_gone(ranks) == []
    with pytest.raises(ShoalError):
        await running


async def test_gang_ends_quickly_on_sigterm(gangs: Gangs) -> None:
    ranks = gangs.critic.ranks()
    gangs.critic.process.send_signal(signal.SIGTERM)
    await gangs.critic.wait_end(20)
    assert wait_gone(ranks) == []
    assert "server_stopped" in gangs.critic.log


@pytest.mark.slow
async def test_gang_does_not_outlive_a_killed_torchrun(gangs: Gangs, tmp_path: Path) -> None:
    async with running_gang(gangs.config, "critic", 1, tmp_path) as gang:
        ranks = gang.ranks()
        assert ranks
        gang.process.kill()
        await gang.wait_end(10)
        assert wait_gone(ranks) == []
