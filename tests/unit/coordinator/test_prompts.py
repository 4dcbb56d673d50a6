"""The order in which prompts are issued, and going on in its middle."""

from __future__ import annotations

import numpy as np
import pytest
from shoal_coordinator.prompts import PromptPosition, PromptRow, PromptSource, PromptTask

from shoal.errors import DataError


def rows(num: int) -> list[PromptRow]:
    return [PromptRow(row_index=index, prompt_ids=np.array([index], np.int32), text=str(index), row={}) for index in range(num)]


def identities(tasks: list[PromptTask]) -> list[tuple[str, str]]:
    return [(task.uid, task.text) for task in tasks]


def texts(source: PromptSource, num: int) -> list[str]:
    return [task.text for task in source.take(num)]


def test_source_without_shuffle_keeps_the_order_and_wraps_into_the_next_epoch() -> None:
    source = PromptSource(rows(3), seed=0, shuffle=False)
    tasks = source.take(4)
    assert [task.text for task in tasks] == ["0", "1", "2", "0"]
    assert [task.uid for task in tasks] == ["e0-i0", "e0-i1", "e0-i2", "e1-i0"]
    assert source.position == PromptPosition(epoch=1, index=1)


def test_every_epoch_has_every_row_once_in_another_order() -> None:
    source = PromptSource(rows(20), seed=3, shuffle=True)
    first, second = texts(source, 20), texts(source, 20)
    assert sorted(first) == sorted(second) == sorted(str(index) for index in range(20))
    assert first != second
    assert first == texts(PromptSource(rows(20), seed=3, shuffle=True), 20)
    assert first != texts(PromptSource(rows(20), seed=4, shuffle=True), 20)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_issued", [0, 1, 6, 7, 8, 13, 14, 20])
def test_source_goes_on_from_any_position_whatever_is_taken_at_once(shuffle: bool, num_issued: int) -> None:
    whole = identities(PromptSource(rows(7), seed=3, shuffle=shuffle).take(40))
    first = PromptSource(rows(7), seed=3, shuffle=shuffle)
    first.take(num_issued)
    resumed = PromptSource(rows(7), seed=3, shuffle=shuffle, position=first.position)
    # Dynamic sampling takes what is missing: another number each time.
    rest = [task for num in (3, 1, 5, 2, 8) for task in resumed.take(num)]
    assert identities(rest) == whole[num_issued : num_issued + 19]


def test_seek_leads_back_and_forth_in_the_same_source() -> None:
    source = PromptSource(rows(5), seed=1, shuffle=True)
    whole = identities(source.take(20))
    for num_issued in (17, 4, 10, 0):
        source.seek(PromptPosition(epoch=num_issued // 5, index=num_issued % 5))
        assert identities(source.take(3)) == whole[num_issued : num_issued + 3]


def test_taking_none_leaves_the_position() -> None:
    source = PromptSource(rows(2), seed=1, shuffle=True)
    assert source.take(0) == []
    assert source.position == PromptPosition()


@pytest.mark.parametrize("position", [PromptPosition(index=3), PromptPosition(index=-1), PromptPosition(epoch=-1)])
def test_position_that_the_rows_do_not_have_is_refused(position: PromptPosition) -> None:
    with pytest.raises(DataError, match="is no position in 3 prompts"):
        PromptSource(rows(3), seed=0, shuffle=True, position=position)


def test_source_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptSource([], seed=0, shuffle=True)
