"""One rank's source against several servers: what each gets, and what a bad one costs the others."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from shoal_trainer import weight_source as weight_source_module
from torch import Tensor

from shoal.config.models import PushSection, SecuritySection
from shoal.errors import CapacityError, StateError, TransportError
from shoal.types.weights import SinkLayout, SourceLayout
from shoal.weights.plan import PushPlan
from shoal.weights.planner import plan_push
from shoal.weights.transports.factory import open_source_transport
from shoal.weights.transports.pieces import canonical_digest
from tests.helpers.layouts import LAYER, decoder_shapes, decoder_sink, sink_worker, stack_rows, staged
from tests.helpers.weight_source import PushRig, StagingServer, closing

SHAPES: dict[str, tuple[int, ...]] = {"w": (5, 4, 3), "v": (7,)}
NUM_BYTES = (60 + 7) * 4


def parameters(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def in_memory(*server_ids: str) -> list[StagingServer]:
    return [StagingServer.copying(server_id, SHAPES) for server_id in server_ids]


def assert_holds(server: StagingServer, tensors: dict[str, Tensor]) -> None:
    for name, found in server.parameters().items():
        assert torch.equal(found, tensors[name].to(found.dtype)), name


def test_push_brings_every_server_everything_over_mapped_files(tmp_path: Path) -> None:
    tensors = parameters()
    servers = [StagingServer.copying(server_id, SHAPES, str(tmp_path)) for server_id in ("a", "b")]
    with closing(*servers):
        rig = PushRig(tensors, *servers, transport=open_source_transport(PushSection(), SecuritySection()))
        for _ in range(2):
            outcomes = rig.push()
            told = [(outcome.error, outcome.sent_bytes, outcome.dense_bytes) for outcome in outcomes.values()]
            assert told == [("", NUM_BYTES, NUM_BYTES)] * 2
        for server in servers:
            assert_holds(server, tensors)
        rig.source.close()


def test_a_server_whose_staging_is_gone_costs_the_others_nothing(tmp_path: Path) -> None:
    servers = [StagingServer.copying(server_id, SHAPES, str(tmp_path)) for server_id in ("a", "b", "c")]
    with closing(*servers):
        rig = PushRig(parameters(), *servers, transport=open_source_transport(PushSection(), SecuritySection()))
        servers[1].close()
        outcomes = rig.push()
        assert [bool(outcomes[server_id].error) for server_id in "abc"] == [False, True, False]
        assert outcomes["b"].error.startswith("rank 0: ")
        assert outcomes["b"].pairs == ()
        assert servers[0].staged == servers[2].staged is not None


@pytest.mark.parametrize("error", [TransportError("torn"), CapacityError("no memory"), RuntimeError("gloo said no")])
def test_whatever_is_wrong_with_one_server_is_reported_for_it_alone(error: Exception) -> None:
    rig = PushRig(parameters(), *in_memory("a", "b"))

    def fail() -> None:
        raise error

    rig.memory.faults["a"] = fail
    outcomes = rig.push()
    assert str(error) in outcomes["a"].error
    assert outcomes["b"].error == ""
    assert rig.memory.num_open == 0


@pytest.mark.parametrize("transfer_timeout_s", [0.5, 4.0, 30.0, 120.0])
def test_a_server_that_is_too_slow_is_told_of_before_the_caller_gives_up(transfer_timeout_s: float) -> None:
    sending = weight_source_module.sending_s(transfer_timeout_s)
    given_up = sending + weight_source_module.stuck_grace_s(transfer_timeout_s)
    assert 0.5 * transfer_timeout_s < sending < given_up < transfer_timeout_s - min(0.5, 0.1 * transfer_timeout_s)


def test_a_stuck_server_is_given_up_at_the_deadline_and_refused_until_it_lets_go() -> None:
    servers = in_memory("a", "b")
    rig = PushRig(parameters(), *servers, transfer_timeout_s=0.3)
    release, done = threading.Event(), threading.Event()

    def hang() -> None:
        release.wait(30)
        done.set()

    rig.memory.faults["a"] = hang
    outcomes = rig.push()
    assert (outcomes["a"].error, outcomes["b"].error) == ("rank 0 is stuck", "")
    assert_holds(servers[1], parameters())
    assert "still stuck in an earlier push" in rig.push()["a"].error
    release.set()
    assert done.wait(10)
    for thread in threading.enumerate():
        if thread.name == "push to a":
            thread.join(10)
    del rig.memory.faults["a"]
    assert rig.push()["a"].error == ""
    assert_holds(servers[0], parameters())


def test_a_server_that_takes_longer_than_the_deadline_is_told_so() -> None:
    shapes = {"w": (4096,)}
    rig = PushRig(parameters(shapes), StagingServer.copying("a", shapes), transfer_timeout_s=2.0, bucket_bytes=4096)
    pause = threading.Event()

    def wait_beyond_the_deadline() -> None:
        pause.wait(weight_source_module.sending_s(2.0) + 0.02)

    rig.memory.faults["a"] = wait_beyond_the_deadline
    assert "deadline of TRANSFER is over" in rig.push()["a"].error
    assert len(rig.memory.written) == 1


def halves(server_id: str, num_rows: int) -> StagingServer:
    """Two workers, each with one half of the rows of `w`."""
    half = num_rows // 2
    staged_parameters, staging_bytes = staged({"w": (half,)})
    workers = (
        sink_worker(rank, staged_parameters, stack_rows("w", [("w", (num_rows,), rank * half, (rank + 1) * half)]), staging_bytes, {})
        for rank in range(2)
    )
    return StagingServer(SinkLayout(server_id=server_id, workers=tuple(workers)))


def test_buckets_go_out_in_order_of_index_then_worker() -> None:
    server = halves("s", 8192)
    tensors = parameters({"w": (8192,)})
    rig = PushRig(tensors, server, bucket_bytes=4096)
    assert rig.push()["s"].error == ""
    assert [(index, worker) for _, worker, index, _ in rig.memory.written] == [(index, worker) for index in range(4) for worker in (0, 1)]
    assert torch.equal(torch.cat([server.parameters(worker)["w"] for worker in (0, 1)]), tensors["w"])
    assert [request.worker.worker_rank for request in rig.memory.requests] == [0, 1]
    assert {(request.world_size, request.num_workers, request.server_id) for request in rig.memory.requests} == {(1, 2, "s")}
    assert all(0 < request.timeout_s <= rig.settings.transfer_timeout_s for request in rig.memory.requests)


def test_transfer_hands_the_collective_group_of_each_server_on() -> None:
    servers = in_memory("a", "b")
    rig = PushRig(parameters(), *servers)
    rig.source.prepare("p", 1, rig.source.describe(), [server.target() for server in servers])
    rig.source.transfer("p", {"b": "group-7"})
    assert {request.server_id: request.collective_group for request in rig.memory.requests} == {"a": "", "b": "group-7"}


def test_transfer_answers_again_without_sending_again_and_wants_the_prepared_push() -> None:
    (server,) = in_memory("a")
    rig = PushRig(parameters(), server)
    with pytest.raises(StateError, match=r"push p is not prepared on rank 0 \(prepared: none\)"):
        rig.source.transfer("p", {})
    rig.source.prepare("p", 1, rig.source.describe(), [server.target()])
    rig.source.abort("other")
    first = rig.source.transfer("p", {})
    num_written = len(rig.memory.written)
    # A server's bulk stream takes every bucket once, so sending again would fail a push whose first answer was lost.
    assert rig.source.transfer("p", {}) == first
    assert len(rig.memory.written) == num_written > 0
    rig.source.abort("p")
    rig.source.abort("p")
    with pytest.raises(StateError, match="push p is not prepared"):
        rig.source.transfer("p", {})


def test_a_failed_prepare_forgets_the_push_before() -> None:
    (server,) = in_memory("a")
    rig = PushRig(parameters(), server)
    rig.source.prepare("p", 1, rig.source.describe(), [server.target()])
    with pytest.raises(StateError):
        rig.source.prepare("q", 2, rig.source.describe(), [server.target()])
    with pytest.raises(StateError, match="push p is not prepared"):
        rig.source.transfer("p", {})


def test_only_the_held_version_is_pushed() -> None:
    (server,) = in_memory("a")
    rig = PushRig(parameters(), server)
    with pytest.raises(StateError, match="holds policy version 1, not 2"):
        rig.source.prepare("p", 2, rig.source.describe(), [server.target()])
    rig.source.prepare("p", 1, rig.source.describe(), [server.target()])
    rig.version = 2
    with pytest.raises(StateError, match="holds policy version 2, not 1"):
        rig.source.transfer("p", {})
    assert not server.parameters()["w"].any()


def test_prepare_refuses_the_layout_of_another_gang() -> None:
    rig, other = PushRig(parameters()), PushRig(parameters(), source_id="other")
    with pytest.raises(TransportError, match="gang other with 1 ranks, this is gang gang with 1"):
        rig.source.prepare("p", 1, other.source.describe(), [])


def test_a_server_that_cannot_be_planned_is_left_out() -> None:
    bad = StagingServer.copying("bad", {"w": (5, 4, 3), "unknown": (2,)})
    good = StagingServer.copying("good", SHAPES)
    rig = PushRig(parameters(), bad, good)
    planned = rig.source.prepare("p", 1, rig.source.describe(), [bad.target(), good.target()])
    assert list(planned) == ["good"]
    assert planned["good"].num_bytes == NUM_BYTES
    assert list(rig.source.transfer("p", {}).servers) == ["good"]


def test_plans_are_kept_while_a_servers_layout_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[str] = []

    def counting(source: SourceLayout, sinks: Sequence[SinkLayout], *, bucket_bytes: int, transport: str) -> PushPlan:
        planned.extend(sink.server_id for sink in sinks)
        return plan_push(source, sinks, bucket_bytes=bucket_bytes, transport=transport)

    monkeypatch.setattr(weight_source_module, "plan_push", counting)
    monkeypatch.setattr(weight_source_module, "MAX_PLANS", 1)
    servers = in_memory("a", "b", "c")
    rig = PushRig(parameters(), *servers)
    rig.push("a", "b")
    rig.push("b", "a")
    assert planned == ["a", "b"]
    # A restarted server has another layout; of servers outside of a push, only the newest plans are kept.
    rig.servers["a"] = StagingServer.copying("a", SHAPES)
    rig.memory._staging |= {one.endpoint[1]: one for one in rig.servers["a"].staging}
    rig.push("a")
    rig.push("c")
    assert planned == ["a", "b", "a", "c"]
    rig.push("b", "a")
    assert planned == ["a", "b", "a", "c", "b"]


def test_digests_are_those_of_the_canonical_pieces_of_the_last_plan() -> None:
    shapes = decoder_shapes(tied=False)
    tensors = parameters(shapes)
    tensors["model.norm.weight"].zero_().neg_()
    server = StagingServer(decoder_sink("s", 2, dtype="bfloat16"))
    rig = PushRig(tensors, server)
    (planned,) = rig.source.prepare("p", 1, rig.source.describe(), [server.target()]).values()
    pairs = rig.source.digest(1, {"s": planned.plan_hash})["s"]
    plan = plan_push(rig.source.describe(), [server.layout], bucket_bytes=rig.settings.bucket_bytes, transport="auto").servers["s"]
    assert [(pair.rank, pair.worker_rank) for pair in pairs] == list(plan.pairs())
    zeros = set()
    for pair in pairs:
        pieces = [piece for bucket in plan.buckets(pair.rank, pair.worker_rank) for piece in bucket.pieces]
        for piece, digest in zip(pieces, pair.xxh3, strict=True):
            where = zip(piece.source_box.offsets, piece.source_box.sizes, strict=True)
            source = tensors[piece.source_name][tuple(slice(offset, offset + size) for offset, size in where)]
            assert digest == canonical_digest(source, "bfloat16"), piece
            if piece.source_name == "model.norm.weight":
                zeros.add(digest)
    assert zeros == {canonical_digest(torch.zeros(shapes["model.norm.weight"]), "bfloat16")}
    with torch.no_grad():
        tensors[f"{LAYER}.mlp.up_proj.weight"][0, 0] += 1
    changed = rig.source.digest(1, {"s": planned.plan_hash})["s"]
    differing = [(a, b) for one, two in zip(pairs, changed, strict=True) for a, b in zip(one.xxh3, two.xxh3, strict=True) if a != b]
    assert len(differing) == 1


def test_digests_of_another_version_or_plan_are_refused() -> None:
    (server,) = in_memory("a")
    rig = PushRig(parameters(), server)
    with pytest.raises(StateError, match="holds no plan ffffffffffff of server a"):
        rig.source.digest(1, {"a": "f" * 64})
    rig.push()
    with pytest.raises(StateError, match="holds no plan ffffffffffff of server a"):
        rig.source.digest(1, {"a": "f" * 64})
    with pytest.raises(StateError, match="holds policy version 1, not 2"):
        rig.source.digest(2, {})
