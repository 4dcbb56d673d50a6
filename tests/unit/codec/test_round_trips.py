"""Every dataclass of shoal.types survives the wire unchanged."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

import shoal.types
from tests.helpers.codec_values import EXAMPLES, same, types_within


@pytest.mark.parametrize("name", EXAMPLES)
def test_round_trip_keeps_every_field(name: str) -> None:
    module_name, example = EXAMPLES[name]
    module = importlib.import_module(f"shoal.codec.{module_name}")
    message = getattr(module, f"{name}_to_proto")(example)
    # Through bytes, so that what is compared has really been on a wire.
    received = type(message).FromString(message.SerializeToString())
    assert same(getattr(module, f"{name}_from_proto")(received), example)


def test_round_trip_examples_cover_every_type() -> None:
    exported = {value for value in vars(shoal.types).values() if isinstance(value, type) and dataclasses.is_dataclass(value)}
    assert set().union(*(types_within(example) for _, example in EXAMPLES.values())) == exported


@pytest.mark.parametrize("name", EXAMPLES)
def test_round_trip_examples_differ_from_a_default_message(name: str) -> None:
    """A codec that drops a field must not pass by luck: no scalar of an example is the wire's default."""
    module_name, example = EXAMPLES[name]
    message = getattr(importlib.import_module(f"shoal.codec.{module_name}"), f"{name}_to_proto")(example)
    unset = [field.name for field in message.DESCRIPTOR.fields if not field.has_presence and not getattr(message, field.name)]
    assert unset == []
