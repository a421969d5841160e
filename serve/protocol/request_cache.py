"""The request cache: requests that differ only in id, sequence id and tensor bytes are parsed and checked once.

A request's bytes without its ids and raw contents are its skeleton. A request that matches a pattern of its length, byte for
byte outside ids and tensors, is not even split. The responses to requests of one skeleton are written from templates.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from halfserve.protos.inference_pb2 import ModelInferResponse
from halfserve.protos.request_parameters import SEQUENCE_ID
from halfserve.serve.engine.config.batching import Turn
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import Answer, Parameter, RemarkedAnswer
from halfserve.serve.engine.tensors import RawLayout, Tensors
from halfserve.serve.protocol.classification import classify
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
    shared_bytes: int = field(init=False)  # total size of the inputs in shared memory
    takes_long: bool = field(init=False)  # whether responses may be slow to serialize: outputs are special or text
    responses: ResponseTemplates = field(init=False)
    binding: RegionBinding = field(init=False)  # where the slices lie in the registered regions

    def __post_init__(self) -> None:
        texts = any(self.model.outputs[name].datatype.itemsize is None for name in self.outputs)
        object.__setattr__(self, "shared_bytes", sum(place.byte_size for place in self.input_slices or () if place is not None))
        object.__setattr__(self, "takes_long", bool(self.special) or texts)
        object.__setattr__(self, "responses", ResponseTemplates(self.model, self.rows, self.special))
        object.__setattr__(self, "binding", RegionBinding())

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
