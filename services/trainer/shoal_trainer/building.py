"""Builds what a rank runs: models, trainer, weight source, handlers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from shoal.config.gang import GangSection
from shoal.config.models import RunConfig
from shoal.errors import InvalidRequestError
from shoal.queue.records import RecordReader
from shoal.types import ExportResult, Place, TokenScores, TokenSequence, TrainerDescription, TrainerRole
from shoal.vocabulary import sampled_vocab_size
from shoal.weights.places import host_id
from shoal_trainer.actor import Actor
from shoal_trainer.buckets import pass_overhead_tokens
from shoal_trainer.commands import UPDATE, TrainerCommands
from shoal_trainer.critic import Critic
from shoal_trainer.distributed import RankContext, prepare_thread, shared_random_id
from shoal_trainer.export import Exporter
from shoal_trainer.inputs import Layout, pack_rows
from shoal_trainer.loading import BatchLoader, PassFormat, RecordSource
from shoal_trainer.lora import AdaptersOff
from shoal_trainer.merging import ServedWeights
from shoal_trainer.models import PolicyModel, layout_for, load_policy, load_value_model, named_shards, num_parameters

if TYPE_CHECKING:
    from shoal_trainer.weight_source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """What one rank runs. independent: names of commands without a collective."""

    trainer: Actor | Critic
    handlers: Mapping[str, Callable[[bytes], bytes]]
    independent: frozenset[str]
    num_parameters: int

    def describe(self, service_id: str, world_size: int) -> TrainerDescription:
        """Facts about the gang; may be called while a command runs."""
        return TrainerDescription(
            service_id=service_id,
            role=self.trainer.role,
            world_size=world_size,
            num_parameters=self.num_parameters,
            step=self.trainer.policy_version,
            has_reference=self.trainer.has_reference,
        )


def gang_section(config: RunConfig, role: TrainerRole) -> GangSection:
    """The settings of this role's gang."""
    return config.actor if role is TrainerRole.ACTOR else config.critic


def build_rank(config: RunConfig, role: TrainerRole, context: RankContext) -> RankParts:
    """Load and shard the models of this rank and make its handlers; takes seconds.

    Raises: ConfigError: a model or setting that cannot work.
    """
    records = RecordReader(config.redis.url, config.run.id)
    if role is TrainerRole.CRITIC:
        critic = build_critic(config, context, records)
        commands = TrainerCommands(critic, _refuse_export, _refuse_scores)
        return RankParts(
            trainer=critic, handlers=commands.handlers(), independent=frozenset(), num_parameters=num_parameters(critic.module)
        )
    return _actor_parts(config, context, build_actor(config, context, records))


def build_actor(config: RunConfig, context: RankContext, records: RecordSource) -> Actor:
    """Load the policy and, unless the KL enters nowhere, the reference."""
    policy = load_policy(config.model.path, config.model, config.actor, context, trainable=True, seed=config.run.seed)
    reference = build_reference(config, context, policy) if config.algorithm.has_reference else None
    loader = _loader(config, context, records, policy, policy.language_model.config, layout=layout_for(policy, reference))
    return Actor(config, context, policy, reference, loader)


def build_reference(config: RunConfig, context: RankContext, policy: PolicyModel) -> PolicyModel | AdaptersOff:
    """Load the reference; a policy with adapters is its own one, unless there is another path."""
    path = config.model.path if config.model.reference_path is None else config.model.reference_path
    if config.actor.lora is not None and path == config.model.path:
        return AdaptersOff(policy)
    return load_policy(path, config.model, config.actor, context, trainable=False)


def build_critic(config: RunConfig, context: RankContext, records: RecordSource) -> Critic:
    """Load the value model."""
    model = load_value_model(config.model, config.critic, context)
    feed_cut_ends = config.algorithm.bootstrap_truncated
    layout = layout_for(model)
    loader = _loader(config, context, records, model, model.backbone.config, layout=layout, feed_cut_ends=feed_cut_ends)
    return Critic(config, context, model, loader)


def _loader(
    config: RunConfig,
    context: RankContext,
    records: RecordSource,
    module: nn.Module,
    model_config: Any,  # noqa: ANN401 - transformers is untyped
    *,
    layout: Layout,
    feed_cut_ends: bool = False,
) -> BatchLoader:
    # Packed sequences of different lengths waste nothing: a micro-batch is one pass.
    overhead_tokens = math.inf if layout is pack_rows else pass_overhead_tokens(num_parameters(module), context.device)
    passes = PassFormat(
        vocab_size=sampled_vocab_size(config.model.path, int(model_config.get_text_config().vocab_size)),
        overhead_tokens=overhead_tokens,
        layout=layout,
        component_names=tuple(config.reward.weights),
        feed_cut_ends=feed_cut_ends,
    )
    return BatchLoader(records, context, config.run.id, passes)


def _actor_parts(config: RunConfig, context: RankContext, actor: Actor) -> RankParts:
    from shoal_trainer.weight_servicer import WeightCommands

    served = ServedWeights(named_shards(actor.module), config.actor.lora, context.device, lambda: actor.policy_version)
    exporter = Exporter(actor.module, served, config.model.path, context)
    weights = WeightCommands(_weight_source(config, context, actor, served), lambda: actor.policy_version).handlers()
    trainer = TrainerCommands(
        actor,
        lambda folder: exporter.export(folder, actor.policy_version),
        lambda sequences: (actor.score_tokens(sequences), actor.policy_version),
    ).handlers()
    return RankParts(
        trainer=actor,
        handlers={**trainer, UPDATE: _then(trainer[UPDATE], served.gather), **weights},
        independent=frozenset(weights),
        num_parameters=num_parameters(actor.module),
    )


def _then(handler: Callable[[bytes], bytes], afterwards: Callable[[], None]) -> Callable[[bytes], bytes]:
    """Something more at the end of a command: pushes enter no collective, so what they need of other ranks is brought before."""

    def run(payload: bytes) -> bytes:
        answer = handler(payload)
        afterwards()
        return answer

    return run


def _weight_source(config: RunConfig, context: RankContext, actor: Actor, served: ServedWeights) -> WeightSource:
    from shoal.weights.transports.factory import open_source_transport
    from shoal_trainer.weight_source import SourceIdentity, WeightSource

    identity = SourceIdentity(
        rank=context.rank,
        world_size=context.world_size,
        source_id=shared_random_id(context),
        place=Place(host_id=host_id(config.push.shm_dir), device=context.device.type),
    )
    return WeightSource(
        served.parameters,
        identity,
        open_source_transport(config.push, config.security),
        config.push,
        policy_version=lambda: actor.policy_version,
        prepare_thread=partial(prepare_thread, config.actor, context.device),
    )


def _refuse_export(folder: str) -> ExportResult:
    raise InvalidRequestError(f"export to {folder!r} was sent to the critic; only the actor's policy is exported")


def _refuse_scores(sequences: Sequence[TokenSequence]) -> tuple[list[TokenScores], int]:
    raise InvalidRequestError(f"{len(sequences)} sequences to score were sent to the critic; only the actor scores tokens")
