"""What a worker offers of the collective transport."""

from __future__ import annotations

import pytest
import torch
from shoal_rollout.worker_receiver import WorkerReceiver

from shoal.config.models import PushSection
from shoal.errors import TransportError
from shoal.weights.transports.staging import ParameterPieces

NOT_OURS = "192.0.2.1"
"""Reserved for documentation, so no machine has it."""


def receiver(worker_rank: int = 0) -> WorkerReceiver:
    return WorkerReceiver(ParameterPieces((), lambda _: torch.empty(0), "nowhere"), worker_rank)


@pytest.mark.parametrize(
    ("transport", "device", "worker_rank", "host", "offers"),
    [
        ("auto", "cuda:0", 0, "127.0.0.1", True),
        ("collective", "cpu", 0, "127.0.0.1", True),
        ("auto", "cpu", 0, "127.0.0.1", False),
        ("grpc", "cuda:0", 0, "127.0.0.1", False),
        ("auto", "cuda:0", 1, "127.0.0.1", False),
        ("auto", "cuda:0", 0, "", False),
        ("auto", "cuda:0", 0, NOT_OURS, False),
    ],
)
def test_worker_offers_a_store_where_it_may_be_used(transport: str, device: str, worker_rank: int, host: str, offers: bool) -> None:
    offering = receiver(worker_rank)
    push = PushSection.model_validate({"transport": transport})
    try:
        endpoints = offering.endpoints(push, host, device)
        assert list(endpoints) == (["collective"] if offers else [])
        assert offering.endpoints(push, host, device) == endpoints
    finally:
        offering.close()


def test_store_that_cannot_listen_is_an_error_where_nothing_else_is_allowed() -> None:
    with pytest.raises(TransportError, match=r"can listen on 192\.0\.2\.1: .*; let --advertise name an address of this machine"):
        receiver().endpoints(PushSection(transport="collective"), NOT_OURS, "cpu")


def test_worker_offers_no_store_where_plaintext_is_not_allowed() -> None:
    push = PushSection(transport="collective", plaintext_collective=False)
    assert not receiver().endpoints(push, "127.0.0.1", "cpu")
