"""Hide secrets in text that reaches a log, a message or a repr."""

from __future__ import annotations

import re

_MASK = "***"
# Up to the last @ before the path, since a password may hold an unescaped @.
_USERINFO = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)(?P<userinfo>[^/?#\s]*)@")
_QUERY_SECRET = re.compile(r"(?P<key>[?&][a-z_]*(?:password|passwd|token|secret|api_key)=)[^&#\s]*", re.IGNORECASE)


def mask_url(text: str) -> str:
    """Return text with the password of every URL in it replaced by ***; the user name stays.

    >>> mask_url("redis://worker:s3cret@queue:6379/0")
    'redis://worker:***@queue:6379/0'
    """

    def hide(match: re.Match[str]) -> str:
        user, colon, _ = match["userinfo"].partition(":")
        return f"{match['scheme']}{user}:{_MASK}@" if colon else f"{match['scheme']}{_MASK}@"

    return _QUERY_SECRET.sub(rf"\g<key>{_MASK}", _USERINFO.sub(hide, text))
