from __future__ import annotations

import pytest
from shoal_reward.models.chat import messages_of

from shoal.errors import DataError

USER = {"role": "user", "content": "2+2?"}
REPLY = {"role": "assistant", "content": "4"}


def test_a_plain_prompt_is_one_message_of_the_user() -> None:
    assert messages_of("2+2?", "4", {}, None) == [USER, REPLY]
    assert messages_of("2+2?", "4", {"prompt": "2+2?", "messages": "no"}, None) == [USER, REPLY]


@pytest.mark.parametrize(("column", "key"), [("prompt", None), ("messages", None), ("chat", "chat")])
def test_messages_of_the_row_stand_before_the_response(column: str, key: str | None) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert messages_of("rendered", "4", {column: [system, USER]}, key) == [system, USER, REPLY]


def test_a_message_that_the_policy_continued_is_continued() -> None:
    begun = {"role": "assistant", "content": "It is "}
    row: dict[str, object] = {"prompt": [USER, begun]}
    assert messages_of("rendered", "4", row, None) == [USER, {"role": "assistant", "content": "It is 4"}]
    assert row == {"prompt": [USER, begun]}


@pytest.mark.parametrize("found", [[], ["2+2?"], [{"role": "user"}], [{"role": 1, "content": ""}]])
def test_a_list_that_holds_no_messages_is_an_error(found: list[object]) -> None:
    with pytest.raises(DataError, match="holds no chat messages"):
        messages_of("p", "r", {"messages": found}, None)


@pytest.mark.parametrize(("row", "message"), [({}, "has no column 'chat'"), ({"chat": "text"}, "holds no chat messages")])
def test_a_named_column_must_hold_messages(row: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        messages_of("p", "r", row, "chat")
