"""ModelInferRequests whose bytes were changed, cut off, rearranged, or random."""

from __future__ import annotations

import random

from benchmarks.malforming.good_requests import good_request
from halfserve.files.varint import encoded_varint

Random = random.Random
MAX_CHANGES = 8


def changed_bytes(chance: Random) -> bytes:
    """Change a few bytes."""
    data = bytearray(good_request(chance).SerializeToString())
    # The first fields determine the message; most bytes after them are tensors.
    reach = len(data) if chance.random() < 0.3 else min(len(data), 48)
    for _ in range(chance.randint(1, MAX_CHANGES)):
        data[chance.randrange(reach)] = chance.randrange(256)
    return bytes(data)


def cut_off(chance: Random) -> bytes:
    """Cut off the end."""
    data = good_request(chance).SerializeToString()
    return data[: chance.randrange(len(data))]


def spliced(chance: Random) -> bytes:
    """Rearrange, repeat or omit pieces of messages."""
    first, second = (good_request(chance).SerializeToString() for _ in range(2))
    cut, begin = chance.randrange(len(first)), chance.randrange(len(second))
    return chance.choice([first + second, first[:cut] + second[begin:], first + second[begin:], first[:cut] + first])


def random_bytes(chance: Random) -> bytes:
    """Random bytes, which are most likely not a message."""
    return chance.randbytes(chance.choice([1, 2, 7, 50, 400]))


def huge_lengths(chance: Random) -> bytes:
    """A field that claims to be longer than the message, by far or by one byte."""
    tag = chance.choice([1, 2, 3, 4, 5, 6, 7, 15, 16, 2000]) << 3 | 2
    length = chance.choice([2**63, 2**64 - 1, 2**32, 2**31 - 1, 2**35, 1000])
    return (
        good_request(chance).SerializeToString()
        + encoded_varint(tag)
        + encoded_varint(length)
        + chance.randbytes(chance.randrange(20))
    )
