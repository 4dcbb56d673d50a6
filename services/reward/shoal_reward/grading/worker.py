"""python -m shoal_reward.grading.worker: the process of one grader, started by the reward service.

Nothing in here is needed to enforce a time limit: user code may hold the interpreter's lock for ever, or end the process.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import socket
import sys
import time
from collections import deque
from pathlib import Path

from shoal.codec.reward import scorer_description_to_proto
from shoal.errors import ConfigError, ShoalError
from shoal.process import set_parent_death_signal
from shoal.reward import REGISTRY, Isolation, Scorer
from shoal.rpc.v1 import reward_pb2
from shoal_reward.grading.frames import GREETING, REFUSAL, FrameReader, frame
from shoal_reward.grading.grader import Grader
from shoal_reward.grading.order import Order
from shoal_reward.grading.progress import ProgressPage
from shoal_reward.loading import describe, load_scorers

ANSWER_WITHIN_S = 0.0005
"""Answers of quick samples are sent together, but none waits longer than this while others are scored."""
REFUSED = 2
RETIRED = 75
"""Exit status of a grader that met its memory limit and makes room for a fresh one."""
_RECEIVE_BYTES = 1 << 18
_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Grade until the service closes the pipe. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shoal_reward.grading.worker")
    for name in ("--channel", "--progress", "--parent"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    _tie_to_parent(arguments.parent)
    channel = socket.socket(fileno=arguments.channel)
    channel.set_inheritable(False)
    progress = ProgressPage(arguments.progress)
    progress.close()
    # A child forked by a scorer must not answer in the grader's name.
    os.register_at_fork(after_in_child=channel.close)
    os.register_at_fork(after_in_child=progress.detach)
    _shield_streams()
    pipe = _Pipe(channel)
    try:
        scorers = _load(pipe.receive_order())
    except ShoalError as error:
        pipe.send(REFUSAL, str(error).encode("utf-8", "replace"))
        pipe.flush()
        return REFUSED
    answer = reward_pb2.DescribeRewardResponse(scorers=[scorer_description_to_proto(describe(scorer)) for scorer in scorers])
    pipe.send(GREETING, answer.SerializeToString())
    return _serve(pipe, Grader(scorers, progress), progress)


def _serve(pipe: _Pipe, grader: Grader, progress: ProgressPage) -> int:
    while (received := pipe.receive()) is not None:
        sequence, payload = received
        if progress.is_taken_back(sequence):
            continue
        pipe.send(sequence, grader.answer(sequence, payload))
        if grader.is_out_of_memory:
            pipe.flush()
            return RETIRED
    return 0


class _Pipe:
    """The grader's end of the channel."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._reader = FrameReader()
        self._received: deque[tuple[int, bytes]] = deque()
        self._unsent = bytearray()
        self._flushed = time.monotonic()

    def receive_order(self) -> Order:
        """Wait for the order, which comes first."""
        received = self.receive()
        if received is None:
            raise ConfigError("the reward service ended before it had sent its order")
        return Order.from_bytes(received[1])

    def receive(self) -> tuple[int, bytes] | None:
        """Wait for the next frame; None at the end of the channel. Nothing stays unsent while it waits."""
        while not self._received:
            self.flush()
            received = self._channel.recv(_RECEIVE_BYTES)
            if not received:
                return None
            self._received.extend(self._reader.feed(received))
        return self._received.popleft()

    def send(self, sequence: int, payload: bytes) -> None:
        """Send a frame, perhaps together with the next ones."""
        self._unsent += frame(sequence, payload)
        if time.monotonic() - self._flushed > ANSWER_WITHIN_S:
            self.flush()

    def flush(self) -> None:
        """Send what is unsent."""
        if self._unsent:
            self._channel.sendall(self._unsent)
            self._unsent.clear()
        self._flushed = time.monotonic()


def _load(order: Order) -> list[Scorer]:
    _limit_resources(order.settings.worker_memory_bytes)
    order.freeze()
    load_scorers(order.settings)
    return [scorer for scorer in REGISTRY.all() if scorer.isolation is Isolation.PROCESS]


def _limit_resources(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if used_bytes >= memory_bytes:
        raise ConfigError(f"worker_memory_bytes is {memory_bytes}, and an empty grader has {used_bytes} bytes already: raise it")
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _tie_to_parent(parent: int) -> None:
    set_parent_death_signal()
    # The parent may have died before the call; then no signal ever comes.
    if os.getppid() != parent:
        sys.exit("the reward service that started this grader is gone")
    # Orphans of what a scorer starts become children of the grader, so that they are found when it is killed.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _shield_streams() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # What scorers print goes where the service's log goes; its standard output is not theirs.
    os.dup2(2, 1)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Threads and exit handlers of user code could keep the process.
    os._exit(status)
