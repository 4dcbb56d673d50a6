"""Less to send: deltas, unchanged buckets and frozen parameters, and when everything has to go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from shoal_trainer import transfer as transfer_module
from torch import Tensor, nn

from shoal.config.models import PushSection, SecuritySection
from shoal.types.weights import BucketEncoding, StagedVersion
from shoal.weights.transports.factory import open_source_transport
from shoal.weights.transports.pieces import digest_of
from tests.helpers.layouts import decoder_shapes, decoder_sink
from tests.helpers.weight_source import PushRig, StagingServer, closing, encodings

SHAPES: dict[str, tuple[int, ...]] = {"embed": (64, 32), "up": (48, 32), "down": (32, 48), "norm": (32,)}
DENSE, DELTA, UNCHANGED = {BucketEncoding.DENSE}, {BucketEncoding.DELTA}, {BucketEncoding.UNCHANGED}
NUM_BYTES = sum(torch.Size(shape).numel() for shape in SHAPES.values()) * 2


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}


def server(server_id: str = "a", dtype: str = "bfloat16") -> StagingServer:
    return StagingServer.copying(server_id, SHAPES, dtype=dtype)


class Rig(PushRig):
    """A rig whose parameters can be stepped; small buckets, so that every tensor has some of its own."""

    def __init__(self, *servers: StagingServer, frozen: Sequence[str] = (), source_id: str = "gang", delta: str = "on") -> None:
        self.tensors = parameters()
        super().__init__(self.tensors, *servers, frozen=frozen, source_id=source_id, delta=delta, bucket_bytes=4096)
        self.frozen = frozen

    def step(self, names: Sequence[str] = tuple(SHAPES), every: int = 20) -> None:
        """Change every so-manyth element of some tensors, and count the version up."""
        for name in names:
            if name not in self.frozen:
                self.tensors[name].view(-1)[::every] += 0.01
        self.version += 1

    def expect(self, one: StagingServer) -> None:
        """A server's staging is what a dense push to a fresh server gives."""
        fresh = StagingServer.copying("fresh", SHAPES, dtype=one.layout.workers[0].parameters[0].dtype)
        PushRig(self.tensors, fresh).push()
        assert one.staged_bytes() == fresh.staged_bytes()


def test_only_changed_elements_are_sent_after_the_first_push() -> None:
    a = server()
    rig = Rig(a)
    first = rig.push()["a"]
    assert (encodings(first), first.sent_bytes, first.dense_bytes) == (DENSE, NUM_BYTES, NUM_BYTES)
    assert rig.source.shadow_bytes == NUM_BYTES
    for _ in range(3):
        rig.step()
        sent = rig.push()["a"]
        assert encodings(sent) == DELTA
        assert sent.dense_bytes == NUM_BYTES
        assert 0 < sent.sent_bytes < 0.12 * NUM_BYTES
        rig.expect(a)


def test_nothing_is_sent_where_nothing_changed() -> None:
    a = server()
    rig = Rig(a)
    first = rig.push()["a"]
    rig.step(names=())
    sent = rig.push()["a"]
    assert (encodings(sent), sent.sent_bytes, sent.dense_bytes) == (UNCHANGED, 0, NUM_BYTES)
    assert [pair.xxh3 for pair in sent.pairs] == [pair.xxh3 for pair in first.pairs]
    rig.step(names=["norm"])
    assert encodings(rig.push()["a"]) == UNCHANGED | DELTA
    rig.expect(a)


def test_bytes_that_go_to_nobody_are_hashed_once_for_all_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = server("a"), server("b")
    rig = Rig(a, b, frozen=["embed"])
    rig.push()
    rig.step(names=())
    hashed: list[int] = []

    def counting(pieces: Sequence[Tensor], dtype: str) -> int:
        hashed.append(len(pieces))
        return digest_of(pieces, dtype)

    monkeypatch.setattr(transfer_module, "digest_of", counting)
    buckets = [bucket for server_id in ("a", "b") for bucket in rig.source._plans[server_id].part.pairs[0].buckets]
    link = rig.memory.link(a)
    for _ in range(2):
        sent = [rig.source._encoder.send(bucket, link, a.staged, compares=True) for bucket in buckets]
        assert {encoding for _, encoding in sent} == UNCHANGED
        assert sent[: len(sent) // 2] == sent[len(sent) // 2 :]
        assert len(hashed) == len(buckets) // 2


def test_buckets_that_changed_in_most_elements_go_dense() -> None:
    a = server()
    rig = Rig(a)
    rig.push()
    rig.step(every=1)
    sent = rig.push()["a"]
    assert (encodings(sent), sent.sent_bytes) == (DENSE, NUM_BYTES)
    rig.step()
    assert encodings(rig.push()["a"]) == DELTA
    rig.expect(a)


def test_perturb_push_revert_push_ends_byte_identical() -> None:
    a = server()
    rig = Rig(a)
    rig.push()
    before = a.staged_bytes()
    kept = {name: tensor.clone() for name, tensor in rig.tensors.items()}
    rig.step()
    rig.push()
    assert a.staged_bytes() != before
    for name, tensor in rig.tensors.items():
        tensor.copy_(kept[name])
    rig.version += 1
    sent = rig.push()["a"]
    assert encodings(sent) == DELTA
    assert a.staged_bytes() == before


def test_a_sign_of_zero_and_nan_come_through_a_delta() -> None:
    a = server()
    rig = Rig(a)
    rig.push()
    rig.step(names=())
    rig.tensors["norm"][:3] = torch.tensor([-0.0, float("nan"), float("inf")])
    assert encodings(rig.push()["a"]) == UNCHANGED | DELTA
    rig.expect(a)
    rig.step(names=())
    rig.tensors["norm"][0] = 0.0
    assert encodings(rig.push()["a"]) == UNCHANGED | DELTA
    rig.expect(a)


@pytest.mark.parametrize(("delta", "shadow_bytes", "expected"), [("on", NUM_BYTES, DELTA), ("auto", NUM_BYTES, DELTA), ("off", 0, DENSE)])
def test_the_setting_decides_over_a_wire(delta: str, shadow_bytes: int, expected: set[BucketEncoding]) -> None:
    rig = Rig(server(), delta=delta)
    rig.push()
    rig.step()
    assert encodings(rig.push()["a"]) == expected
    assert rig.source.shadow_bytes == shadow_bytes


@pytest.mark.parametrize(("delta", "shadow_bytes", "expected"), [("auto", 0, DENSE), ("on", 2 * NUM_BYTES, DELTA)])
def test_auto_keeps_no_shadow_where_the_engine_has_the_trainers_dtype(delta: str, shadow_bytes: int, expected: set[BucketEncoding]) -> None:
    rig = Rig(server(dtype="float32"), delta=delta)
    rig.push()
    rig.step()
    assert encodings(rig.push()["a"]) == expected
    assert rig.source.shadow_bytes == shadow_bytes


def test_auto_costs_nothing_where_bytes_stay_on_the_host(tmp_path: Path) -> None:
    near = StagingServer.copying("near", SHAPES, str(tmp_path), dtype="bfloat16")
    with closing(near):
        for delta, shadow_bytes, expected in (("auto", 0, DENSE), ("on", NUM_BYTES, DELTA)):
            tensors = parameters()
            transport = open_source_transport(PushSection(), SecuritySection())
            rig = PushRig(tensors, near, transport=transport, source_id=delta, delta=delta, bucket_bytes=4096)
            rig.push()
            for tensor in tensors.values():
                tensor.view(-1)[::20] += 0.01
            rig.version += 1
            assert encodings(rig.push()["near"]) == expected
            assert rig.source.shadow_bytes == shadow_bytes
            rig.source.close()


def fail() -> None:
    raise ConnectionError("gone")


def fails_once(rig: Rig) -> None:
    """A server that did not get everything."""
    rig.memory.faults["a"] = fail
    assert rig.push()["a"].error
    rig.memory.faults.clear()


def is_aborted(rig: Rig) -> None:
    """A push that was not verified anywhere."""
    rig.transfer()


def misses_a_push(rig: Rig) -> None:
    """A server that was left out."""
    rig.push("b")


def is_wanted_whole(rig: Rig) -> None:
    """The coordinator's own wish."""
    rig.servers["a"].staged = None


@pytest.mark.parametrize("what", [fails_once, is_aborted, misses_a_push, is_wanted_whole])
def test_a_server_without_the_version_of_the_shadow_gets_everything_once(what: Callable[[Rig], None]) -> None:
    a, b = server("a"), server("b")
    rig = Rig(a, b)
    rig.push()
    rig.step()
    what(rig)
    rig.step()
    sent = rig.push()
    assert encodings(sent["a"]) == DENSE
    assert encodings(sent["b"]) == (DENSE if what is is_aborted else DELTA)
    rig.step()
    assert {server_id: encodings(one) for server_id, one in rig.push().items()} == {"a": DELTA, "b": DELTA}
    rig.expect(a)
    rig.expect(b)


def test_a_dense_push_sends_everything_frozen_included() -> None:
    a = server()
    rig = Rig(a, frozen=["embed"])
    rig.push()
    rig.step()
    sent = rig.push(dense=True)["a"]
    assert (encodings(sent), sent.sent_bytes) == (DENSE, NUM_BYTES)
    rig.step()
    assert encodings(rig.push()["a"]) == UNCHANGED | DELTA


def test_a_new_gang_trusts_no_staging_of_another() -> None:
    a = server()
    Rig(a).push()
    assert a.staged == StagedVersion(source_id="gang", policy_version=1)
    rig = Rig(a, source_id="restarted", frozen=["embed"])
    sent = rig.push()["a"]
    assert (encodings(sent), sent.sent_bytes) == (DENSE, NUM_BYTES)
    rig.expect(a)


def test_a_push_of_the_same_version_again_sends_nothing_new() -> None:
    a, late = server("a"), server("late")
    rig = Rig(a, late)
    rig.push("a")
    sent = rig.push()
    assert (encodings(sent["a"]), encodings(sent["late"])) == (UNCHANGED, DENSE)
    rig.step()
    assert {server_id: encodings(one) for server_id, one in rig.push().items()} == {"a": DELTA, "late": DELTA}
    rig.expect(late)


@pytest.mark.parametrize("delta", ["on", "off"])
def test_frozen_parameters_are_sent_once(delta: str) -> None:
    a = server()
    rig = Rig(a, frozen=["embed", "up", "down"], delta=delta)
    assert rig.push()["a"].sent_bytes == NUM_BYTES
    for _ in range(2):
        rig.step(every=1)
        sent = rig.push()["a"]
        assert BucketEncoding.UNCHANGED in encodings(sent)
        # 32 trained elements, in a bucket of their own.
        assert sent.sent_bytes == 32 * 2
        rig.expect(a)


def test_frozen_parameters_need_no_shadow_and_no_version() -> None:
    a, b = server("a"), server("b")
    rig = Rig(a, b, frozen=tuple(SHAPES))
    rig.push()
    rig.step()
    rig.push("b")
    rig.step()
    # `a` is a version behind, but no version has other bytes of a frozen parameter.
    sent = rig.push()
    assert {encoding for one in sent.values() for encoding in encodings(one)} == UNCHANGED
    assert rig.source.shadow_bytes == 0


def test_servers_of_two_dtypes_are_both_right() -> None:
    a, wide = server("a"), server("wide", dtype="float32")
    rig = Rig(a, wide)
    rig.push()
    rig.step()
    sent = rig.push()
    assert {server_id: encodings(one) for server_id, one in sent.items()} == {"a": DELTA, "wide": DENSE}
    rig.expect(a)
    rig.expect(wide)


def test_slices_that_a_new_plan_brings_in_have_no_base_yet() -> None:
    small = StagingServer.copying("a", {"up": SHAPES["up"]})
    tensors = {"up": parameters()["up"], "lm_head.weight": torch.randn(8, 4)}
    both = StagingServer.copying("b", {"up": SHAPES["up"], "lm_head.weight": (8, 4)})
    rig = PushRig(tensors, small, both, delta="on", bucket_bytes=4096)
    rig.push("a")
    sent = rig.push()
    assert (encodings(sent["a"]), encodings(sent["b"])) == (UNCHANGED, DENSE)
    tensors["up"][0, 0] += 1
    rig.version += 1
    assert BucketEncoding.DENSE not in encodings(rig.push()["b"])
    assert torch.equal(both.parameters()["lm_head.weight"], tensors["lm_head.weight"])


def test_deltas_reach_fused_and_sharded_parameters() -> None:
    shapes = decoder_shapes(tied=False)
    generator = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    a, fresh = (StagingServer(decoder_sink(name, 2, dtype="bfloat16")) for name in ("a", "fresh"))
    rig = PushRig(tensors, a, delta="on")
    rig.push()
    for tensor in tensors.values():
        tensor.view(-1)[::12] *= 1.5
    rig.version += 1
    assert encodings(rig.push()["a"]) == DELTA
    PushRig(tensors, fresh).push()
    assert a.staged_bytes() == fresh.staged_bytes()


def adam_share(model: nn.Module, batch: Tensor, num_steps: int, lr: float = 1e-6) -> list[float]:
    """Train a model with Adam and push bf16 after every step; answers the share of bytes that each push after the first sent."""
    live = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in live.items()}
    a, dense = (StagingServer.copying(name, shapes, dtype="bfloat16") for name in ("a", "dense"))
    rig = PushRig(live, a)
    rig.push()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    shares = []
    for _ in range(num_steps):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rig.version += 1
        sent = rig.push()["a"]
        shares.append(sent.sent_bytes / sent.dense_bytes)
    PushRig(live, dense).push()
    assert all(torch.equal(staged, dense.parameters()[name]) for name, staged in a.parameters().items())
    return shares


def language_model(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> tuple[nn.Module, Tensor]:
    """A random Llama with SmolLM2's initialisation, and a batch of tokens."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        initializer_range=0.041666666666666664,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32), torch.randint(0, vocab, (2, 24))


def test_bf16_serving_and_adam_at_a_small_rate_send_at_most_a_twentieth() -> None:
    shares = adam_share(*language_model(96, 3, 4, 2, 256, 512), num_steps=4)
    assert 0 < max(shares) <= 0.05, shares


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bf16_serving_of_a_135m_model_sends_at_most_a_twentieth() -> None:
    shares = adam_share(*language_model(576, 30, 9, 3, 1536, 49152), num_steps=3)
    assert 0 < max(shares) <= 0.05, shares
