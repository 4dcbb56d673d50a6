"""A trainer rank that sends over the collective transport from a process of its own, up to a point where it stops going on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import torch

from shoal.config.models import PushSection
from shoal.weights.transports.base import LinkRequest
from shoal.weights.transports.collective_source import CollectiveSourceLink, CollectiveSourceTransport
from tests.helpers.forked import fork_context
from tests.helpers.wire_setting import Setting, cut


def request_of(
    setting: Setting, address: str, *, push_id: str, group: str, rank: int = 0, timeout_s: float = 20.0, server_id: str = "server"
) -> LinkRequest:
    """Version 1, worker 0."""
    return LinkRequest(
        push_id=push_id,
        policy_version=1,
        rank=rank,
        world_size=setting.num_ranks,
        server_id=server_id,
        worker=setting.sink({"collective": address}).workers[0],
        num_workers=setting.num_workers,
        collective_group=group,
        timeout_s=timeout_s,
    )


def send(link: CollectiveSourceLink, setting: Setting, *, rank: int = 0, num_buckets: int | None = None) -> None:
    """Write a rank's buckets, or the first few of them."""
    full = setting.full()
    for bucket in setting.plan("collective").buckets(rank, 0)[:num_buckets]:
        link.write_dense(bucket, cut(full, bucket))


def _send_some(setting: Setting, request: LinkRequest, num_buckets: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send("ready")
    link = CollectiveSourceTransport(PushSection(bucket_bytes=setting.bucket_bytes)).open(request)
    send(link, setting, num_buckets=num_buckets)
    pipe.send("sent")
    threading.Event().wait()


@contextmanager
def rank_process(setting: Setting, request: LinkRequest, num_buckets: int) -> Iterator[tuple[ForkServerProcess, Callable[[], object]]]:
    """Gives a process that is about to join, and what waits until it has sent so many buckets; the test may stop or kill it."""
    context = fork_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_some, args=(setting, request, num_buckets, theirs))
    process.start()
    try:
        ours.recv()
        yield process, ours.recv
    finally:
        process.kill()
        process.join()
