"""The places of samples in tar shards: file patterns, headers, and an index in arrays."""

from __future__ import annotations

import glob
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfserve.amp_core.data.data_errors import DataError

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_ADDRESS = re.compile(r"(pipe:|\w{2,}://)")
MOST_NAMES = 1_000_000


def shard_paths(shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files of one or more patterns, in their order; the matches of one `*` sorted by name.

    A pattern has `{a,b}` for alternatives, `{0000..0011}` for a range (as wide as its first number is written) and `*`, `?`,
    `[...]` for existing files.

    Raises:
        DataError: If a file is missing, comes twice, or is no local file.
    """
    patterns = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    paths = [path for pattern in patterns for name in expand_braces(os.fspath(pattern)) for path in _found(name)]
    if not paths:
        raise DataError("no shards are named; expected a pattern such as 'shards/train-{0000..0011}.tar'")
    for path in paths:
        if not path.is_file():
            raise DataError(f"there is no shard {path}; expected a .tar file")
    twice = sorted({str(path) for path in paths if paths.count(path) > 1}) if len(set(paths)) < len(paths) else []
    if twice:
        raise DataError(f"the shard {twice[0]} is named twice: each of its samples would come twice")
    return paths


def expand_braces(pattern: str) -> Iterator[str]:
    """Expand `{a,b}` and `{00..11}`, from left to right, as a shell does.

    Raises:
        DataError: If a brace is left open or holds neither alternatives nor a range.
    """
    braces = _BRACES.search(pattern)
    if braces is None:
        if "{" in pattern or "}" in pattern:
            raise DataError(f"the braces in {pattern!r} do not close; expected such as 'train-{{0000..0011}}.tar'")
        yield pattern
        return
    for choice in _choices(braces[1], pattern):
        yield from expand_braces(pattern[: braces.start()] + choice + pattern[braces.end() :])


def _choices(inside: str, pattern: str) -> list[str]:
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        if "," not in inside:
            raise DataError(
                f"{{{inside}}} in {pattern!r} is neither a range such as {{00..11}} nor alternatives such as {{a,b}}"
            )
        return inside.split(",")
    first, last = int(numbers[1]), int(numbers[2])
    if not 0 <= last - first < MOST_NAMES:
        raise DataError(f"the range {{{inside}}} in {pattern!r} is empty or too long; expected such as {{0000..0011}}")
    return [str(number).zfill(len(numbers[1])) for number in range(first, last + 1)]


def _found(name: str) -> list[Path]:
    if _ADDRESS.match(name):
        raise DataError(
            f"{name!r} is no local file; tar_shards reads samples where they lie on disk. "
            "For what comes as a stream use webdataset.WebDataset, which training takes as a data set too"
        )
    if not glob.has_magic(name):
        return [Path(name)]
    found = sorted(glob.glob(name))  # noqa: PTH207  (Path.glob takes no absolute pattern)
    if not found:
        raise DataError(f"no file matches {name!r}; expected .tar files")
    return [Path(path) for path in found]


_BLOCK = 512
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"(\xb5": "zstd"}


class TarMember(NamedTuple):
    """A file in a tar file: its name, and its content's place in bytes."""

    name: str
    offset: int
    size: int


def members(path: Path) -> Iterator[TarMember]:
    """Yield the regular files of a tar file, in their order, from its headers: the contents are skipped.

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
                        yield TarMember(member.name, member.offset_data, member.size)
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
    # tarfile treats an invalid or missing header as the end: samples would be missing silently.
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


# WebDataset's layout: a file's key up to the first dot of its name, then the field. Names that start with a dot or with
# `__...__` belong to no sample.
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
_META = re.compile(r"__[^/]*__(?:$|/)")


@dataclass(frozen=True, kw_only=True)
class TarIndex:
    """The place of each field of each sample: a million samples take 40 MB, which workers share."""

    shard: NDArray[np.int32]  # index of each sample's shard, int32 of shape [samples]; rising
    offset: NDArray[np.int64]  # first byte of a field in its shard, int64 of shape [samples, fields]
    size: NDArray[np.int64]  # bytes of a field, int64 of shape [samples, fields]
    choice: NDArray[np.int8]  # the index of a field's alternative, int8 of shape [samples, fields]


def index_shards(paths: Sequence[Path], fields: Sequence[Sequence[str]]) -> TarIndex:
    """Find every sample; `fields` has the alternatives of each field's name after the first dot.

    Raises:
        DataError: If a shard cannot be read, or a sample lacks a field or has one twice.
    """
    shards, rows = [], []
    for number, path in enumerate(paths):
        found = list(_rows(path, fields))
        shards.append(np.full(len(found), number, dtype=np.int32))
        rows.append(np.array(found, dtype=np.int64).reshape(-1, len(fields), 3))
    places = np.concatenate(rows)
    return TarIndex(
        shard=np.concatenate(shards),
        offset=np.ascontiguousarray(places[:, :, 0]),
        size=np.ascontiguousarray(places[:, :, 1]),
        choice=places[:, :, 2].astype(np.int8),
    )


def _rows(path: Path, fields: Sequence[Sequence[str]]) -> Iterator[list[tuple[int, int, int]]]:
    for key, sample in groupby(_named(members(path)), key=lambda entry: entry[0]):
        content = _content(path, key, ((field, member) for _, field, member in sample))
        yield [_place(path, key, content, alternatives) for alternatives in fields]


def _named(found: Iterable[TarMember]) -> Iterator[tuple[str, str, TarMember]]:
    for member in found:
        name = _NAME.fullmatch(member.name)
        if name is not None and _META.match(member.name) is None:
            yield name[1], name[2].lower(), member


def _content(path: Path, key: str, entries: Iterable[tuple[str, TarMember]]) -> dict[str, TarMember]:
    content: dict[str, TarMember] = {}
    for field, member in entries:
        if field in content:
            raise DataError(f"{path}: the sample {key!r} has {field!r} twice; give each sample a name of its own")
        content[field] = member
    return content


def _place(path: Path, key: str, content: dict[str, TarMember], alternatives: Sequence[str]) -> tuple[int, int, int]:
    for choice, field in enumerate(alternatives):
        if field in content:
            return content[field].offset, content[field].size, choice
    raise DataError(
        f"{path}: the sample {key!r} has no {' or '.join(map(repr, alternatives))}; it has {', '.join(sorted(content))}"
    )
