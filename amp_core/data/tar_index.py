"""The samples of tar shards, as arrays: a million take 40 MB, and workers share them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from amp_core.data.errors import DataError
from amp_core.data.tar_scan import Member, members

# WebDataset's layout: up to the first dot of its name a file's key, after it the field. Names that start with a dot, and
# those that start with `__...__`, belong to no sample.
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
_META = re.compile(r"__[^/]*__(?:$|/)")


@dataclass(frozen=True, kw_only=True)
class TarIndex:
    """Where each field of each sample lies.

    Attributes:
        shard: Index of each sample's shard, int32 of shape [samples]; rising.
        offset: First byte of a field in its shard, int64 of shape [samples, fields].
        size: Bytes of a field, int64 of shape [samples, fields].
        choice: Which of a field's alternatives there is, int8 of shape [samples, fields].
    """

    shard: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    choice: NDArray[np.int8]


def index_shards(paths: Sequence[Path], fields: Sequence[Sequence[str]]) -> TarIndex:
    """Find every sample.

    Args:
        paths: Of the shards.
        fields: For each field the alternatives of its name after the first dot.

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


def _named(found: Iterable[Member]) -> Iterator[tuple[str, str, Member]]:
    for member in found:
        name = _NAME.fullmatch(member.name)
        if name is not None and _META.match(member.name) is None:
            yield name[1], name[2].lower(), member


def _content(path: Path, key: str, entries: Iterable[tuple[str, Member]]) -> dict[str, Member]:
    content: dict[str, Member] = {}
    for field, member in entries:
        if field in content:
            raise DataError(f"{path}: the sample {key!r} has {field!r} twice; give each sample a name of its own")
        content[field] = member
    return content


def _place(path: Path, key: str, content: dict[str, Member], alternatives: Sequence[str]) -> tuple[int, int, int]:
    for choice, field in enumerate(alternatives):
        if field in content:
            return content[field].offset, content[field].size, choice
    raise DataError(
        f"{path}: the sample {key!r} has no {' or '.join(map(repr, alternatives))}; it has {', '.join(sorted(content))}"
    )
