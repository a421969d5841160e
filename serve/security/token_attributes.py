"""What may stand after the roles in a line of the token file: `expires=TIME`, and `model=PATTERN` any number of times."""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve.security.errors import SecurityError
from serve.security.expiry import parse_time, write_time
from serve.security.model_rights import ModelRights, model_rights

EXPIRES, MODEL = "expires", "model"
WORD = re.compile(r"[A-Za-z_ -]{0,20}")  # what may be quoted: no token looks like that
EXPECTED = f"expected {EXPIRES}=TIME or {MODEL}=NAME"


def write_attributes(expires_s: float | None, rights: ModelRights | None) -> list[str]:
    """The attributes as words.

    Raises:
        SecurityError: the end lies too far away.
    """
    ends = [] if expires_s is None else [f"{EXPIRES}={write_time(expires_s)}"]
    return ends + [f"{MODEL}={pattern}" for pattern in (() if rights is None else rights.patterns)]


def read_attributes(words: Sequence[str]) -> tuple[float | None, ModelRights | None]:
    """The end in seconds since the epoch, and the models; None where there are none of them.

    Raises:
        SecurityError: a word is no attribute, or says something that cannot be.
    """
    ends: list[float] = []
    patterns: list[str] = []
    for word in words:
        name, is_one, value = word.partition("=")
        if not is_one:
            raise SecurityError(f"a word among the attributes is none; {EXPECTED}, without spaces in them")
        if name == EXPIRES:
            ends.append(parse_time(value))
        elif name == MODEL:
            patterns.append(value)
        else:
            shown = f"attribute {name!r}" if WORD.fullmatch(name) else "an attribute"
            raise SecurityError(f"{shown} is not known; {EXPECTED}")
    if len(ends) > 1:
        raise SecurityError(f"{EXPIRES} stands there {len(ends)} times; expected it once")
    return (ends[0] if ends else None), model_rights(patterns)
