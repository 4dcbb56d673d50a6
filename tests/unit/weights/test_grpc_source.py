"""The trainer's end of the grpc transport: mTLS, bounded memory, servers that die, stop or come back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import pytest
import torch
import trustme
from torch import Tensor

from shoal.codec.bucket_stream import WEIGHT_SINK_SERVICE, BucketPart, StreamHead, part_to_bytes
from shoal.config.models import PushSection, SecuritySection
from shoal.errors import DeadlineError, TransportError
from shoal.rpc.server import RpcServer
from shoal.rpc.v1 import weights_pb2_grpc
from shoal.types.weights import BucketEncoding
from shoal.weights.buckets import Bucket
from shoal.weights.transports.base import LinkRequest
from shoal.weights.transports.grpc_sink import BulkReceiver, add_bulk_handler
from shoal.weights.transports.grpc_source import GrpcSourceLink, GrpcSourceTransport
from shoal.weights.transports.grpc_stream import METHOD
from tests.helpers.bulk_server import bulk_process, bulk_server
from tests.helpers.certificates import issue
from tests.helpers.rpc_services import PLAINTEXT
from tests.helpers.wire_setting import Setting, Staging, cut

SETTING = Setting(shapes={"matrix": (64, 48), "vector": (100,)}, bucket_bytes=4096)
MIB = 1 << 20


def make_transport(setting: Setting, security: SecuritySection = PLAINTEXT, streams: int = 2) -> GrpcSourceTransport:
    return GrpcSourceTransport(PushSection(bucket_bytes=setting.bucket_bytes, grpc_streams=streams), security)


def open_link(
    transport: GrpcSourceTransport, setting: Setting, address: str, *, push_id: str = "push-1", timeout_s: float = 20.0
) -> GrpcSourceLink:
    return transport.open(
        LinkRequest(
            push_id=push_id,
            policy_version=1,
            rank=0,
            world_size=setting.num_ranks,
            server_id="server",
            worker=setting.sink({"grpc": address}).workers[0],
            num_workers=setting.num_workers,
            collective_group="",
            timeout_s=timeout_s,
        )
    )


def write_all(link: GrpcSourceLink, full: Mapping[str, Tensor], buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        link.write_dense(bucket, cut(full, bucket))


def push(transport: GrpcSourceTransport, setting: Setting, address: str, *, push_id: str = "push-1", timeout_s: float = 20.0) -> int:
    """Everything of rank 0 for worker 0; answers the bytes sent."""
    full = setting.full()
    link = open_link(transport, setting, address, push_id=push_id, timeout_s=timeout_s)
    try:
        write_all(link, full, setting.plan("grpc").buckets(0, 0))
        link.finish()
    finally:
        link.close()
    return link.sent_bytes


@pytest.fixture
def transport() -> Iterator[GrpcSourceTransport]:
    made = make_transport(SETTING)
    yield made
    made.close()


@pytest.fixture
def staging() -> Staging:
    return SETTING.staging()[0]


def armed(staging: Staging, push_id: str = "push-1") -> BulkReceiver:
    receiver = BulkReceiver({0: staging.target})
    receiver.arm(push_id, 1, SETTING.plan("grpc"))
    return receiver


def assert_whole(staging: Staging) -> None:
    for name, tensor in SETTING.full().items():
        assert torch.equal(staging.parameters()[name], tensor), name


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


def test_push_goes_over_mtls(tmp_path: Path, ca: trustme.CA, staging: Staging) -> None:
    security = issue(tmp_path, "service", ca, ca)
    transport = make_transport(SETTING, security)
    with bulk_server(armed(staging), security) as address:
        assert push(transport, SETTING, address) == SETTING.plan("grpc").num_bytes
        transport.close()
    assert_whole(staging)


def test_trainer_of_another_authority_writes_nothing(tmp_path: Path, ca: trustme.CA, staging: Staging) -> None:
    stranger = make_transport(SETTING, issue(tmp_path, "stranger", trustme.CA(), ca))
    with bulk_server(armed(staging), issue(tmp_path, "service", ca, ca)) as address:
        with pytest.raises(TransportError, match=r"worker 0 of server server at 127\.0\.0\.1"):
            push(stranger, SETTING, address, timeout_s=5)
        stranger.close()
    assert not staging.buffer.any()


def test_stream_without_a_deadline_is_refused(staging: Staging) -> None:
    part = BucketPart(bucket=0, encoding=BucketEncoding.DENSE, offset_bytes=0, encoded_bytes=4, data=memoryview(bytes(4)))
    head = StreamHead(push_id="push-1", policy_version=1, rank=0, worker_rank=0)
    with bulk_server(armed(staging)) as address, grpc.insecure_channel(address) as channel:
        call: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(METHOD, None, None)
        with pytest.raises(grpc.RpcError, match="without a deadline"):
            call(iter([part_to_bytes(part, head)]))


async def test_bulk_handler_answers_before_the_generated_one(staging: Staging) -> None:
    receiver = armed(staging)
    servicer = type("NeverAsked", (weights_pb2_grpc.WeightSinkServiceServicer,), {})()
    server = RpcServer("127.0.0.1", 0, PLAINTEXT)
    server.add(lambda inner: weights_pb2_grpc.add_WeightSinkServiceServicer_to_server(servicer, inner), WEIGHT_SINK_SERVICE)
    server.add(lambda inner: add_bulk_handler(inner, receiver.write), WEIGHT_SINK_SERVICE)
    address = f"127.0.0.1:{await server.start()}"
    transport = make_transport(SETTING)
    await asyncio.to_thread(push, transport, SETTING, address)
    transport.close()
    await server.stop(0.0)
    assert_whole(staging)


def test_refusal_of_the_sink_reaches_the_trainer(transport: GrpcSourceTransport, staging: Staging) -> None:
    receiver = armed(staging, "push-2")
    with bulk_server(receiver) as address:
        with pytest.raises(TransportError, match="push-1 of version 1 is not being received"):
            push(transport, SETTING, address)
        assert push(transport, SETTING, address, push_id="push-2") > 0
    assert_whole(staging)


def test_server_restarted_on_its_port_is_reached_at_once(transport: GrpcSourceTransport, staging: Staging) -> None:
    with bulk_server(armed(staging)) as address:
        push(transport, SETTING, address)
    with pytest.raises(TransportError):
        push(transport, SETTING, address, push_id="push-2")
    staging.buffer.zero_()
    with bulk_server(armed(staging, "push-3"), port=int(address.rpartition(":")[2])):
        push(transport, SETTING, address, push_id="push-3")
    assert_whole(staging)


def test_server_restarted_between_two_pushes_is_reached(transport: GrpcSourceTransport, staging: Staging) -> None:
    with bulk_server(armed(staging)) as address:
        push(transport, SETTING, address)
    staging.buffer.zero_()
    with bulk_server(armed(staging, "push-2"), port=int(address.rpartition(":")[2])):
        push(transport, SETTING, address, push_id="push-2")
    assert_whole(staging)


def test_channels_of_servers_that_are_gone_are_closed(transport: GrpcSourceTransport, staging: Staging) -> None:
    for number in range(1, 6):
        with bulk_server(armed(staging, f"push-{number}")) as address:
            push(transport, SETTING, address, push_id=f"push-{number}")
    # Of this push's server and of the one before.
    assert transport.num_channels <= 4


def test_link_that_is_closed_early_leaves_no_thread(transport: GrpcSourceTransport, staging: Staging) -> None:
    with bulk_server(armed(staging)) as address:
        before = threading.active_count()
        link = open_link(transport, SETTING, address)
        bucket = SETTING.plan("grpc").buckets(0, 0)[0]
        link.write_dense(bucket, cut(SETTING.full(), bucket))
        link.close()
        deadline_s = time.monotonic() + 10
        while threading.active_count() > before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert threading.active_count() <= before


LARGE = Setting(shapes={f"matrix-{index}": (1024, 1024) for index in range(50)}, bucket_bytes=4 * MIB)


def peak_rss_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def forget_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def anonymous_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024


def test_memory_stays_below_a_few_buckets_on_both_sides_also_while_the_sink_is_stopped() -> None:
    transport = make_transport(LARGE)
    full, buckets = LARGE.full(), LARGE.plan("grpc").buckets(0, 0)
    with bulk_process(LARGE) as (address, process):
        assert process.pid is not None
        link = open_link(transport, LARGE, address, timeout_s=60)
        write_all(link, full, buckets[:5])
        forget_peak_rss()
        ours, theirs = peak_rss_bytes(), anonymous_bytes(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (process.pid, signal.SIGCONT)).start()
        peak_of_theirs = theirs
        for bucket in buckets[5:]:
            link.write_dense(bucket, cut(full, bucket))
            peak_of_theirs = max(peak_of_theirs, anonymous_bytes(process.pid))
        link.finish()
        assert link.sent_bytes == 200 * MIB
        assert peak_rss_bytes() - ours < 8 * LARGE.bucket_bytes
        # gRPC itself takes what its flow control allows: about 20 MiB, and twice as much where answers are slow.
        assert peak_of_theirs - theirs < 24 * LARGE.bucket_bytes
        transport.close()


def test_killed_server_is_an_error_at_once() -> None:
    transport = make_transport(LARGE)
    full, buckets = LARGE.full(), LARGE.plan("grpc").buckets(0, 0)
    with bulk_process(LARGE) as (address, process):
        link = open_link(transport, LARGE, address, timeout_s=60)
        link.write_dense(buckets[0], cut(full, buckets[0]))
        process.kill()
        process.join()
        started_s = time.monotonic()
        with pytest.raises(TransportError):
            write_all(link, full, buckets[1:])
        assert time.monotonic() - started_s < 10
        transport.close()


def test_stopped_server_is_an_error_at_the_deadline() -> None:
    transport = make_transport(LARGE)
    full, buckets = LARGE.full(), LARGE.plan("grpc").buckets(0, 0)
    with bulk_process(LARGE) as (address, process):
        assert process.pid is not None
        link = open_link(transport, LARGE, address, timeout_s=3)
        started_s = time.monotonic()
        link.write_dense(buckets[0], cut(full, buckets[0]))
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineError):
            write_all(link, full, buckets[1:])
        assert 2 < time.monotonic() - started_s < 8
        link.close()
        transport.close()
