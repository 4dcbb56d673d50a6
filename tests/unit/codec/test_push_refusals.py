"""Impossible layouts, digests and answers of a weight push are refused, with the value in the message."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from shoal.codec.layouts import (
    box_from_proto,
    place_from_proto,
    sink_layout_from_proto,
    sink_layout_to_proto,
    sink_parameter_from_proto,
    sink_region_from_proto,
    sink_target_from_proto,
    sink_target_to_proto,
    sink_targets_from_proto,
    sink_worker_layout_from_proto,
    sink_worker_layout_to_proto,
    source_layout_from_proto,
    source_layout_to_proto,
    source_tensor_from_proto,
    source_tensor_to_proto,
    staged_version_from_proto,
    tensor_shard_from_proto,
)
from shoal.codec.services import token_scores_from_proto, token_scores_to_proto, token_sequence_from_proto
from shoal.codec.weights import (
    bucket_encoding_from_proto,
    bucket_encoding_to_proto,
    pair_digests_from_proto,
    pair_digests_to_proto,
    pairs_from_proto,
    piece_digests_from_proto,
    piece_pairs_from_proto,
    piece_pairs_to_proto,
    planned_servers_from_proto,
    server_transfer_from_proto,
    sink_committed_from_proto,
    sink_planned_from_proto,
    sink_prepared_from_proto,
    sink_prepared_to_proto,
    sink_verified_from_proto,
    source_digests_from_proto,
    source_transferred_from_proto,
)
from shoal.errors import CodecError
from shoal.rpc.v1 import common_pb2, trainer_pb2, weights_pb2
from shoal.types import (
    Box,
    BucketEncoding,
    Place,
    SinkPrepared,
    SinkTarget,
    SourceLayout,
    SourceTensor,
    TensorShard,
    TokenScores,
)
from tests.helpers.codec_values import LAYOUT, PAIR, PIECES, SOURCE, TENSOR, WORKER

FLOAT32 = common_pb2.DATA_TYPE_FLOAT32


def refuses(words: str, decode: Callable[[Any], object], message: object) -> None:
    with pytest.raises(CodecError, match=re.escape(words)):
        decode(message)


@pytest.mark.parametrize(("offsets", "sizes"), [([0], [1, 1]), ([-1], [1]), ([0], [-1]), ([0, 0], [1, -2])])
def test_box_that_is_impossible_is_refused(offsets: list[int], sizes: list[int]) -> None:
    refuses(f"box offsets {offsets} and sizes {sizes}", box_from_proto, weights_pb2.Box(offsets=offsets, sizes=sizes))


@pytest.mark.parametrize(("host_id", "device"), [("", "cpu"), ("h", ""), ("h", "tpu")])
def test_place_without_host_or_known_device_is_refused(host_id: str, device: str) -> None:
    refuses(f"place {host_id!r} on {device!r}", place_from_proto, weights_pb2.Place(host_id=host_id, device=device))


@pytest.mark.parametrize(("shape", "offsets", "sizes"), [([4], [3], [2]), ([4], [], []), ([4, 4], [0], [4]), ([-4], [0], [0])])
def test_shard_outside_its_tensor_is_refused(shape: list[int], offsets: list[int], sizes: list[int]) -> None:
    shard = weights_pb2.TensorShard(box=weights_pb2.Box(offsets=offsets, sizes=sizes))
    refuses("of w", source_tensor_from_proto, weights_pb2.SourceTensor(name="w", shape=shape, dtype=FLOAT32, shards=[shard]))


def test_shard_that_fits_one_tensor_is_still_checked_against_a_smaller_one() -> None:
    small = weights_pb2.SourceTensor(name="small", shape=[2, 4], dtype=FLOAT32, shards=source_tensor_to_proto(TENSOR).shards)
    message = source_layout_to_proto(SOURCE)
    message.tensors.append(small)
    refuses("shard of small on rank 1", source_layout_from_proto, message)


def test_shard_of_a_negative_rank_is_refused() -> None:
    refuses("rank of a shard is -1", tensor_shard_from_proto, weights_pb2.TensorShard(rank=-1))


def test_tensor_of_unset_dtype_is_refused() -> None:
    refuses("data type 0 is unknown", source_tensor_from_proto, weights_pb2.SourceTensor(name="w", shape=[4]))


def test_source_layout_without_id_is_refused() -> None:
    refuses("no source_id", source_layout_from_proto, source_layout_to_proto(dataclasses.replace(SOURCE, source_id="")))


def test_source_layout_with_a_tensor_twice_is_refused() -> None:
    twice = dataclasses.replace(SOURCE, tensors=(TENSOR, TENSOR))
    refuses("q given twice", source_layout_from_proto, source_layout_to_proto(twice))


def test_source_layout_with_a_rank_that_has_no_place_is_refused() -> None:
    message = source_layout_to_proto(dataclasses.replace(SOURCE, places=SOURCE.places[:1]))
    refuses("shard on rank 1 but places of 1 ranks", source_layout_from_proto, message)


def test_region_with_boxes_of_different_sizes_is_refused() -> None:
    one, two = weights_pb2.Box(offsets=[0], sizes=[1]), weights_pb2.Box(offsets=[0], sizes=[2])
    message = weights_pb2.SinkRegion(parameter="p", source_name="s", source_box=one, parameter_box=two)
    refuses("region of p: [1] of s do not fit [2]", sink_region_from_proto, message)


def test_parameter_with_negative_offset_is_refused() -> None:
    message = weights_pb2.SinkParameter(name="w", shape=[1], dtype=FLOAT32, staging_offset_bytes=-8)
    refuses("staging offset of w is -8", sink_parameter_from_proto, message)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker_rank": -1}, "worker_rank is -1"),
        ({"staging_bytes": -1}, "staging_bytes of worker 1 is -1"),
        ({"staging_bytes": (1 << 33) + 31}, f"qkv ends at byte {(1 << 33) + 32} of staging"),
        ({"parameters": WORKER.parameters * 2}, "qkv given twice"),
        ({"parameters": ()}, "qkv, which is not among its parameters"),
        ({"parameters": (dataclasses.replace(WORKER.parameters[0], shape=(3, 4)),)}, "region of qkv: box at [2, 0] of [2, 4]"),
        ({"place": Place(host_id="", device="cpu")}, "place ''"),
    ],
)
def test_worker_layout_that_is_impossible_is_refused(changes: dict[str, Any], words: str) -> None:
    refuses(words, sink_worker_layout_from_proto, sink_worker_layout_to_proto(dataclasses.replace(WORKER, **changes)))


def test_sink_layout_without_id_or_with_a_worker_twice_is_refused() -> None:
    refuses("no server_id", sink_layout_from_proto, sink_layout_to_proto(dataclasses.replace(LAYOUT, server_id="")))
    refuses("1 given twice", sink_layout_from_proto, sink_layout_to_proto(dataclasses.replace(LAYOUT, workers=(WORKER, WORKER))))


def test_staged_version_without_source_or_negative_is_refused() -> None:
    refuses("no source_id", staged_version_from_proto, weights_pb2.StagedVersion(policy_version=3))
    refuses("is -1", staged_version_from_proto, weights_pb2.StagedVersion(source_id="s", policy_version=-1))


def test_nothing_staged_stays_nothing() -> None:
    target = SinkTarget(layout=LAYOUT, staged=None, dense=False)
    assert sink_target_from_proto(sink_target_to_proto(target)) == target
    prepared = SinkPrepared(layout=LAYOUT, served_version=0, staged=None)
    assert sink_prepared_from_proto(sink_prepared_to_proto(prepared)) == prepared


def test_targets_naming_a_server_twice_are_refused() -> None:
    target = sink_target_to_proto(SinkTarget(layout=LAYOUT, staged=None, dense=True))
    refuses("rollout-0 given twice", sink_targets_from_proto, [target, target])


@pytest.mark.parametrize("number", [0, 4, 99])
def test_encoding_unspecified_or_unknown_is_refused(number: int) -> None:
    refuses(f"bucket encoding {number} is unknown", bucket_encoding_from_proto, number)
    message = pair_digests_to_proto(PAIR)
    message.encodings[1] = weights_pb2.BucketEncoding.ValueType(number)
    refuses(f"bucket encoding {number} is unknown", pair_digests_from_proto, message)


def test_encodings_are_numbered_as_on_the_wire() -> None:
    for encoding in BucketEncoding:
        assert int(bucket_encoding_to_proto(encoding)) == int(encoding)
        assert bucket_encoding_from_proto(encoding) is encoding


def test_pair_without_one_encoding_per_digest_is_refused_both_ways() -> None:
    with pytest.raises(CodecError, match="2 digests but 3 encodings"):
        pair_digests_to_proto(dataclasses.replace(PAIR, xxh3=PAIR.xxh3[:2]))
    message = pair_digests_to_proto(PAIR)
    message.encodings.pop()
    refuses("3 digests but 2 encodings", pair_digests_from_proto, message)


@pytest.mark.parametrize(("rank", "worker_rank", "words"), [(-1, 0, "rank of a pair is -1"), (0, -2, "worker_rank of a pair is -2")])
def test_pair_of_a_negative_rank_is_refused(rank: int, worker_rank: int, words: str) -> None:
    refuses(words, pair_digests_from_proto, weights_pb2.PairDigests(rank=rank, worker_rank=worker_rank))
    refuses(words, piece_digests_from_proto, weights_pb2.PieceDigests(rank=rank, worker_rank=worker_rank))


def test_pairs_given_twice_are_refused() -> None:
    refuses("(1, 2) given twice", pairs_from_proto, [pair_digests_to_proto(PAIR)] * 2)
    refuses("(1, 2) given twice", piece_pairs_from_proto, piece_pairs_to_proto([PIECES, PIECES]))


def test_answers_naming_a_server_twice_are_refused() -> None:
    planned = [weights_pb2.PlannedServer(server_id="a", plan_hash="h")] * 2
    refuses("a given twice", planned_servers_from_proto, weights_pb2.PrepareSourceResponse(servers=planned))
    sent = [weights_pb2.ServerTransfer(server_id="a")] * 2
    refuses("a given twice", source_transferred_from_proto, weights_pb2.TransferSourceResponse(servers=sent))
    digests = [weights_pb2.ServerPieceDigests(server_id="a")] * 2
    refuses("a given twice", source_digests_from_proto, weights_pb2.DigestSourceResponse(servers=digests))


def test_plan_without_hash_is_refused() -> None:
    message = weights_pb2.PrepareSourceResponse(servers=[weights_pb2.PlannedServer(server_id="a")])
    refuses("'a' has no plan_hash", planned_servers_from_proto, message)


@pytest.mark.parametrize(
    ("decode", "message", "words"),
    [
        (sink_planned_from_proto, weights_pb2.PlanSinkResponse(num_buckets=-1), "num_buckets is -1"),
        (sink_verified_from_proto, weights_pb2.VerifySinkResponse(num_bytes=-1), "num_bytes is -1"),
        (sink_verified_from_proto, weights_pb2.VerifySinkResponse(verify_ms=float("nan")), "verify_ms is nan"),
        (sink_committed_from_proto, weights_pb2.CommitSinkResponse(policy_version=-1), "policy_version is -1"),
        (sink_committed_from_proto, weights_pb2.CommitSinkResponse(pause_ms=-1), "pause_ms is -1"),
        (sink_committed_from_proto, weights_pb2.CommitSinkResponse(num_aborted=-1), "num_aborted is -1"),
        (server_transfer_from_proto, weights_pb2.ServerTransfer(server_id="a", sent_bytes=-1), "sent_bytes of server a is -1"),
        (server_transfer_from_proto, weights_pb2.ServerTransfer(server_id="a", dense_bytes=-1), "dense_bytes of server a is -1"),
        (source_transferred_from_proto, weights_pb2.TransferSourceResponse(transfer_ms=float("inf")), "transfer_ms is inf"),
    ],
)
def test_answer_with_an_impossible_number_is_refused(decode: Callable[[Any], object], message: object, words: str) -> None:
    refuses(words, decode, message)


def test_scores_without_one_choice_per_logprob_are_refused_both_ways() -> None:
    with pytest.raises(CodecError, match="1 logprobs but 2 greedy_ids"):
        token_scores_to_proto(TokenScores(logprobs=(0.0,), greedy_ids=(1, 2)))
    refuses("1 logprobs but 0 greedy_ids", token_scores_from_proto, trainer_pb2.TokenScores(logprobs=[0.5]))


@pytest.mark.parametrize(("prompt", "response"), [([], [1]), ([-1], [1]), ([1], [2, -3])])
def test_sequence_without_prompt_or_with_negative_ids_is_refused(prompt: list[int], response: list[int]) -> None:
    message = trainer_pb2.TokenSequence(prompt_ids=prompt, response_ids=response)
    refuses("cannot be scored", token_sequence_from_proto, message)


def test_equal_shards_of_a_big_gang_are_decoded_once() -> None:
    """256 ranks with 723 tensors: the memory and time of one layer's boxes, not of eighty."""
    shards = tuple(TensorShard(rank=rank, box=Box(offsets=(rank * 32, 0), sizes=(32, 8192))) for rank in range(256))
    tensors = tuple(SourceTensor(name=f"t{index}", shape=(8192, 8192), dtype="bfloat16", shards=shards) for index in range(723))
    layout = SourceLayout(source_id="s", tensors=tensors, places=(Place(host_id="h", device="cuda"),) * 256)
    message = source_layout_to_proto(layout)
    started_s = time.process_time()
    received = source_layout_from_proto(message)
    assert time.process_time() - started_s < 5
    assert received == layout
    assert len({id(shard) for tensor in received.tensors for shard in tensor.shards}) == 256
