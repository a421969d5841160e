"""Where the members of a tar file lie, so that each can be read alone."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from amp_core.data.errors import DataError

_BLOCK = 512
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"(\xb5": "zstd"}


class Member(NamedTuple):
    """A file in a tar file: its name, and its content's place in bytes."""

    name: str
    offset: int
    size: int


def members(path: Path) -> Iterator[Member]:
    """Read the headers of a tar file, skipping over the contents.

    Yields:
        Its regular files, in their order.

    Raises:
        DataError: If it is missing, compressed, truncated, damaged, or several tar files in one.
    """
    try:
        with path.open("rb") as file:
            _require_plain(file, path)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
                    if member.issparse():
                        raise DataError(f"{path}: {member.name!r} is stored with holes; write the shard without --sparse")
                    if member.isreg():
                        yield Member(member.name, member.offset_data, member.size)
                _require_end(file, tar.offset, path)
    except tarfile.TarError as error:
        raise DataError(f"the shard {path} is damaged or truncated ({error}); write it again") from error
    except OSError as error:
        raise DataError(f"cannot read the shard {path}: {error.strerror or error}") from error


def _require_plain(file: IO[bytes], path: Path) -> None:
    start = file.read(2)
    file.seek(0)
    if start in _COMPRESSED:
        raise DataError(
            f"the shard {path} is compressed ({_COMPRESSED[start]}), so its samples cannot be read where they lie; "
            "decompress it (images inside are compressed already)"
        )


def _require_end(file: IO[bytes], offset: int, path: Path) -> None:
    # tarfile takes a header that makes no sense, or none at all, for the end: samples would be missing without a word.
    file.seek(offset)
    mark = file.read(_BLOCK)
    if len(mark) < _BLOCK:
        raise DataError(f"the shard {path} is truncated: it stops at byte {offset + len(mark)} without tar's end mark")
    if mark.strip(b"\0"):
        raise DataError(f"the shard {path} is damaged at byte {offset}: there is no tar header; write it again")
    if file.read(1 << 20).strip(b"\0"):
        raise DataError(
            f"the shard {path} goes on after tar's end mark at byte {offset}, so it would be read in part; "
            "join tar files by `tar --concatenate`, not by `cat`"
        )
