"""What test ranks run to train, push and export adapters; rank 0 leaves `<folder>/result.pt` and `<folder>/export`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shoal_trainer.actor import Actor
from shoal_trainer.building import build_actor
from shoal_trainer.distributed import RankContext
from shoal_trainer.export import Exporter
from shoal_trainer.merging import ServedWeights
from shoal_trainer.models import named_shards
from shoal_trainer.weight_servicer import _join_layouts
from shoal_trainer.weight_source import WeightSource
from torch.distributed.tensor.debug import CommDebugMode

from shoal.codec.layouts import source_layout_from_proto, source_layout_to_proto
from shoal.config.models import PushSection, RunConfig, SecuritySection
from shoal.weights.transports.factory import open_source_transport
from tests.helpers.trainer_bench import (
    MemoryRecords,
    even_split,
    make_batch,
    ppo_step,
    ragged_records,
    whole_gradients,
    whole_parameters,
)
from tests.helpers.weight_source import StagingServer, encodings, identity

SCENARIOS: dict[str, dict[str, Any]] = {
    "float32": {},
    "second forward": {"retain_graph_tokens": 0},
    "checkpointing": {"activation_checkpointing": True},
    "zero 2": {"reshard_after_forward": False},
    "bf16": {"precision": "bf16_mixed"},
}
NUM_STEPS = 2
"""In the second one B is not zero any more, and A has a gradient."""


def adapters_job(context: RankContext, config: RunConfig, folder: Path) -> None:
    """Train in every scenario, then push and export the first one's policy."""
    trained = {name: _train(context, config, settings) for name, settings in SCENARIOS.items()}
    actor = trained["float32"][0]
    result: dict[str, Any] = {"trained": {name: found for name, (_, found) in trained.items()}}
    served = ServedWeights(named_shards(actor.module), config.actor.lora, context.device, lambda: actor.policy_version)
    result["pushed"] = Push(context, served, actor, folder).run()
    Exporter(actor.module, served, config.model.path, context).export(str(folder / "export"), actor.policy_version)
    if context.rank == 0:
        torch.save(result, folder / "result.pt")


def _train(context: RankContext, config: RunConfig, settings: Mapping[str, Any]) -> tuple[Actor, dict[str, Any]]:
    """Some steps; what the optimizer saw in each."""
    run = config.model_copy(update={"actor": config.actor.model_copy(update=settings)})
    actor = build_actor(run, context, MemoryRecords(ragged_records()))
    gradients: list[dict[str, torch.Tensor]] = []
    original = actor.optimizer.step

    def step() -> Any:  # noqa: ANN401
        gradients.append(whole_gradients(actor.module))
        return original()

    actor.optimizer.step = step  # type: ignore[method-assign]
    split = even_split(6, context.world_size, 2)
    metrics = [ppo_step(actor, None, make_batch(ragged_records(), split, number))[0] for number in range(1, NUM_STEPS + 1)]
    names = ("actor_loss", "grad_norm", "kl", "ratio_max_deviation")
    kept = [{name: of_step[name] for name in names} for of_step in metrics]
    frozen = {name for name, parameter in actor.module.named_parameters() if not parameter.requires_grad}
    parameters = whole_parameters(actor.module)
    return actor, {
        "metrics": kept,
        "gradients": gradients,
        "adapters": {name: value for name, value in parameters.items() if name not in frozen},
        "base_sum": sum(float(parameters[name].double().sum()) for name in frozen),
    }


class Push:
    """Pushes of a policy into a server that rank 0 keeps, and what they brought."""

    def __init__(self, context: RankContext, served: ServedWeights, actor: Actor, folder: Path) -> None:
        self._context = context
        self._served = served
        self._actor = actor
        shapes = {name: tuple(_shape(parameter)) for name, parameter in served.parameters.items()}
        self._server = StagingServer.copying("a", shapes, str(folder)) if context.rank == 0 else None
        self._settings = PushSection(bucket_bytes=4096, shm_dir=str(folder))
        self._source = WeightSource(
            served.parameters,
            identity(context.rank, context.world_size),
            open_source_transport(self._settings, SecuritySection()),
            self._settings,
            policy_version=lambda: actor.policy_version,
        )

    def run(self) -> dict[str, Any]:
        """Push, move the adapters, push again."""
        first = self._push("first")
        with torch.no_grad():
            for parameter in self._actor.optimizer._parameters:
                parameter.mul_(1.5)
        self._actor.policy_version += 1
        self._served.gather()
        result = {"first": first, "second": self._push("second")}
        if self._server is not None:
            result["staged"] = {name: tensor.clone() for name, tensor in self._server.parameters().items()}
            self._server.close()
        self._source.close()
        return result

    def _push(self, push_id: str) -> dict[str, Any]:
        server, version = self._server, self._actor.policy_version
        (target,) = _from_rank_0([None if server is None else server.target()])
        layouts = _from_all(self._source.describe(), self._context)
        joined = source_layout_from_proto(_join_layouts([source_layout_to_proto(layout) for layout in layouts]))
        with CommDebugMode() as collectives:  # type: ignore[no-untyped-call]
            (planned,) = self._source.prepare(push_id, version, joined, [target]).values()
            if server is not None:
                server.plan(joined, planned.plan_hash, self._settings)
            sent = self._source.transfer(push_id, {}).servers["a"]
        transfers = _from_all(sent, self._context)
        if server is not None:
            server.verify(version, [pair for transfer in transfers for pair in transfer.pairs])
        return {
            "collectives": collectives.get_total_counts(),
            "errors": [transfer.error for transfer in transfers],
            "sent_bytes": sum(transfer.sent_bytes for transfer in transfers),
            "dense_bytes": sum(transfer.dense_bytes for transfer in transfers),
            "encodings": sorted({int(encoding) for transfer in transfers for encoding in encodings(transfer)}),
        }


def _shape(parameter: Any) -> torch.Size:  # noqa: ANN401
    shape: torch.Size = getattr(parameter, "base", parameter).shape
    return shape


def _from_rank_0(values: list[Any]) -> list[Any]:
    dist.broadcast_object_list(values, src=0)
    return values


def _from_all(value: Any, context: RankContext) -> list[Any]:  # noqa: ANN401
    values: list[Any] = [None] * context.world_size
    dist.all_gather_object(values, value)
    return values
