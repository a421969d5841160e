"""An `onnx_ir.Model` on disk, tensor by tensor: in one file or with data files, whole or not at all.

A model is first staged in a hidden folder beside its place, where it can be opened and verified, and then published by renaming
its files. A data file carries a piece of its content's hash in its name: the same model always gives the same bytes, and a new
model never touches a data file that somebody may still be reading with an older one.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, TypeAlias

import onnx
import onnx_ir

from export.errors import ExportError, telling_place
from export.files.atomic_write import sync_folder
from export.files.model_file import PROTOBUF_LIMIT_BYTES, ModelFile
from export.files.tensor_bytes import synced, write_in_one_file, write_padded
from export.files.tensor_outline import Outline, outlined

ExternalData: TypeAlias = Literal["auto", "yes", "no"]

HASH_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class StagedModel:
    """A model that is written, but not yet in its place.

    Attributes:
        path: The model file, in a hidden folder; it can be opened like any other.
        target: Where it belongs.
        data_files: Its data files, beside `path`.
    """

    path: Path
    target: Path
    data_files: tuple[Path, ...]

    def publish(self) -> None:
        """Move the files into place, the model file last, so that a reader finds the old model or the new one.

        Raises:
            ExportError: A file cannot be moved; then nothing has changed. Or the disk does not confirm that the model has
                moved; then the new one is there, until a power cut at least.
        """
        folder, moved = self.target.parent, []
        try:
            for file in self.data_files:
                place = folder / file.name
                existed = place.exists()
                file.replace(place)
                if not existed:
                    moved.append(place)
            sync_folder(folder)
            self.path.replace(self.target)
            moved.clear()  # the model that is there now needs them
            sync_folder(folder)
        except OSError as error:
            for file in moved:
                file.unlink(missing_ok=True)
            raise ExportError(f"cannot write {self.target}: {error.strerror or error}") from error


@contextmanager
def staged_model(
    model: onnx_ir.Model,
    target: Path | str,
    *,
    external_data: ExternalData = "auto",
    shards: Mapping[str, int] | None = None,
    limit_bytes: int = PROTOBUF_LIMIT_BYTES,
) -> Iterator[StagedModel]:
    """Write a model beside its place; on leaving, whatever was not published is removed.

    At any time at most one tensor is in memory, beside what the model itself holds there.

    Args:
        model: The model; its tensors are read one by one, lazy ones evaluated and dropped.
        target: Where it will be published. Links are followed. Its folder must exist.
        external_data: "yes" puts the tensors into data files, "no" all into one file; "auto" into data files where the model
            came with such (`shards`) or where one file cannot hold it.
        shards: For initializers by name, the number of the data file they belong to, from 0; others go where the one before
            them went. None or empty: one data file.
        limit_bytes: The most that one file holds.

    Raises:
        ExportError: The folder is missing or cannot be written to, the disk is full, a tensor cannot be read, or the model is
            over 2 GiB and has to be one file.
    """
    target = Path(target).resolve()
    try:
        hidden = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror or error}: {target.parent}") from error
    with hidden as folder, telling_place(Path(folder), target.parent):
        try:
            with outlined(model) as outline:
                staged = _staged(outline, Path(folder), target, external_data, shards or {}, limit_bytes)
        except OSError as error:
            raise ExportError(f"cannot write {target}: {error.strerror or error}") from error
        yield staged


def _staged(
    outline: Outline, folder: Path, target: Path, external_data: ExternalData, shards: Mapping[str, int], limit_bytes: int
) -> StagedModel:
    path = folder / target.name
    external = external_data == "yes" or (external_data == "auto" and (bool(shards) or outline.size_bytes > limit_bytes))
    if external:
        data = _write_data_files(outline, folder, target, shards)
    elif outline.size_bytes > limit_bytes:
        raise ExportError(
            f"{target} would take {outline.size_bytes / 2**30:.1f} GiB, and one ONNX file holds at most "
            f"{limit_bytes / 2**30:.1f}; allow external data"
        )
    else:
        data = ()
    with synced(path) as file:
        if external:
            file.write(_limited(outline.proto, target, limit_bytes))
        else:
            write_in_one_file(file, outline)
    return StagedModel(path=path, target=target, data_files=data)


def _write_data_files(outline: Outline, folder: Path, target: Path, shards: Mapping[str, int]) -> tuple[Path, ...]:
    shard_of = _shard_of_each([tensor.name or "" for tensor, _ in outline.tensors], shards)
    order = sorted(range(len(shard_of)), key=shard_of.__getitem__)  # stable: within a file, the model's order
    count = len(set(shard_of))
    written: list[Path] = []
    for number, (_, members) in enumerate(groupby(order, key=shard_of.__getitem__), start=1):
        unnamed = folder / f"{number}.tmp"
        chosen = [outline.tensors[index] for index in members]
        with synced(unnamed) as file:
            offsets = [write_padded(file, tensor) for tensor, _ in chosen]
        part = f"-{number:05}-of-{count:05}" if count > 1 else ""
        named = folder / f"{target.stem}{part}-{_digest(unnamed)}.data"
        unnamed.rename(named)
        written.append(named)
        for (tensor, proto), offset in zip(chosen, offsets, strict=True):
            _refer(proto, named.name, offset, tensor.nbytes)
    return tuple(dict.fromkeys(written))


def _shard_of_each(names: list[str], shards: Mapping[str, int]) -> list[int]:
    result, current = [], min(shards.values(), default=0)
    for name in names:
        current = shards.get(name, current)
        result.append(current)
    return result


def _refer(proto: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    proto.data_location = onnx.TensorProto.EXTERNAL
    del proto.external_data[:]
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        proto.external_data.add(key=key, value=value)


def _limited(proto: onnx.ModelProto, target: Path, limit_bytes: int) -> bytes:
    if proto.ByteSize() > limit_bytes:
        raise ExportError(f"{target} would take {proto.ByteSize() / 2**30:.1f} GiB even without its weights; split the model")
    return proto.SerializeToString(deterministic=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:HASH_DIGITS]


def superseded_files(old: ModelFile, new: StagedModel) -> tuple[str, ...]:
    """Data files of a model that is being replaced which the new one does not use: they are left for whoever still reads it."""
    kept = {file.name for file in new.data_files}
    return tuple(location for location in old.locations if location not in kept)
