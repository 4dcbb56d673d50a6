"""The error catalogue in both directions."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from shoal import errors
from shoal.errors import (
    InternalError,
    MessageSizeError,
    NotFoundError,
    ShoalError,
    StalePolicyError,
    StateError,
    UnavailableError,
)
from shoal.rpc.catalogue import ERROR_METADATA_KEY, MAX_TEXT_CHARS, error_metadata, from_rpc_error, to_status

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ShoalError) and cls is not ShoalError]


def _rpc_error(code: grpc.StatusCode, details: str, *trailing: tuple[str, str]) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(*trailing), details=details)


@pytest.mark.parametrize("cls", CLASSES)
def test_catalogue_every_class_survives_the_round_trip(cls: type[ShoalError]) -> None:
    code, text = to_status(cls("value 3 is wrong"))
    back = from_rpc_error(_rpc_error(code, text, *error_metadata(cls("x"))))
    assert type(back) is cls
    assert str(back) == "value 3 is wrong"


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.StateError, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.StalePolicyError, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
        (errors.CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.MessageSizeError, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
        (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.InternalError, grpc.StatusCode.INTERNAL),
    ],
)
def test_catalogue_status_is_the_documented_one(cls: type[ShoalError], code: grpc.StatusCode) -> None:
    assert to_status(cls("x"))[0] is code


def test_catalogue_unknown_subclass_takes_its_base() -> None:
    class Special(StalePolicyError):
        pass

    assert to_status(Special("x"))[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert error_metadata(Special("x")) == ((ERROR_METADATA_KEY, "StalePolicyError"),)


def test_catalogue_long_text_is_cut_and_says_so() -> None:
    _, text = to_status(ShoalError("y" * 100_000))
    assert text.startswith("y" * MAX_TEXT_CHARS)
    assert "100000 characters" in text
    assert len(text) < MAX_TEXT_CHARS + 100


def test_catalogue_error_without_text_names_its_class() -> None:
    assert to_status(StateError())[1] == "StateError"


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.CANCELLED, UnavailableError),
        (grpc.StatusCode.NOT_FOUND, NotFoundError),
        (grpc.StatusCode.UNKNOWN, InternalError),
        (grpc.StatusCode.DATA_LOSS, InternalError),
    ],
)
def test_catalogue_foreign_answer_is_mapped_by_status_and_names_the_peer(code: grpc.StatusCode, cls: type[ShoalError]) -> None:
    back = from_rpc_error(_rpc_error(code, "why"), peer="reward at h:1")
    assert type(back) is cls
    assert str(back) == "reward at h:1: why"


@pytest.mark.parametrize("name", ["Exception", "SystemExit", "os.system", ""])
def test_catalogue_unknown_class_name_from_the_wire_is_ignored(name: str) -> None:
    back = from_rpc_error(_rpc_error(grpc.StatusCode.NOT_FOUND, "gone", (ERROR_METADATA_KEY, name)))
    assert type(back) is NotFoundError


def test_catalogue_too_large_message_names_size_and_limit() -> None:
    back = from_rpc_error(
        _rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (70000001 vs. 67108864)")
    )
    assert isinstance(back, MessageSizeError)
    assert "70000001 bytes" in str(back)
    assert "67108864 bytes" in str(back)
    assert "split" in str(back)
