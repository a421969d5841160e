"""Captured requests on disk: what `serve --capture` writes, and `bench`, `convert`, `verify` and `export` read.

A capture is a folder with one folder per model. It holds numbered shards, FOLDER/MODEL/000001.npz, each written as a whole. A
shard is an uncompressed .npz file. Its array `index` has the bytes of a JSON object: the schema's number, the model, and one
entry per request. The other arrays are the requests' tensors, `<position in the index>/<name of the input>`: BF16 as uint16 bit
patterns, BYTES as uint8 in the form of the wire, which is a little-endian uint32 length before each element.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from halfserve.files.atomic_files import atomic_file
from halfserve.protos.datatypes import BY_WIRE, Datatype

SCHEMA: Final = 1
SUFFIX: Final = ".npz"
INDEX: Final = "index"
LENGTH_BYTES: Final = 4  # before each element of BYTES
PRIVATE: Final = 0o600  # mode of a shard: its tensors are the data of users
DAMAGED: Final = (
    *(ValueError, LookupError, TypeError, AttributeError, EOFError, MemoryError, RecursionError, NotImplementedError),
    *(RuntimeError, zipfile.BadZipFile),
)  # what zipfile, numpy and json raise for files that are not shards

Array: TypeAlias = np.ndarray[Any, Any]
Parameter: TypeAlias = bool | int | float | str


class CapturedRequestsError(Exception):
    """A capture cannot be read. The text says what is wrong, what was expected, and what to do."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedRequest:
    """One request as its client sent it, and how it ended.

    Attributes:
        time_s: time of its arrival, in seconds since 1970.
        model: name of the model.
        version: the model's version that answered.
        request_id: the client's id; "" without one.
        latency_ms: time from its arrival to its answer or error.
        status: name of the gRPC status, such as "OK".
        parameters: the request's own parameters by name.
        inputs: tensors by the names of the inputs. BF16 has ml_dtypes' dtype; each element of BYTES is a `bytes` object.
        datatypes: datatype on the wire of each input, such as "FP16". An input that takes pictures may have BYTES: their files.
    """

    time_s: float
    model: str
    version: int
    request_id: str
    latency_ms: float
    status: str
    parameters: Mapping[str, Parameter]
    inputs: Mapping[str, Array]
    datatypes: Mapping[str, str]


def write_shard(path: Path, model: str, requests: Sequence[CapturedRequest]) -> None:
    """Write requests of one model as the shard `path`, readable by this user alone. A reader sees all of it or nothing.

    Raises:
        OSError: the shard cannot be written.
        ValueError: a tensor does not have its datatype, or a name cannot be written.
    """
    content = {"schema": SCHEMA, "model": model, "requests": [_entry(request) for request in requests]}
    index = json.dumps(content, separators=(",", ":")).encode()
    with atomic_file(path) as file:
        os.fchmod(file.fileno(), PRIVATE)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            _write_array(archive, INDEX, np.frombuffer(index, np.uint8))
            for position, request in enumerate(requests):
                for name, array in request.inputs.items():
                    _write_array(archive, f"{position}/{name}", _to_disk(array, BY_WIRE[request.datatypes[name]]))


def read_capture(folder: Path, *, model: str | None = None, limit: int | None = None) -> list[CapturedRequest]:
    """Read captured requests of one model, the earliest first.

    Args:
        folder: folder of the capture, folder of one model in it, or one shard.
        model: the model; needed if the capture has requests of several.
        limit: most requests to read; None reads all.

    Raises:
        CapturedRequestsError: there are no requests of the model, or a shard cannot be used.
    """
    found: list[tuple[float, Path, int]] = []
    models: set[str] = set()
    for path in _shards(folder):
        with _reading(path) as shard:
            if shard is None:
                continue
            models.add(shard.model)
            if model in {None, shard.model}:
                found += [(float(entry["time"]), path, position) for position, entry in enumerate(shard.entries)]
    names = ", ".join(map(repr, sorted(models)))
    if not models:
        raise CapturedRequestsError(
            f"{folder}: has no captured requests, expected files such as MODEL/000001{SUFFIX}; "
            "capture some with `halfserve serve ... --capture FOLDER`"
        )
    if model is None and len(models) > 1:
        raise CapturedRequestsError(
            f"{folder}: has requests of {names}, expected those of one model; name the model or its folder"
        )
    if model is not None and model not in models:
        raise CapturedRequestsError(f"{folder}: has no requests of model {model!r}, but of {names}; name one of these")
    chosen: dict[Path, list[int]] = {}
    for _, path, position in sorted(found)[:limit]:
        chosen.setdefault(path, []).append(position)
    requests: list[CapturedRequest] = []
    for path, positions in chosen.items():
        with _reading(path) as shard:
            requests += [] if shard is None else [shard.request(position) for position in positions]
    return sorted(requests, key=lambda request: request.time_s)


def bytes_elements(data: bytes | memoryview, shape: Sequence[int]) -> Array:
    """Return the elements of a BYTES tensor in the form of the wire, as an array of `bytes`.

    Raises:
        ValueError: the elements do not fit the shape.
    """
    data, elements, position = bytes(data), list[bytes](), 0
    while position < len(data):
        start = position + LENGTH_BYTES
        position = start + int.from_bytes(data[position:start], "little")
        elements.append(data[start:position])
    if position != len(data) or len(elements) != math.prod(shape):
        raise ValueError(f"has {len(elements)} BYTES elements, expected {math.prod(shape)} whole ones")
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(tuple(shape))


class _Shard:
    """An open shard."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        members = archive.infolist()
        # Compressed members, and members that share their bytes, may be of any size.
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("its arrays are compressed, expected uncompressed ones")
        if sum(member.file_size for member in members) > size:
            raise ValueError("its arrays are larger than the file")
        self._archive = archive
        index = json.loads(self._array(INDEX).tobytes())
        if index["schema"] != SCHEMA:
            raise ValueError(f"has schema {index['schema']!r:.40}, expected {SCHEMA}; use the halfserve that wrote it")
        self.model = _text(index["model"])
        self.entries: list[dict[str, Any]] = list(index["requests"])

    def request(self, position: int) -> CapturedRequest:
        entry = self.entries[position]
        datatypes = {_text(tensor["name"]): BY_WIRE[tensor["datatype"]] for tensor in entry["inputs"]}
        return CapturedRequest(
            time_s=float(entry["time"]),
            model=self.model,
            version=int(entry["version"]),
            request_id=_text(entry["id"]),
            latency_ms=float(entry["latency_ms"]),
            status=_text(entry["status"]),
            parameters=dict(entry["parameters"]),
            inputs={
                name: _from_disk(self._array(f"{position}/{name}"), datatype, tensor["shape"])
                for tensor, (name, datatype) in zip(entry["inputs"], datatypes.items(), strict=True)
            },
            datatypes={name: datatype.wire for name, datatype in datatypes.items()},
        )

    def _array(self, name: str) -> Array:
        content = io.BytesIO(self._archive.read(f"{name}.npy"))
        array: Array = np.lib.format.read_array(content, allow_pickle=False)
        return array


@contextmanager
def _reading(path: Path) -> Iterator[_Shard | None]:
    """Open a shard; None if it has gone, as the oldest do while a server captures."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            yield _Shard(archive, os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        yield None
    except OSError as error:
        raise CapturedRequestsError(f"{path}: cannot be read: {error.strerror}") from None
    except DAMAGED as error:
        reason = f"{type(error).__name__}: {error}"
        raise CapturedRequestsError(f"{path}: is not a whole shard of captured requests ({reason}); remove it") from None


def _shards(folder: Path) -> list[Path]:
    """Shards of a capture, or of one model, or the shard itself."""
    if folder.is_file():
        return [folder]
    try:
        places = [folder, *(path for path in folder.iterdir() if path.is_dir())]
        return sorted(path for place in places for path in place.iterdir() if path.suffix == SUFFIX and path.is_file())
    except OSError as error:
        raise CapturedRequestsError(f"{error.filename or folder}: cannot be read: {error.strerror}; name a folder") from None


def _entry(request: CapturedRequest) -> dict[str, Any]:
    return {
        "time": request.time_s,
        "id": request.request_id,
        "version": request.version,
        "latency_ms": request.latency_ms,
        "status": request.status,
        "parameters": dict(request.parameters),
        "inputs": [
            {"name": name, "datatype": request.datatypes[name], "shape": list(array.shape)}
            for name, array in request.inputs.items()
        ],
    }


def _write_array(archive: zipfile.ZipFile, name: str, array: Array) -> None:
    archive.writestr(zipfile.ZipInfo(f"{name}.npy"), b"".join((_npy_header(array.dtype, array.shape), array.tobytes())))


@lru_cache(maxsize=256)  # most requests have the same few shapes, and numpy takes longer for a header than for a small array
def _npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    header = io.BytesIO()
    content = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, content)
    return header.getvalue()


def _to_disk(array: Array, datatype: Datatype) -> Array:
    if datatype.itemsize is None:
        elements = [element if isinstance(element, bytes) else str(element).encode() for element in array.ravel()]
        parts = [len(element).to_bytes(LENGTH_BYTES, "little") + element for element in elements]
        return np.frombuffer(b"".join(parts), np.uint8)
    if array.dtype != datatype.array_dtype:
        raise ValueError(f"has a tensor of {array.dtype}, expected {datatype.array_dtype} for {datatype.wire}")
    return np.ascontiguousarray(array).view("<u2") if datatype.numpy is None else array


def _from_disk(array: Array, datatype: Datatype, shape: Sequence[int]) -> Array:
    if datatype.itemsize is None:
        return bytes_elements(array.astype(np.uint8, casting="no", copy=False).tobytes(), shape)
    array = array.astype(datatype.numpy or "<u2", casting="no", copy=False)
    return array.view(datatype.array_dtype).reshape(shape)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"has {value!r:.40}, expected a text")
    return value
