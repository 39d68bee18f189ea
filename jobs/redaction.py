"""Keeps passwords and keys out of what people read: messages, logs, reports of errors.

Two ways, since each alone leaves something: the shape of a URL that carries a password, and the values that
are known to be secret, wherever they turn up. This room may not know what a text is about.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import unquote, unquote_plus

HIDDEN: Final = "***"
SHORTEST: Final = 4
"""Shorter values are not looked for: hiding each "a" of a line would hide the line."""
VARIABLES: Final = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PAGEMILL_S3_SECRET_KEY", "HF_TOKEN", "REDISCLI_AUTH",
)  # fmt: skip
_IN_QUERY: Final = ("password", "ssl_password")
# Up to the last @: a password that holds a / is none of a well-formed URL, and is hidden all the same.
_USER = re.compile(r"(?<=://)[^\s'\"]*@")
_QUERY = re.compile(rf"(?<=[?&])((?:{'|'.join(_IN_QUERY)})=)[^&\s'\"]+")


def without_password(text: str) -> str:
    """The text with user and password of each URL in it hidden, also those in a URL's query."""
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def secrets_of(*urls: str | None, env: Mapping[str, str] = os.environ) -> set[str]:
    """What must not be read by others: passwords in these URLs, and the values of VARIABLES."""
    found = {env.get(name, "") for name in VARIABLES}
    for url in filter(None, urls):
        written = {url.partition("://")[2].rpartition("@")[0].partition(":")[2]}
        written |= {match[0].partition("=")[2] for match in _QUERY.finditer(url)}
        for raw in written:
            found |= {raw, unquote(raw), unquote_plus(raw)}
    return {secret for secret in found if len(secret) >= SHORTEST}


class Redactor:
    """Takes known secrets, and what looks like a URL's password, out of texts."""

    def __init__(self, secrets: Iterable[str]) -> None:
        known = sorted({secret for secret in secrets if len(secret) >= SHORTEST}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        return without_password(text) if "://" in text else text
