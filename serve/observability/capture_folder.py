"""The folder of captured requests: writes shards, and deletes the oldest ones where the folder would exceed its bound.

Several processes may share the folder: each writes under a lock. Only the constructor runs on the event loop's thread.
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from halfserve.protos.captured_requests import CapturedRequest, bytes_elements, write_shard
from halfserve.protos.datatypes import BY_WIRE, Datatype
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.engine.errors import FailedPreconditionError
from halfserve.serve.engine.tensors import Array
from halfserve.serve.observability.inference_record import CapturedMessage

logger = logging.getLogger(__name__)

MARKER: Final = ".halfserve-capture"  # its lock is held while a shard is written; only folders with it are deleted from
PRIVATE: Final = 0o700  # mode of the folders: the tensors are the data of users
SHARD: Final = re.compile(r"(\d{6,})\.npz")
UNFINISHED: Final = re.compile(r"\.\d{6,}\.npz\.\w+\.tmp")  # what a killed process leaves
ENTRY_BYTES: Final = 1024  # room in a shard for a request's entry and the headers of its arrays
FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 60.0


class EndedRequest(NamedTuple):
    """A captured request that has ended; see `CapturedRequest` for the fields."""

    message: CapturedMessage
    model: str
    version: int
    time_s: float
    latency_ms: float
    status: str


class CaptureFolder:
    """Writes the requests of one process.

    Attributes:
        captured: number of requests on the disk.
        failed: number of requests that were lost because the disk could not be written.
        malformed: number of requests whose tensors did not fit their declaration, or the folder.
        freed_bytes: size of all requests that were given to `write`, whether they were written or not.
        size: bytes of all shards in the folder, as of the last write.
    """

    def __init__(self, path: Path, max_bytes: int, *, first_retry_s: float = FIRST_RETRY_S) -> None:
        """Make the folder if it is missing. After a failure the disk is left alone for `first_retry_s`, then twice as long.

        Raises:
            FailedPreconditionError: it cannot be written, or has files that are no capture.
        """
        self._path = path
        self._max_bytes = max_bytes
        self.captured = self.failed = self.malformed = self.freed_bytes = self.size = 0
        self._retry_at_s = 0.0
        self._first_retry_s = self._retry_s = first_retry_s
        self._is_failing = False
        try:
            path.mkdir(PRIVATE, parents=True, exist_ok=True)
            others = [entry.name for entry in path.iterdir() if entry.name != MARKER]
            if others and not (path / MARKER).exists():
                raise FailedPreconditionError(
                    f"requests cannot be captured in {path}: it has other files, such as {min(others)!r}; expected a new "
                    "or empty folder, or that of an earlier capture"
                )
            (path / MARKER).touch(0o600)
            with self._alone():
                self.size = sum(size for _, _, size in self._shards())
        except OSError as error:
            raise FailedPreconditionError(
                f"requests cannot be captured in {path}: {error.strerror}; choose a folder that this user can write"
            ) from None

    def write(self, requests: Sequence[EndedRequest]) -> None:
        """Write one shard per model. Requests are counted as failed where the disk cannot be written."""
        by_model: dict[str, list[EndedRequest]] = {}
        for request in requests:
            by_model.setdefault(request.model, []).append(request)
        for model, group in by_model.items():
            try:
                self._write_shard(model, group)
            except OSError as error:
                self.failed += len(group)
                self._note_failure(error)
            finally:
                self.freed_bytes += sum(request.message.size for request in group)

    def _write_shard(self, model: str, group: list[EndedRequest]) -> None:
        if time.monotonic() < self._retry_at_s:
            self.failed += len(group)
            return
        decoded = [request for request in map(_decoded, group) if request is not None]
        size = sum(_size(request) for request in decoded)
        if size > self._max_bytes:
            decoded = []
        if decoded:
            with self._alone():
                self._write_alone(model, decoded, size)
        self.captured += len(decoded)
        self.malformed += len(group) - len(decoded)
        if self._is_failing:
            logger.warning("requests are captured in %s again", self._path)
            self._is_failing, self._retry_s = False, self._first_retry_s

    def _write_alone(self, model: str, requests: list[CapturedRequest], size: int) -> None:
        shards = sorted(self._shards())
        number = shards[-1][0] + 1 if shards else 1
        shards = self._shrink(shards, self._max_bytes - size)
        folder = self._path / model
        folder.mkdir(PRIVATE, exist_ok=True)
        path = folder / f"{number:06d}.npz"
        write_shard(path, model, requests)
        self.size = sum(size for _, _, size in shards) + path.stat().st_size

    def _shrink(self, shards: list[tuple[int, Path, int]], room: int) -> list[tuple[int, Path, int]]:
        """Delete the shards with the lowest numbers, which are the oldest, until the others fit into `room` bytes."""
        total, kept = sum(size for _, _, size in shards), 0
        while total > room:
            _, path, size = shards[kept]
            path.unlink(missing_ok=True)
            total, kept = total - size, kept + 1
        return shards[kept:]

    def _shards(self) -> Iterator[tuple[int, Path, int]]:
        """Number, path and size of each shard of all models; files that a killed process left are deleted."""
        for folder in self._path.iterdir():
            for path in folder.iterdir() if folder.is_dir() else ():
                if match := SHARD.fullmatch(path.name):
                    yield int(match[1]), path, path.stat().st_size
                elif UNFINISHED.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder's lock, which ends with the process too."""
        with (self._path / MARKER).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _note_failure(self, error: OSError) -> None:
        if not self._is_failing:
            logger.warning(
                "requests cannot be captured in %s: %s; they are answered, but not captured until it can be written",
                self._path,
                error.strerror,
            )
        self._is_failing = True
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)


def _decoded(request: EndedRequest) -> CapturedRequest | None:
    """Return a request with its tensors; None if they do not fit their declaration."""
    inputs: dict[str, Array] = {}
    try:
        message = ModelInferRequest.FromString(bytes(request.message.data))
        copied = request.message.copied or [None] * len(message.inputs)
        raw = iter(message.raw_input_contents)
        for tensor, given in zip(message.inputs, copied, strict=True):
            data = next(raw) if given is None and message.raw_input_contents else given
            inputs[tensor.name] = _array(tensor, BY_WIRE[tensor.datatype], data)
    except (ValueError, OverflowError, LookupError, AttributeError, StopIteration, DecodeError):
        return None
    given_as = {name: parameter.WhichOneof("parameter_choice") for name, parameter in message.parameters.items()}
    return CapturedRequest(
        time_s=request.time_s,
        model=request.model,
        version=request.version,
        request_id=message.id,
        latency_ms=request.latency_ms,
        status=request.status,
        parameters={name: getattr(message.parameters[name], kind) for name, kind in given_as.items() if kind},
        inputs=inputs,
        datatypes={tensor.name: tensor.datatype for tensor in message.inputs},
    )


def _array(tensor: ModelInferRequest.InferInputTensor, datatype: Datatype, data: bytes | None) -> Array:
    """Return a tensor, from its bytes or, for None, from its typed contents."""
    shape = tuple(tensor.shape)
    if data is None:
        values: Any = getattr(tensor.contents, datatype.contents or "")
        array = np.empty(len(values), datatype.numpy)
        array[:] = values
        return array.reshape(shape)
    if datatype.itemsize is None:
        return bytes_elements(data, shape)
    if datatype.wire == "BOOL":
        return np.frombuffer(data, np.uint8).astype(np.bool_).reshape(shape)
    return np.frombuffer(data, datatype.array_dtype).reshape(shape)


def _size(request: CapturedRequest) -> int:
    """Upper limit of the bytes that a request takes in a shard."""
    size = ENTRY_BYTES + 6 * len(request.request_id)  # JSON writes a character in 6 bytes at most
    if request.parameters:
        size += len(json.dumps(dict(request.parameters)))
    for name, array in request.inputs.items():
        size += ENTRY_BYTES + 4 * len(name)
        size += sum(len(element) + 4 for element in array.ravel()) if array.dtype.hasobject else array.nbytes
    return size
