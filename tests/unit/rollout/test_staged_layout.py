"""From recorded copies to regions of what is staged."""

from __future__ import annotations

import pytest
from shoal_rollout.load_recorder import RecordedCopy, RecordedLoad
from shoal_rollout.staged_layout import stage

from shoal.errors import ConfigError
from shoal.types import Box, SinkRegion


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    return Box(offsets=offsets, sizes=sizes)


def _load(*copies: RecordedCopy, zeros: tuple[Box, ...] = ()) -> RecordedLoad:
    return RecordedLoad(copies=copies, zeros={"p": zeros} if zeros else {})


WHOLE = RecordedCopy("p", "w", _box((0, 0), (4, 3)), _box((0, 0), (4, 3)))


def test_stage_takes_what_is_covered_once_by_copies_and_padding() -> None:
    staged = stage(_load(WHOLE, WHOLE, zeros=(_box((4, 0), (1, 3)),)), {"p": (5, 3), "never loaded": (1,)})
    assert staged.keys() == {"p"}
    assert staged["p"].shape == (5, 3)
    assert staged["p"].regions == (
        SinkRegion(parameter="p", source_name="w", source_box=_box((0, 0), (4, 3)), parameter_box=_box((0, 0), (4, 3))),
    )


def test_stage_refuses_what_is_written_never_or_twice() -> None:
    with pytest.raises(ConfigError, match=r"parameter p .*3 of 15 elements"):
        stage(_load(WHOLE), {"p": (5, 3)})
    other = RecordedCopy("p", "v", _box((0, 0), (1, 3)), _box((3, 0), (1, 3)))
    with pytest.raises(ConfigError, match=r"parameter p .*overlap"):
        stage(_load(WHOLE, other), {"p": (4, 3)})


def test_stage_flattens_a_stack_of_separate_matrices() -> None:
    copies = [
        RecordedCopy("p", f"w{expert}", _box((0, 4), (3, 2)), _box((expert, half, 0), (1, 3, 2))) for expert in range(2) for half in (0, 3)
    ]
    staged = stage(_load(*copies, zeros=(_box((0, 6, 0), (2, 1, 2)),)), {"p": (2, 7, 2)})["p"]
    assert staged.shape == (14, 2)
    assert [(region.source_name, region.parameter_box.offsets) for region in staged.regions] == [
        ("w0", (0, 0)),
        ("w0", (3, 0)),
        ("w1", (7, 0)),
        ("w1", (10, 0)),
    ]
    assert {region.parameter_box.sizes for region in staged.regions} == {region.source_box.sizes for region in staged.regions} == {(3, 2)}


def test_stage_keeps_a_stack_that_is_one_tensor() -> None:
    copy = RecordedCopy("p", "w", _box((0, 2, 0), (2, 2, 3)), _box((0, 0, 0), (2, 2, 3)))
    assert stage(_load(copy), {"p": (2, 2, 3)})["p"].shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("copies", "why"),
    [
        (
            [
                RecordedCopy("p", "a", _box((0,), (3,)), _box((0, 0), (1, 3))),
                RecordedCopy("p", "b", _box((0, 0), (1, 3)), _box((1, 0), (1, 3))),
            ],
            r"2 dims is loaded from checkpoint tensors of \[1, 2\] dims",
        ),
        (
            [RecordedCopy("p", "a", _box((0, 0, 0), (2, 1, 3)), _box((0, 0), (2, 3)))],
            r"2 dims is loaded from checkpoint tensors of \[3\] dims",
        ),
        ([RecordedCopy("p", "a", _box((0,), (2,)), _box((0, 0), (2, 1)))], "written from a in a way that is not a copy of a rectangle"),
    ],
)
def test_stage_refuses_parts_that_do_not_fit_together(copies: list[RecordedCopy], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        stage(_load(*copies), {"p": (2, 3)})
