"""Header blocks that neither use nor change what the two sides of a connection remember of earlier ones.

https://www.rfc-editor.org/rfc/rfc7541, sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Iterable

INDEXED, INSERTS, RESIZES = 0x80, 0x40, 0x20
# Of the static table (appendix A), which nothing changes.
STATUS_200, METHOD_POST, SCHEME_HTTP, PATH_ROOT = (bytes([INDEXED | place]) for place in (8, 3, 6, 4))
# Names of that table, the value to follow.
AUTHORITY, CONTENT_TYPE = bytes([1]), bytes([0x0F, 31 - 0x0F])


def literal(value: bytes) -> bytes:
    """A string as it is (section 5.2)."""
    return _integer(len(value), 7) + value


def literals(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers that are not to be remembered (section 6.2.2)."""
    return b"".join(b"\0" + literal(name) + literal(value) for name, value in headers)


def repeats(block: bytes) -> bool:
    """Whether these bytes mean the same when they come again: they do if they change nothing of what is remembered.

    A block that is not well formed does not: reading it is somebody else's task.
    """
    at = 0
    try:
        while at < len(block):
            first = block[at]
            if first & INDEXED:
                at = _after_integer(block, at, 7)
            elif first & (INSERTS | RESIZES):
                return False
            else:
                has_name = first & 0x0F
                at = _after_integer(block, at, 4)
                if not has_name:
                    at = _after_string(block, at)
                at = _after_string(block, at)
    except IndexError:
        return False
    return at == len(block)


def _integer(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    encoded, value = [most], value - most
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _after_integer(block: bytes, at: int, bits: int) -> int:
    """The place after an integer, whatever its value."""
    most = (1 << bits) - 1
    if block[at] & most == most:
        at += 1
        while block[at] & 0x80:
            at += 1
    return at + 1


def _after_string(block: bytes, at: int) -> int:
    end = _after_integer(block, at, 7)
    length = block[at] & 0x7F
    for place, byte in enumerate(block[at + 1 : end]):
        length += (byte & 0x7F) << 7 * place
    return end + length
