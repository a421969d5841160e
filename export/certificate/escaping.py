"""Untrusted text in HTML and XML."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape, quoteattr

# What XML 1.0 does not allow in any form: control characters, lone surrogates and two non-characters.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escaped(text: str) -> str:
    """The text as content of an element; characters that no page may hold become U+FFFD."""
    return escape(_FORBIDDEN.sub("\ufffd", text))


def quoted(text: str) -> str:
    """The text as an attribute's value, its quotes included."""
    return quoteattr(_FORBIDDEN.sub("\ufffd", text))
