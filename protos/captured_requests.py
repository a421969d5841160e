"""Captured requests on disk: what `serve --capture` writes, and `bench`, `convert`, `verify` and `export` read.

A capture is a folder with one folder per model. It holds numbered shards, FOLDER/MODEL/000001.npz, each written as a whole. A
shard is an uncompressed .npz file: `schema` has the schema's number, and the other arrays one value per request, but for
`messages`. That has the bytes of all requests, one after the other, as serialized ModelInferRequests; `end` says where each of
them ends. Tensors in shared memory are put into their message. A server takes messages apart only for its models, and
not for the capture: it would take ten times as long.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.inference_pb2 import ModelInferRequest

SCHEMA: Final = 1
COLUMNS: Final = ("time_s", "model", "version", "latency_ms", "status")  # fields of both classes of requests
LENGTH_BYTES: Final = 4  # before each element of BYTES
# Statuses of requests that may be valid: the server answered them, or had no time, room or caller for them.
USABLE: Final = frozenset({"OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})

Array: TypeAlias = np.ndarray[Any, Any]
Parameter: TypeAlias = bool | int | float | str


class CapturedRequestsError(Exception):
    """A capture cannot be read. The text says what is wrong, what was expected, and what to do."""


@dataclass(slots=True, eq=False)
class CapturedMessage:
    """A request that a server keeps until it has ended and is written to a shard.

    Attributes:
        data: the serialized ModelInferRequest, as its client sent it.
        copied: bytes of the inputs in shared memory, None for those that were sent; empty if all were.
        size: bytes to count for it in memory.
        others: see `CapturedRequest`.
    """

    data: bytes | memoryview
    copied: Sequence[bytes | None]
    size: int
    model: str
    version: int
    time_s: float
    latency_ms: float = 0.0
    status: str = ""


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

    @property
    def rows(self) -> int:
        """Largest first dimension of its tensors; at least 1."""
        return max((len(array) for array in self.inputs.values() if array.ndim), default=1) or 1

    @property
    def nbytes(self) -> int:
        """Size of its tensors, without the lengths of BYTES."""
        return sum(sum(map(len, array.flat)) if array.dtype == object else array.nbytes for array in self.inputs.values())


@dataclass(frozen=True, kw_only=True)
class SampledTraffic:
    """What certificates and reports say of the captured requests that were used.

    Attributes:
        model: Name of the model that they were captured of.
        versions: Its versions that answered them.
        requests: Count of requests that were used.
        left_out: Counts of other captured requests, by the reason.
        first_utc: Arrival of the first captured request in ISO 8601.
        last_utc: Arrival of the last one.
        shards: Count of files that hold them.
        shards_sha256: SHA-256 of the files' SHA-256 in hexadecimal, one a line, in the order of their names.
    """

    model: str
    versions: tuple[int, ...]
    requests: int
    left_out: dict[str, int] = field(default_factory=dict)
    first_utc: str
    last_utc: str
    shards: int
    shards_sha256: str

    @property
    def text(self) -> str:
        """A line for people."""
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        versions = f"version{'s' * (len(self.versions) > 1)} {', '.join(map(str, self.versions))}"
        return (
            f"the samples are {self.requests:,} captured requests of {self.model} {versions}, {self.first_utc} to "
            f"{self.last_utc}" + (f"; left out: {reasons}" if reasons else "")
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedTraffic:
    """Requests of one model, in the order of their arrival.

    Attributes:
        folder: the folder that was read.
        requests: requests within the limits, spread over all usable ones; at least one.
        times_s: float64 [usable], rising: arrival of each usable request, in seconds since 1970.
        summary: what was read, as if all of `requests` were used.
    """

    folder: Path
    requests: Sequence[CapturedRequest]
    times_s: np.ndarray[Any, np.dtype[np.float64]]
    summary: SampledTraffic

    def sampled(self, used: int, other: str = "that do not fit the model") -> SampledTraffic:
        """Say that `used` of the requests were used; `other` says which ones were not."""
        left_out = {other: len(self.requests) - used, **self.summary.left_out}
        return replace(self.summary, requests=used, left_out={reason: count for reason, count in left_out.items() if count})


def is_capture(path: Path) -> bool:
    """Return whether a path is a folder with shards, or with folders of shards."""
    return any(any(path.glob(pattern)) for pattern in ("*.npz", "*/*.npz"))


def read_capture(folder: Path, model: str = "") -> list[CapturedRequest]:
    """Read all captured requests of one model into memory, the earliest first; see `read_traffic`."""
    requests = [request for shard, _, _ in _shards(folder, model) for request in shard]
    return sorted(requests, key=lambda request: request.time_s)


def read_traffic(folder: Path, model: str = "", *, most_rows: int, most_bytes: int) -> CapturedTraffic:
    """Read the requests in a folder of a model, or in a capture of one model or with the given one.

    A capture may be larger than memory. Its shards are read one at a time; where the requests exceed a limit, every second one
    is left out, until they fit or a single one is left.

    Raises:
        CapturedRequestsError: there are no usable requests, they are of several models, or a shard cannot be used.
    """
    kept: list[CapturedRequest] = []
    times: list[float] = []
    digest, shards, refused, stride = hashlib.sha256(), 0, 0, 1
    for requests, unfit, sha256 in _shards(folder, model):
        digest.update(f"{sha256}\n".encode())
        shards += 1
        usable = [request for request in requests if request.status in USABLE]
        refused += unfit + len(requests) - len(usable)
        kept += usable[-len(times) % stride :: stride]
        times += [request.time_s for request in usable]
        while len(kept) > 1 and (
            sum(request.rows for request in kept) > most_rows or sum(request.nbytes for request in kept) > most_bytes
        ):
            kept, stride = kept[::2], stride * 2
    if not kept:
        raise CapturedRequestsError(
            f"{folder}: has no requests that the server took, and {refused} that it refused; capture others"
        )
    times_s = np.sort(np.asarray(times, np.float64))
    first, last = (datetime.fromtimestamp(float(times_s[at]), UTC).isoformat(timespec="seconds") for at in (0, -1))
    summary = SampledTraffic(
        model=kept[0].model,
        versions=tuple(sorted({request.version for request in kept})),
        requests=len(kept),
        left_out={"beyond the limit, spread over the time": len(times) - len(kept), "that the server refused": refused},
        first_utc=first,
        last_utc=last,
        shards=shards,
        shards_sha256=digest.hexdigest(),
    )
    requests = sorted(kept, key=lambda request: request.time_s)
    return CapturedTraffic(folder=folder, requests=requests, times_s=times_s, summary=summary)


def _shards(folder: Path, model: str) -> Iterator[tuple[list[CapturedRequest], int, str]]:
    """Yield the requests of each shard of a model, the number of unfit ones, and the shard's SHA-256 in hexadecimal."""
    try:
        places = [folder, *(path for path in folder.iterdir() if path.is_dir())]
        found = {place.name: shards for place in places if (shards := [p for p in place.iterdir() if p.suffix == ".npz"])}
    except OSError as error:
        raise CapturedRequestsError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None
    if not found:
        raise CapturedRequestsError(
            f"{folder}: has no captured requests, expected files such as MODEL/000001.npz; "
            "capture some with `halfserve serve ... --capture FOLDER`"
        )
    if len(found) > 1 and model not in found:
        names = ", ".join(map(repr, sorted(found)))
        raise CapturedRequestsError(f"{folder}: has requests of {names}, expected those of one model; name its folder")
    for path in sorted(found.get(model) or next(iter(found.values()))):
        try:
            content = path.read_bytes()
            requests, unfit = _requests(content)
        except FileNotFoundError:
            continue  # a server that captures has removed it as the oldest
        except OSError as error:
            raise CapturedRequestsError(f"{path}: cannot be read: {error.strerror}") from None
        except Exception as error:  # zipfile, numpy and protobuf raise anything for files that are not shards
            raise CapturedRequestsError(
                f"{path}: is not a whole shard of captured requests ({type(error).__name__}: {error}); move it elsewhere"
            ) from error
        yield requests, unfit, hashlib.sha256(content).hexdigest()


def _requests(shard: bytes) -> tuple[list[CapturedRequest], int]:
    """Return the requests of a shard, and the number of those whose tensors do not fit their shapes."""
    with np.load(io.BytesIO(shard), allow_pickle=False) as arrays:
        if (schema := arrays["schema"].item()) != SCHEMA:
            raise ValueError(f"has schema {schema!r:.40}, expected {SCHEMA}; use the halfserve that wrote it")
        data = arrays["messages"].tobytes()
        columns = [arrays[name].tolist() for name in COLUMNS]
        ends = arrays["end"].tolist()
    requests = list[CapturedRequest]()
    for start, end, values in zip([0, *ends[:-1]], ends, zip(*columns, strict=True), strict=True):
        message = ModelInferRequest.FromString(data[start:end])
        with suppress(ValueError, OverflowError):  # the server has refused it when it read the tensors
            requests.append(_request(message, dict(zip(COLUMNS, values, strict=True))))
    return requests, len(ends) - len(requests)


def _request(message: ModelInferRequest, values: dict[str, Any]) -> CapturedRequest:
    given_as = {name: parameter.WhichOneof("parameter_choice") for name, parameter in message.parameters.items()}
    raw = iter(message.raw_input_contents)
    return CapturedRequest(
        **values,
        request_id=message.id,
        parameters={name: getattr(message.parameters[name], kind) for name, kind in given_as.items() if kind},
        inputs={tensor.name: _array(tensor, raw) for tensor in message.inputs},
        datatypes={tensor.name: tensor.datatype for tensor in message.inputs},
    )


def _array(tensor: ModelInferRequest.InferInputTensor, raw: Iterator[bytes]) -> Array:
    """Return a tensor's elements. Raises ValueError or OverflowError: they do not fit its shape or datatype."""
    datatype, shape = BY_WIRE[tensor.datatype], tuple(tensor.shape)
    data = None if tensor.HasField("contents") else next(raw, b"")
    if data is None and datatype.contents is not None:
        values = list(getattr(tensor.contents, datatype.contents))
        array = np.empty(len(values), datatype.array_dtype)
        array[:] = values
        return array.reshape(shape)
    if datatype.itemsize is None:
        return _elements(data or b"", shape)
    if datatype.wire == "BOOL":  # any other byte than 0 is true
        return np.frombuffer(data or b"", np.uint8).astype(np.bool_).reshape(shape)
    return np.frombuffer(bytearray(data or b""), datatype.array_dtype).reshape(shape)


def _elements(data: bytes, shape: Sequence[int]) -> Array:
    """Return the elements of a BYTES tensor as an array of `bytes`. Raises ValueError: they do not fit the shape."""
    elements, position = list[bytes](), 0
    while position < len(data):
        start = position + LENGTH_BYTES
        position = start + int.from_bytes(data[position:start], "little")
        elements.append(data[start:position])
    if position != len(data) or len(elements) != math.prod(shape):
        raise ValueError(f"has {len(elements)} BYTES elements, expected {math.prod(shape)} whole ones")
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(tuple(shape))


def encode_shard(captured: Sequence[CapturedMessage]) -> bytes:
    """Return a shard of at least one message."""
    messages = [_with_copies(one) if one.copied else one.data for one in captured]
    arrays: dict[str, Any] = {name: np.array([getattr(one, name) for one in captured]) for name in COLUMNS}
    arrays["schema"] = np.array(SCHEMA)
    arrays["messages"] = np.frombuffer(b"".join(messages), np.uint8)
    arrays["end"] = np.cumsum([len(message) for message in messages])
    shard = io.BytesIO()
    np.savez(shard, **arrays)
    return shard.getvalue()


def _with_copies(captured: CapturedMessage) -> bytes:
    """Return the message of a request with its tensors that lay in shared memory."""
    message = ModelInferRequest.FromString(bytes(captured.data))
    sent = iter(list(message.raw_input_contents))
    is_typed = not message.raw_input_contents
    del message.raw_input_contents[:]
    for tensor, copy in zip(message.inputs, captured.copied, strict=True):
        if copy is None and is_typed:
            tensor.contents.SetInParent()  # an empty tensor may lack the field
        else:
            message.raw_input_contents.append(next(sent) if copy is None else copy)
    return message.SerializeToString()
