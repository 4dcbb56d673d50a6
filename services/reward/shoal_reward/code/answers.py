"""The code in a response."""

from __future__ import annotations

from shoal_reward.code.settings import CodePlace

_TAGS = (["python"], ["py"], ["python3"])
_OPEN, _CLOSE = "<answer>", "</answer>"


def code_of(response: str, place: CodePlace) -> str | None:
    """Find the code of a response; None if it has none. Time is linear in the length of the response."""
    if place is CodePlace.FENCE:
        return _last_fence(response)
    if place is CodePlace.WHOLE:
        return response
    answer = _last_answer(response)
    if answer is None:
        return None
    fenced = _last_fence(answer)
    return answer if fenced is None else fenced


def _last_answer(response: str) -> str | None:
    end = response.rfind(_CLOSE)
    start = response.rfind(_OPEN, 0, max(end, 0))
    return None if start < 0 else response[start + len(_OPEN) : end]


def _last_fence(text: str) -> str | None:
    """The lines of the last closed ```python block; a block ends with a line that has nothing but its fence."""
    found: str | None = None
    # Only line feeds end a line: a form feed or U+2028 may stand in a string of the code.
    lines = text.split("\n")
    start: int | None = None
    is_python = False
    for number, line in enumerate(lines):
        bare = line.strip()
        if start is None and bare.startswith("```"):
            start, is_python = number + 1, bare[3:].lower().split()[:1] in _TAGS
        elif start is not None and bare == "```":
            found = "\n".join(lines[start:number]) if is_python else found
            start = None
    return found
