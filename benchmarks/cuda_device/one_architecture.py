"""Cuts ONNX Runtime's CUDA provider down to the machine code of one architecture, so that it travels in a small archive.

A fat binary is a header (magic, version 1, its own length 16, and the length of what follows) before entries, each with machine
code or PTX for one architecture. The file keeps its length: what other architectures need becomes zeros, which compress to
nothing. Fat binaries for this architecture alone hold kernels of quantized and grouped products, which the measurements do not
use; they become copies of the smallest entry, so that the driver finds valid code wherever it looks. Seen with 1.31.1: 284 MB
become 39 MB as .tar.xz.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = 0xBA55ED50
HEADER = struct.Struct("<IHHQ")  # magic, version, length of this header, length of the entries
ENTRY = struct.Struct("<HHIQ")  # kind, version, length of this header, length of the code
ARCHITECTURE_OFFSET = 28  # position of the architecture, such as 90, in an entry's header
SM_90 = 90


@dataclass(frozen=True)
class Entry:
    """Code for one architecture in a fat binary."""

    start: int  # place of its header in the file
    code: int  # place of its code
    end: int
    architecture: int


@dataclass(frozen=True)
class FatBinary:
    """The code of one translation unit."""

    start: int
    entries: tuple[Entry, ...]


def fat_binaries(program: bytes | bytearray) -> Iterator[FatBinary]:
    """Yield the fat binaries of a program in order."""
    start = program.find(MAGIC.to_bytes(4, "little"))
    while 0 <= start <= len(program) - HEADER.size:
        _, version, length, size = HEADER.unpack_from(program, start)
        end = start + 4
        if (version, length) == (1, HEADER.size) and start + length + size <= len(program):
            end = start + length + size
            yield FatBinary(start, tuple(_entries(program, start + length, end)))
        start = program.find(MAGIC.to_bytes(4, "little"), end)


def keep_one(program: bytearray, architecture: int = SM_90) -> int:
    """Remove the code of other architectures from a program; return the number of fat binaries that keep theirs.

    Raises:
        ValueError: the program has no code for the architecture.
    """
    found = list(fat_binaries(program))
    wanted = [entry for binary in found for entry in binary.entries if entry.architecture == architecture]
    if not wanted:
        raise ValueError(f"the program has no code for sm_{architecture}")
    smallest = min(wanted, key=lambda entry: entry.end - entry.start)
    copy = bytes(program[smallest.start : smallest.end])
    kept = 0
    for binary in found:
        architectures = {entry.architecture for entry in binary.entries}
        if architectures == {architecture}:
            first, last = binary.entries[0].start, binary.entries[-1].end
            program[first:last] = copy + bytes(last - first - len(copy))
            HEADER.pack_into(program, binary.start, MAGIC, 1, HEADER.size, len(copy))
            continue
        kept += architecture in architectures
        for entry in binary.entries:
            if entry.architecture != architecture:
                program[entry.code : entry.end] = bytes(entry.end - entry.code)
    return kept


def _entries(program: bytes | bytearray, place: int, end: int) -> Iterator[Entry]:
    while place < end:
        _, _, length, size = ENTRY.unpack_from(program, place)
        (architecture,) = struct.unpack_from("<I", program, place + ARCHITECTURE_OFFSET)
        yield Entry(place, place + length, place + length + size, architecture)
        place += length + size
