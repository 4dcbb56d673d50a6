"""A sample as chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import DataError

_USUAL_KEYS = ("prompt", "messages")


def messages_of(prompt: str, response: str, row: Mapping[str, object], key: str | None) -> list[dict[str, Any]]:
    """The prompt's messages and the response as the assistant's.

    A prompt whose last message is the assistant's was continued by the policy; so it is here.

    Args:
        prompt: text of the prompt; one message of the user if the row has no messages.
        response: text.
        row: its columns.
        key: column with messages; None looks for a list in `prompt` and `messages`.
    Raises: DataError: the column is missing or holds something else.
    """
    messages = _messages_in(row, key)
    if messages is None:
        messages = [{"role": "user", "content": prompt}]
    last = messages[-1]
    if last["role"] == "assistant":
        return [*messages[:-1], {**last, "content": f"{last['content']}{response}"}]
    return [*messages, {"role": "assistant", "content": response}]


def check_length(prompt: str, response: str, max_chars: int) -> None:
    """Refuse texts that would keep a tokenizer busy for long.

    Raises: DataError: they are longer.
    """
    if (num_chars := len(prompt) + len(response)) > max_chars:
        raise DataError(f"prompt and response have {num_chars} characters, max_text_chars allows {max_chars}")


def _messages_in(row: Mapping[str, object], key: str | None) -> list[dict[str, Any]] | None:
    if key is not None and key not in row:
        raise DataError(f"the row has no column {key!r} with chat messages: correct messages_key")
    keys = _USUAL_KEYS if key is None else (key,)
    found = next((row[name] for name in keys if isinstance(row.get(name), list)), None)
    if found is None and key is None:
        return None
    if not isinstance(found, list) or not found or not all(_is_message(message) for message in found):
        raise DataError(f"column {key or ' or '.join(keys)} holds no chat messages with role and content: correct the data or messages_key")
    return found


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
