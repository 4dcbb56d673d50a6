"""The collective transport over gloo: groups that are kept, peers that die, stop or say something wrong, and pushes that are given up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from shoal.config.models import PushSection
from shoal.errors import DeadlineError, ShoalError, StateError, TransportError
from shoal.types.weights import BucketEncoding
from shoal.weights.buckets import Bucket
from shoal.weights.transports import collective_source
from shoal.weights.transports.collective_sink import (
    TRANSITIONS,
    BufferPool,
    CollectiveReceiver,
    CollectiveStore,
    ReceiverState,
)
from shoal.weights.transports.collective_source import CollectiveSourceTransport
from shoal.weights.transports.pair_group import RANK, Header, Kind, PairGroup, connect_store, hello
from tests.helpers.collective_rank import rank_process, request_of, send
from tests.helpers.wire_receivers import buckets_by_rank
from tests.helpers.wire_setting import Setting, Staging

SETTING = Setting(shapes={"matrix": (64, 48), "vector": (100,)}, bucket_bytes=4096)
PLAN = SETTING.plan("collective")
FIRST = PLAN.buckets(0, 0)[0]


class Worker:
    """A worker's receiver and staging, and the store that it hosts."""

    def __init__(self) -> None:
        self.store = CollectiveStore("127.0.0.1")
        self.staging = Staging(SETTING)
        self.receiver = CollectiveReceiver(self.staging.target, 0)

    def start(self, push_id: str, group: str, *, timeout_s: float = 20.0, buckets: Mapping[int, Sequence[Bucket]] | None = None) -> None:
        planned = buckets_by_rank(PLAN, 0) if buckets is None else buckets
        self.receiver.start(push_id, 1, planned, group=group, address=self.store.address, timeout_s=timeout_s)

    def is_whole(self) -> bool:
        return all(torch.equal(self.staging.parameters()[name], tensor) for name, tensor in SETTING.full().items())

    def close(self) -> None:
        self.receiver.close()
        self.store.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def transport() -> Iterator[CollectiveSourceTransport]:
    made = CollectiveSourceTransport(PushSection(bucket_bytes=SETTING.bucket_bytes))
    yield made
    made.close()


def push(transport: CollectiveSourceTransport, worker: Worker, push_id: str, group: str, server_id: str = "server") -> None:
    """Everything, from start to the worker's word."""
    worker.staging.buffer.zero_()
    worker.start(push_id, group)
    link = transport.open(request_of(SETTING, worker.store.address, push_id=push_id, group=group, server_id=server_id))
    send(link, SETTING)
    link.finish()
    link.close()
    worker.receiver.wait(10)
    assert worker.is_whole()


def test_group_is_kept_while_the_server_names_it(transport: CollectiveSourceTransport, worker: Worker) -> None:
    push(transport, worker, "push-1", "group")
    # Another meeting would need the store.
    worker.store.close()
    num_threads = len(os.listdir("/proc/self/task"))
    for number in range(2, 12):
        push(transport, worker, f"push-{number}", "group")
    # torch may begin a thread of its own late; a thread for each push would be ten.
    assert len(os.listdir("/proc/self/task")) < num_threads + 5


def test_group_of_another_name_is_new_and_the_old_one_goes(transport: CollectiveSourceTransport, worker: Worker) -> None:
    push(transport, worker, "push-0", "group-0")
    num_files = len(os.listdir("/proc/self/fd"))
    for number in range(1, 10):
        push(transport, worker, f"push-{number}", f"group-{number}")
    assert len(os.listdir("/proc/self/fd")) <= num_files + 2


def test_group_is_kept_while_its_server_is_left_out_of_some_pushes(transport: CollectiveSourceTransport, worker: Worker) -> None:
    other = Worker()
    push(transport, worker, "push-1", "group")
    for number in range(2, 5):
        push(transport, other, f"push-{number}", "other", "other")
    push(transport, worker, "push-5", "group")
    other.close()


def test_kept_group_is_left_when_its_server_is_not_pushed_to_any_more(
    transport: CollectiveSourceTransport, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective_source, "UNUSED_PUSHES", 1)
    other = Worker()
    push(transport, worker, "push-1", "group")
    for number in range(2, 4):
        push(transport, other, f"push-{number}", "other", "other")
    # The rank has left: the worker notices with the next push, and one under another name works.
    worker.start("push-4", "group")
    with pytest.raises(TransportError):
        worker.receiver.wait(10)
    push(transport, worker, "push-5", "group-2")
    other.close()


def test_worker_that_gets_nothing_has_received_it(worker: Worker) -> None:
    worker.start("push-1", "group", buckets={})
    worker.receiver.wait(0.1)
    assert worker.receiver.state is ReceiverState.RECEIVED


def test_wait_without_a_push_is_refused(worker: Worker) -> None:
    with pytest.raises(StateError, match="plan one"):
        worker.receiver.wait(0.1)


def test_server_that_named_no_group_is_refused(transport: CollectiveSourceTransport, worker: Worker) -> None:
    with pytest.raises(StateError, match="named no collective group"):
        transport.open(request_of(SETTING, worker.store.address, push_id="push-1", group=""))


def test_rank_that_never_joins_is_an_error_at_the_deadline(transport: CollectiveSourceTransport, worker: Worker) -> None:
    started_s = time.monotonic()
    worker.start("push-1", "group-1", timeout_s=1.0)
    with pytest.raises(DeadlineError, match="have not sent everything"):
        worker.receiver.wait(0.1)
    with pytest.raises(DeadlineError, match="from rank 0"):
        worker.receiver.wait(10)
    assert worker.receiver.state is ReceiverState.FAILED
    assert time.monotonic() - started_s < 5
    push(transport, worker, "push-2", "group-2")


def test_worker_that_never_listens_is_an_error_at_the_deadline(transport: CollectiveSourceTransport, worker: Worker) -> None:
    started_s = time.monotonic()
    with pytest.raises(DeadlineError):
        transport.open(request_of(SETTING, worker.store.address, push_id="push-1", group="group-1", timeout_s=1.0))
    assert time.monotonic() - started_s < 5
    push(transport, worker, "push-2", "group-2")


def test_store_that_is_gone_is_an_error_at_once(transport: CollectiveSourceTransport) -> None:
    worker = Worker()
    worker.close()
    started_s = time.monotonic()
    with pytest.raises(TransportError, match="the store at"):
        transport.open(request_of(SETTING, worker.store.address, push_id="push-1", group="group-1"))
    assert time.monotonic() - started_s < 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_killed_or_stopped_in_the_middle_fails_the_push_and_no_other(
    transport: CollectiveSourceTransport, worker: Worker, number: signal.Signals
) -> None:
    timeout_s = 3.0
    request = request_of(SETTING, worker.store.address, push_id="push-1", group="group-1", timeout_s=60)
    with rank_process(SETTING, request, 1) as (process, wait_sent):
        assert process.pid is not None
        started_s = time.monotonic()
        worker.start("push-1", "group-1", timeout_s=timeout_s)
        wait_sent()
        os.kill(process.pid, number)
        with pytest.raises(DeadlineError if number is signal.SIGSTOP else TransportError, match="from rank 0"):
            worker.receiver.wait(timeout_s + 5)
        assert time.monotonic() - started_s < timeout_s + 5
        assert worker.receiver.state is ReceiverState.FAILED
        push(transport, worker, "push-2", "group-2")


def test_push_given_up_while_a_rank_is_stopped_writes_nothing_more_and_waits_for_nobody(
    transport: CollectiveSourceTransport, worker: Worker
) -> None:
    worker.start("push-1", "group-1", timeout_s=60)
    request = request_of(SETTING, worker.store.address, push_id="push-1", group="group-1", timeout_s=60)
    with rank_process(SETTING, request, 1) as (process, wait_sent):
        assert process.pid is not None
        wait_sent()
        os.kill(process.pid, signal.SIGSTOP)
        started_s = time.monotonic()
        worker.receiver.stop()
        assert time.monotonic() - started_s < 1
        assert worker.receiver.state is ReceiverState.IDLE
        push(transport, worker, "push-2", "group-2")
        os.kill(process.pid, signal.SIGCONT)
    assert worker.is_whole()


def test_push_given_up_tells_the_rank(transport: CollectiveSourceTransport, worker: Worker) -> None:
    worker.start("push-1", "group-1")
    link = transport.open(request_of(SETTING, worker.store.address, push_id="push-1", group="group-1"))
    send(link, SETTING, num_buckets=1)
    link_error: list[ShoalError] = []

    def write_on() -> None:
        try:
            while True:
                send(link, SETTING)
        except ShoalError as error:
            link_error.append(error)

    worker.receiver.stop()
    worker.staging.buffer.zero_()
    thread = threading.Thread(target=write_on)
    thread.start()
    thread.join(10)
    assert isinstance(link_error[0], TransportError)
    assert not worker.staging.buffer.any()


def test_worker_stopped_in_the_middle_is_an_error_at_the_ranks_deadline(worker: Worker) -> None:
    # The worker's thread waits for a buffer that never becomes free: for the rank that is a worker that does not go on.
    transport = CollectiveSourceTransport(PushSection(bucket_bytes=4 << 20))
    setting = Setting(shapes={"matrix": (4096, 1024)}, bucket_bytes=4 << 20)
    staging, plan = Staging(setting), setting.plan("collective")
    receiver = CollectiveReceiver(staging.target, 0)
    receiver.start("push-1", 1, buckets_by_rank(plan, 0), group="group", address=worker.store.address, timeout_s=20)
    link = transport.open(request_of(setting, worker.store.address, push_id="push-1", group="group", timeout_s=2))
    session = receiver._session
    assert session is not None
    started_s = time.monotonic()
    with session._writing, pytest.raises(DeadlineError):
        send(link, setting)
    assert 1 < time.monotonic() - started_s < 8
    receiver.close()
    transport.close()


WRONG: list[tuple[str, list[Header]]] = [
    ("another push", [hello("push-2", 1)]),
    ("another version", [hello("push-1", 2)]),
    ("no hello", [Header(Kind.END)]),
    ("a bucket beyond the plan", [hello("push-1", 1), Header(Kind.BUCKET, 99, BucketEncoding.DENSE, 4096)]),
    ("a negative bucket", [hello("push-1", 1), Header(Kind.BUCKET, -1, BucketEncoding.DENSE, 4096)]),
    ("another size", [hello("push-1", 1), Header(Kind.BUCKET, 0, BucketEncoding.DENSE, FIRST.num_bytes - 4)]),
    ("a delta that is too large", [hello("push-1", 1), Header(Kind.BUCKET, 0, BucketEncoding.DELTA, FIRST.num_bytes + 1)]),
    ("an unknown encoding", [hello("push-1", 1), Header(Kind.BUCKET, 0, BucketEncoding.UNCHANGED, FIRST.num_bytes)]),
    ("an answer", [hello("push-1", 1), Header(Kind.WRITTEN)]),
]


@pytest.mark.parametrize("headers", [headers for _, headers in WRONG], ids=[name for name, _ in WRONG])
def test_wrong_header_fails_the_push_and_writes_nothing(worker: Worker, headers: list[Header]) -> None:
    worker.start("push-1", "group")
    group = join_as_rank(worker)
    for header in headers:
        group.send_header(header, time.monotonic() + 10)
    with pytest.raises(TransportError, match="from rank 0"):
        worker.receiver.wait(10)
    assert not worker.staging.buffer.any()
    with pytest.raises(TransportError):
        group.receive_header(time.monotonic() + 10)


@pytest.mark.parametrize(
    ("index", "encoding", "damage"),
    [(1, BucketEncoding.DENSE, "repeated"), (1, BucketEncoding.DELTA, "no delta")],
)
def test_bucket_that_comes_twice_or_damaged_fails_the_push(worker: Worker, index: int, encoding: BucketEncoding, damage: str) -> None:
    worker.start("push-1", "group")
    group, deadline_s = join_as_rank(worker), time.monotonic() + 10
    size = PLAN.buckets(0, 0)[index].num_bytes
    group.send_header(hello("push-1", 1), deadline_s)
    for _ in range(2 if damage == "repeated" else 1):
        group.send_header(Header(Kind.BUCKET, index, encoding, size), deadline_s)
        try_to_send(lambda: group.send(torch.zeros(size, dtype=torch.uint8), deadline_s))
    with pytest.raises(ShoalError, match="from rank 0"):
        worker.receiver.wait(10)
    assert not worker.staging.buffer.any()


def try_to_send(call: Callable[[], None]) -> None:
    try:
        call()
    except TransportError:
        # The worker may have left already.
        return


def join_as_rank(worker: Worker) -> PairGroup:
    deadline_s = time.monotonic() + 10
    store = connect_store(worker.store.address, deadline_s)
    return PairGroup(store, "group/0/0", RANK, device="cpu", address=worker.store.address, deadline_s=deadline_s)


def test_first_failure_ends_the_push_for_every_rank(worker: Worker) -> None:
    setting = Setting(shapes=SETTING.shapes, num_ranks=2, bucket_bytes=4096)
    plan, staging = setting.plan("collective"), Staging(setting)
    receiver = CollectiveReceiver(staging.target, 0)
    receiver.start("push-1", 1, buckets_by_rank(plan, 0), group="group", address=worker.store.address, timeout_s=20)
    wrong = join_as_rank(worker)
    wrong.send_header(hello("push-0", 1), time.monotonic() + 10)
    with pytest.raises(TransportError, match="from rank 0"):
        receiver.wait(10)
    transport = CollectiveSourceTransport(PushSection(bucket_bytes=4096))
    link = transport.open(request_of(setting, worker.store.address, push_id="push-1", group="group", rank=1))
    with pytest.raises(TransportError):
        finish(link.finish, lambda: send(link, setting, rank=1))
    assert not staging.buffer.any()
    receiver.close()
    transport.close()


def finish(end: Callable[[], None], write: Callable[[], None]) -> None:
    write()
    end()


@pytest.mark.parametrize("before", list(ReceiverState))
@pytest.mark.parametrize("after", list(ReceiverState))
def test_session_takes_allowed_steps_only(worker: Worker, before: ReceiverState, after: ReceiverState) -> None:
    worker.start("push-1", "group", buckets={})
    session = worker.receiver._session
    assert session is not None
    session._state = before
    with session._changed:
        session._move(after)
    assert session.state is (after if after in TRANSITIONS[before] else before)


def test_pool_lends_a_bounded_number_of_buffers() -> None:
    pool = BufferPool(16, "cpu")
    deadline_s = time.monotonic() + 0.2
    with pool.borrow(16, deadline_s) as first, pool.borrow(8, deadline_s) as second:
        assert (first.numel(), second.numel()) == (16, 8)
        with pytest.raises(DeadlineError, match="no buffer"):
            pool.borrow(8, deadline_s).__enter__()
    with pool.borrow(16, time.monotonic() + 1) as again:
        assert again.data_ptr() in (first.data_ptr(), second.data_ptr())


def test_store_listens_on_its_host_only() -> None:
    store = CollectiveStore("127.0.0.1")
    port = int(store.address.rpartition(":")[2])
    local = [line.split()[1].split(":") for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert {host for host, number in local if int(number, 16) == port} == {"0100007F"}
    store.close()
