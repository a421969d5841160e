"""The request cache: requests that differ only in id, sequence id and tensor bytes are parsed and checked once.

A request's bytes without its ids and raw contents are its skeleton. A request that matches a pattern of its length, byte for
byte outside ids and tensors, is not even split. The responses to requests of one skeleton are written from templates.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from halfserve.protos.inference_pb2 import ModelInferResponse
from halfserve.protos.request_parameters import SEQUENCE_ID
from halfserve.serve.engine.config.batching import Turn
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import Answer, Parameter, RemarkedAnswer
from halfserve.serve.engine.tensors import Array, RawLayout, Tensors
from halfserve.serve.protocol.codec import BYTES, RequestedOutput
from halfserve.serve.protocol.large_bytes import join_unlocked
from halfserve.serve.protocol.messages import SplitRequest, put_id, put_response, raw_tag, sequence_id
from halfserve.serve.protocol.raw_tensors import raw_view
from halfserve.serve.protocol.shared_memory import RegionBinding, RegionSlice, SharedMemory, put_slice

# Limit for all clients together; further requests are parsed.
MAX_CACHED: Final = 1024
MAX_SKELETON_BYTES: Final = 4096
MAX_PATTERNS_OF_A_LENGTH: Final = 4
MAX_SHAPES: Final = 64  # most output shapes with a template per cached request; a template has some hundred bytes
# Most classes in one response. Each takes 0.7 us and a hundred bytes, and a request of a hundred bytes can ask for millions.
MAX_NAMED: Final = 2**16
MAX_CLASSES: Final = 1_000_000  # most classes of one row, as in Triton: sorting them holds up other requests
MANY_CLASSES: Final = 4096  # number of classes from which partitioning is faster than sorting all


@dataclass(frozen=True, eq=False)
class CachedRequest:
    """The checked properties that all requests with one skeleton share."""

    model: Model  # the model to run
    layout: RawLayout | None  # layout of the raw contents; None if each request must be parsed
    outputs: tuple[str, ...]  # names of the requested outputs, in the order of the response
    rows: int  # size of the batch dimension
    bucket: Hashable  # requests of one bucket can share a batch
    turn: Turn  # priority and queue timeouts
    # Values by name. That of sequence_id is the first request's.
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    # Shared memory slice of each input, None for an input whose bytes are in the request; None if this holds for all inputs.
    input_slices: tuple[RegionSlice | None, ...] | None = None
    slices: tuple[RegionSlice, ...] = ()  # all shared memory slices, of inputs and outputs
    special: Mapping[str, RequestedOutput] = field(default_factory=dict)  # outputs that go to shared memory or are classified
    is_timed: bool = False  # whether responses have their times as parameters
    shared_bytes: int = field(init=False)  # total size of the inputs in shared memory
    takes_long: bool = field(init=False)  # whether responses may be slow to serialize: outputs are special or text
    responses: ResponseTemplates = field(init=False)
    binding: RegionBinding | None = field(init=False)  # where the slices lie in the registered regions; None without slices

    def __post_init__(self) -> None:
        texts = any(self.model.outputs[name].datatype.itemsize is None for name in self.outputs)
        object.__setattr__(self, "shared_bytes", sum(place.byte_size for place in self.input_slices or () if place is not None))
        object.__setattr__(self, "takes_long", bool(self.special) or texts)
        object.__setattr__(self, "responses", ResponseTemplates(self.model, self.rows, self.special))
        object.__setattr__(self, "binding", RegionBinding() if self.slices else None)

    def with_sequence(self, value: bytes) -> Mapping[str, Parameter]:
        """Return the parameters with another sequence id, given as a serialized InferParameter.

        Raises:
            InvalidArgumentError: it is malformed.
        """
        parameters = dict(self.parameters)
        key = sequence_id(value)
        if key is None:
            parameters.pop(SEQUENCE_ID, None)
        else:
            parameters[SEQUENCE_ID] = key
        return parameters

    def offsets(self, raw: list[tuple[int, int]]) -> tuple[int, ...] | None:
        """Return the offsets of the inputs, given (offset, size) of each raw entry; None if their number or sizes differ.

        Inputs in shared memory have offset 0.
        """
        layout = self.layout
        if layout is None:
            return None
        input_slices = self.input_slices or (None,) * len(layout.inputs)
        sent = [place for place, lies in enumerate(input_slices) if lies is None]
        if [size for _, size in raw] != [layout.inputs[place].size for place in sent]:
            return None
        offsets = [0] * len(input_slices)
        for place, (offset, _) in zip(sent, raw, strict=True):
            offsets[place] = offset
        return tuple(offsets)


@dataclass(frozen=True)
class RequestPattern:
    """A request with holes for ids and tensors; bytes that match outside the holes need no parsing."""

    cached: CachedRequest  # the cached request that matching requests share
    layout: RawLayout  # layout of the raw contents
    segments: tuple[tuple[int, bytes], ...]  # (offset, bytes) that must match
    offsets: tuple[int, ...]  # offsets of the inputs in the message
    id_start: int  # start of the id
    id_end: int  # end of the id; equal to the start without one
    sequence_start: int = 0  # start of the value of the parameter sequence_id
    sequence_end: int = 0  # end of that value; 0 without one

    def is_like(self, data: bytes | memoryview) -> bool:
        """Return whether `data`, of the pattern's length, matches."""
        for offset, segment in self.segments:
            end = offset + len(segment)
            # The comparison is written twice because mypyc compiles a slice of bytes alone to one call.
            if isinstance(data, bytes):
                if data[offset:end] != segment:
                    return False
            elif data[offset:end] != segment:
                return False
        return True


class RequestCache:
    def __init__(self) -> None:
        self._by_skeleton: dict[bytes, CachedRequest] = {}
        self._patterns: dict[int, list[RequestPattern]] = {}  # patterns by the length of the request
        self._pattern_count = 0

    def match(self, data: bytes | memoryview) -> RequestPattern | None:
        """Return the pattern that `data` matches."""
        for pattern in self._patterns.get(len(data), ()):
            if pattern.is_like(data):
                return pattern
        return None

    def find(self, cut: SplitRequest | None) -> CachedRequest | None:
        """Return the cached request with the skeleton of `cut`."""
        return None if cut is None else self._by_skeleton.get(cut.skeleton)

    def keep(self, cut: SplitRequest | None, cached: CachedRequest) -> None:
        """Cache a request if its skeleton is small and requests like it need no parsing."""
        if cut is None or cached.layout is None or len(cut.skeleton) > MAX_SKELETON_BYTES:
            return
        if len(self._by_skeleton) >= MAX_CACHED:
            self._by_skeleton.clear()
        self._by_skeleton[cut.skeleton] = cached

    def keep_pattern(self, data: bytes, cut: SplitRequest, cached: CachedRequest) -> None:
        """Add the pattern of a cached request."""
        offsets = cached.offsets(cut.raw)
        if cached.layout is None or offsets is None:
            return
        if self._pattern_count >= MAX_CACHED:
            self._patterns.clear()
            self._pattern_count = 0
        of_length = self._patterns.setdefault(len(data), [])
        if len(of_length) >= MAX_PATTERNS_OF_A_LENGTH:
            of_length.pop()
        else:
            self._pattern_count += 1
        holes = sorted([(cut.id_offset, len(cut.id)), cut.sequence, *cut.raw])
        segments, start = [], 0
        for offset, size in holes:
            if offset > start:
                segments.append((start, data[start:offset]))
            start = offset + size
        if start < len(data):
            segments.append((start, data[start:]))
        id_end, sequence_start = cut.id_offset + len(cut.id), cut.sequence[0]
        sequence_end = sequence_start + cut.sequence[1]
        pattern = RequestPattern(
            cached, cached.layout, tuple(segments), offsets, cut.id_offset, id_end, sequence_start, sequence_end
        )
        of_length.insert(0, pattern)

    def forget(self) -> None:
        """Clear the cache, because models have changed."""
        self._by_skeleton.clear()
        self._patterns.clear()
        self._pattern_count = 0


@dataclass(frozen=True)
class _RowsTemplate:
    """The fixed bytes of a response whose outputs are slices of the batch's."""

    head: bytes  # a message with the model's name and version
    # Per output: the bytes before its raw contents, its name, and the number of bytes of one row.
    outputs: tuple[tuple[bytes, str, int], ...]


class ResponseTemplates:
    """Serializes the responses to requests with one skeleton, from fixed bytes per combination of output shapes."""

    def __init__(self, model: Model, rows: int, special: Mapping[str, RequestedOutput]) -> None:
        self._model = model
        self._rows = rows
        self._special = special
        self._head = ModelInferResponse(model_name=model.name, model_version=str(model.version)).SerializeToString()
        self._entries: dict[tuple[tuple[tuple[int, ...], int], ...], bytes] = {}  # keys: shape and shared bytes of each output
        self._of_rows: dict[tuple[tuple[int, ...], ...], _RowsTemplate | None] = {}
        self._latest_shapes: tuple[tuple[int, ...], ...] | None = None  # shapes of the batch that `_latest` is for
        self._latest: _RowsTemplate | None = None

    def response(self, request_id: bytes, outputs: Tensors, memory: SharedMemory, since: int) -> bytes:
        """Serialize a response; an output in shared memory has an empty raw entry, and parameters with its slice.

        Args:
            request_id: the request's id in ASCII.
            outputs: the model's outputs for this request.
            memory: holds the regions of the outputs that are written to shared memory.
            since: see `SharedMemory.check`.

        Raises:
            InferenceError: an output does not fit its slice, or its region is gone.
        """
        if isinstance(outputs, Answer) and not self._special:
            template = self._template_of(outputs)
            if template is not None:
                parts: list[bytes | memoryview] = [template.head, put_id(request_id)] if request_id else [template.head]
                for tag, name, row_bytes in template.outputs:
                    parts.append(tag)
                    parts.append(outputs.raw(name, row_bytes))
                return join_unlocked(parts) if outputs.batch.is_large else b"".join(parts)
        raw: list[bytes | memoryview] = []
        key: list[tuple[tuple[int, ...], int]] = []
        for name, array in outputs.items():
            tensor, datatype, shared = self._model.outputs[name].to_client(array), self._model.outputs[name].datatype, 0
            special = self._special.get(name)
            if special is not None and special.classes is not None:
                labels, batched = self._model.labels_of(name), self._model.max_batch_size > 0
                tensor, datatype = classify(tensor, special.classes, labels, batched=batched), BYTES
            if special is None or special.place is None:
                raw.append(raw_view(tensor, datatype))
            else:
                view = raw_view(tensor, datatype)
                memory.write(special.place, view, since=since)
                raw.append(b"")
                shared = len(view)
            key.append((tensor.shape, shared))
        fixed = self._entries_of(tuple(outputs), tuple(key)) + parameters_of(outputs)
        return put_response(self._head, request_id, fixed, raw)

    def _entries_of(self, names: tuple[str, ...], key: tuple[tuple[tuple[int, ...], int], ...]) -> bytes:
        """Return a message with the entries of the outputs."""
        entries = self._entries.get(key)
        if entries is not None:
            return entries
        message = ModelInferResponse()
        for name, (shape, shared) in zip(names, key, strict=True):
            special = self._special.get(name)
            datatype = self._model.outputs[name].datatype if special is None or special.classes is None else BYTES
            entry = message.outputs.add(name=name, datatype=datatype.wire, shape=shape)
            if special is not None and special.place is not None:
                put_slice(entry.parameters, special.place, shared)
        entries = message.SerializeToString()
        if len(self._entries) < MAX_SHAPES:
            self._entries[key] = entries
        return entries

    def _template_of(self, outputs: Answer) -> _RowsTemplate | None:
        """Return the template for these shapes; None if `_learn_rows` makes none, or too many combinations have come."""
        shapes = outputs.batch.row_shapes
        if shapes is not self._latest_shapes:
            if shapes not in self._of_rows and len(self._of_rows) < MAX_SHAPES:
                self._of_rows[shapes] = self._learn_rows(outputs)
            self._latest_shapes, self._latest = shapes, self._of_rows.get(shapes)
        return self._latest

    def _learn_rows(self, outputs: Answer) -> _RowsTemplate | None:
        """Make a template; None if elements have no fixed size or the client's shape differs from the model's."""
        names = tuple(outputs)
        arrays = [outputs[name] for name in names]
        for name, array in zip(names, arrays, strict=True):
            spec = self._model.outputs[name]
            if spec.datatype.itemsize is None or spec.model_shape is not None or array.dtype != spec.datatype.numpy:
                return None
        tags = [raw_tag(array.nbytes) for array in arrays]
        # Protobuf fields may come in any order: the id, the entries of the outputs, then their bytes.
        tags[0] = self._entries_of(names, tuple((array.shape, 0) for array in arrays)) + tags[0]
        row_bytes = [array.nbytes // self._rows for array in arrays]
        return _RowsTemplate(self._head, tuple(zip(tags, names, row_bytes, strict=True)))


def parameters_of(outputs: Tensors) -> bytes:
    """Return the parameters of a response as a message to append to it: protobuf merges concatenated messages.

    See https://protobuf.dev/programming-guides/encoding/#last-one-wins.
    """
    if not isinstance(outputs, RemarkedAnswer):
        return b""
    message = ModelInferResponse()
    for name, value in outputs.parameters.items():
        put_parameter(message.parameters[name], value)
    return message.SerializeToString(deterministic=True)


def put_parameter(target: Any, value: Parameter) -> None:
    """Set an InferParameter, by the kind of the value; integers are int64, larger ones uint64."""
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int):
        if value < 2**63:
            target.int64_param = value
        else:
            target.uint64_param = value
    elif isinstance(value, float):
        target.double_param = value
    else:
        target.string_param = value


def classify(scores: Array, count: int, labels: Sequence[str], *, batched: bool) -> Array:
    """Name the best `count` classes as "value:index" or "value:index:label".

    Equal scores keep the order of their index; NaN comes last.

    Args:
        scores: numbers; all dimensions but the batch form one list of classes.
        count: number of classes to name, at least 1; a larger number than there are classes names all.
        labels: names of the classes by index; classes beyond the list have none.
        batched: whether the first dimension is the batch.

    Returns:
        An array of `bytes` objects of shape [rows, classes], or [classes] without a batch.

    Raises:
        InvalidArgumentError: more than MAX_NAMED classes are requested, or a row has more than MAX_CLASSES.
    """
    count_of_rows = scores.shape[0] if batched else 1
    rows = scores.reshape(count_of_rows, math.prod(scores.shape[batched:]))
    if rows.shape[1] > MAX_CLASSES:
        raise InvalidArgumentError(
            f"classification output tensor too large: it has {rows.shape[1]} classes, expected at most {MAX_CLASSES}; ask for "
            "the numbers"
        )
    named = count_of_rows * min(count, rows.shape[1])
    if named > MAX_NAMED:
        raise InvalidArgumentError(
            f"{named} classes are asked for, expected at most {MAX_NAMED}; ask for fewer, or the numbers"
        )
    # float64 holds smaller floats exactly, but not 64-bit integers. NaN is sorted to the end.
    with np.errstate(invalid="ignore"):  # signalling NaNs raise this warning
        # ml_dtypes' bfloat16 does not have numpy's kind "f".
        values = rows if rows.dtype.kind in "iub" else rows.astype(np.float64)
        falling = ~rows if rows.dtype.kind in "iu" else -values.astype(np.float64, copy=False)
    places = _smallest(falling, count)
    found = np.take_along_axis(values, places, axis=1).ravel().tolist()
    write = "{:.6f}".format if values.dtype.kind == "f" else str
    best = np.empty(places.size, object)
    best[:] = [_class_text(write(value), index, labels) for value, index in zip(found, places.ravel().tolist(), strict=True)]
    return best.reshape(places.shape) if batched else best


def _smallest(rows: Array, count: int) -> Array:
    if rows.shape[1] < max(MANY_CLASSES, 8 * count):
        return np.argsort(rows, axis=1, kind="stable")[:, :count]
    return np.array([_smallest_of_many(row, count) for row in rows], np.intp).reshape(len(rows), count)


def _smallest_of_many(row: Array, count: int) -> Array:
    last = np.partition(row, count - 1)[count - 1]
    # Among equal numbers at the boundary, lower indices come first.
    places = np.arange(len(row)) if last != last else np.flatnonzero(row <= last)  # noqa: PLR0124  (true for NaN alone)
    return places[np.argsort(row[places], kind="stable")][:count]


def _class_text(score: str, index: int, labels: Sequence[str]) -> bytes:
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{score}:{index}{label}".encode()
