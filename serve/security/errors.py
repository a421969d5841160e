"""What can be wrong with the files and settings that guard a server."""

from __future__ import annotations


class SecurityError(Exception):
    """A server cannot be guarded as asked for; the text names the file and says what to do."""
