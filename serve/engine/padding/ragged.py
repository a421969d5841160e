"""Ragged batches, as Triton defines them: inputs of different shapes joined end to end, for models that are made for that.

The model learns where each request begins from further inputs, which are made here (`batch_input`). Outputs may be split by
the shapes of an input (`batch_output`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from halfserve.protos.datatypes import BY_CONFIG
from halfserve.protos.model_config_pb2 import BatchInput as DeclaredInput
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.errors import BackendError, ModelLoadError
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors, TensorSpec

Shape = tuple[int, ...]
MADE_TYPES = ("INT32", "FP32")  # as in Triton
# Features that take the rows of a batch apart, or add some.
UNSUITED = ("halfserve.padding", "halfserve.pad_to_preferred", "halfserve.fp32_twin")


@dataclass(frozen=True, kw_only=True)
class BatchInput:
    """An input that is made from the shapes of a batch's requests.

    Attributes:
        names: the model's inputs that get it.
        source: the input whose shapes it is made from.
        make: makes its value from the shapes of the source, one per request, each beginning with the rows.
        dtype: dtype of its elements.
    """

    names: tuple[str, ...]
    source: str
    make: Callable[[Sequence[Shape]], Array]
    dtype: np.dtype[Any]


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Joins the requests of a model into ragged batches, and splits the outputs.

    Attributes:
        inputs: inputs that are joined end to end, as one dimension.
        made: the further inputs.
        scattered: outputs that are split by the shapes of an input: their own dims, without the rows, and that input.
    """

    inputs: frozenset[str]
    made: tuple[BatchInput, ...] = ()
    scattered: Mapping[str, tuple[Shape, str]]

    def bucket(self, shapes: Mapping[str, Shape]) -> Hashable:
        """Return a bucket, equal for requests that may share a batch, from their inputs' shapes without the rows, in the
        model's order.
        """
        return tuple([None if name in self.inputs else shape for name, shape in shapes.items()])

    def joined(self, requests: Sequence[InferRequest], name: str, dtype: np.dtype[Any]) -> Array:
        """Return all elements of one ragged input of the requests, in order, in one dimension.

        Raises:
            InferenceError: bytes in shared memory cannot be read.
        """
        parts = [request.inputs[name].ravel() for request in requests]
        return np.concatenate(parts, dtype=dtype, casting="unsafe")

    def made_inputs(self, requests: Sequence[InferRequest]) -> dict[str, Array]:
        """Make the inputs that describe the batch."""
        values: dict[str, Array] = {}
        for made in self.made:
            value = made.make([request.inputs[made.source].shape for request in requests]).astype(made.dtype)
            values.update(dict.fromkeys(made.names, value))
        return values

    def answers(self, outputs: Tensors, requests: Sequence[InferRequest]) -> list[Tensors]:
        """Return each request's part of every output, as views.

        Raises:
            BackendError: an output has another size than these requests' parts together.
        """
        found: list[dict[str, Array]] = [{} for _ in requests]
        rows = sum(request.rows for request in requests)
        for name, array in outputs.items():
            shapes = [self._shape(name, array, request) for request in requests]
            scattered = name in self.scattered
            flat = array.reshape(-1) if scattered else array
            expected = sum(map(math.prod, shapes)) if scattered else rows
            if flat.ndim == 0 or len(flat) != expected:
                what = "elements, as many as its requests" if scattered else "rows, one per row of the batch"
                raise BackendError(f"output {name!r} has shape {list(array.shape)}, expected {expected} {what}")
            start = 0
            for answer, shape in zip(found, shapes, strict=True):
                end = start + (math.prod(shape) if scattered else shape[0])
                answer[name] = flat[start:end].reshape(shape)
                start = end
        return [{name: answer[name] for name in request.outputs} for answer, request in zip(found, requests, strict=True)]

    def _shape(self, name: str, array: Array, request: InferRequest) -> Shape:
        if name not in self.scattered:
            return (request.rows, *array.shape[1:])
        dims, source = self.scattered[name]
        given = request.inputs[source].shape[1:]
        return (request.rows, *(given[place] if size == ANY_SIZE else size for place, size in enumerate(dims)))


def _element_counts(shapes: Sequence[Shape]) -> Array:
    """Return the number of elements of each request, as int64 [requests]."""
    return np.array([math.prod(shape) for shape in shapes], np.int64)


def _element_ends(shapes: Sequence[Shape]) -> Array:
    """Return the end of each request among all elements, as int64 [requests]."""
    return np.cumsum(_element_counts(shapes), dtype=np.int64)


def _row_shapes(shapes: Sequence[Shape]) -> Array:
    """Return the shape of each row without the batch dimension, as int64 [rows, dimensions]."""
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])], np.int64)


# The value of a made input from the shapes of its source, by the kind that a configuration gives.
MAKERS: dict[int, Callable[[Sequence[Shape]], Array]] = {
    DeclaredInput.BATCH_ELEMENT_COUNT: _element_counts,
    DeclaredInput.BATCH_ACCUMULATED_ELEMENT_COUNT: _element_ends,
    DeclaredInput.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: lambda shapes: np.concatenate([[0], _element_ends(shapes)]),
    DeclaredInput.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE: lambda shapes: np.zeros(int(_element_counts(shapes).max()), np.int64),
    DeclaredInput.BATCH_ITEM_SHAPE: _row_shapes,
    DeclaredInput.BATCH_ITEM_SHAPE_FLATTEN: lambda shapes: _row_shapes(shapes).ravel(),
}


def read_ragged(config: ModelConfig, interface: ModelInterface, where: str) -> Ragged | None:
    """Read how a model's ragged batches are formed; None if its declared configuration asks for none.

    Raises:
        ModelLoadError: a setting contradicts another one or the model, or is not supported.
    """
    ragged = [entry.name for entry in config.input if entry.allow_ragged_batch]
    if not (ragged or config.batch_input or config.batch_output):
        return None
    if config.max_batch_size < 1:
        raise ModelLoadError(f"{where}: a ragged batch needs a max_batch_size of 1 or more; set it, and dims without the batch")
    shapes = {spec.name: spec.shape for spec in interface.inputs}
    for name in ragged:
        if shapes.get(name, (ANY_SIZE,)) != (ANY_SIZE,):
            raise ModelLoadError(
                f"{where}: input {name!r} has allow_ragged_batch, but the model takes {list(shapes[name])}; expected [-1], one "
                "dimension in which requests are joined. To pad requests instead, set halfserve.padding"
            )
    unsuited = [key for key in UNSUITED if key in config.parameters]
    if unsuited:
        raise ModelLoadError(f"{where}: parameter {unsuited[0]!r} does not go with ragged batches; remove one of them")
    sources = {entry.name for entry in config.input}
    specs = {spec.name: spec for spec in interface.inputs}
    made = tuple(_made(declared, sources, specs, f"{where}: batch_input") for declared in config.batch_input)
    scattered = {}
    for declared in config.batch_output:
        source = _one_source(declared.source_input, sources, f"{where}: batch_output")
        for name in declared.target_name:
            dims = next((tuple(entry.dims) for entry in config.output if entry.name == name), None)
            given = next(len(entry.dims) for entry in config.input if entry.name == source)
            if dims is None:
                raise ModelLoadError(f"{where}: batch_output names {name!r}, which is not among the outputs; add it there")
            if any(size == ANY_SIZE and place >= given for place, size in enumerate(dims)):
                raise ModelLoadError(
                    f"{where}: batch_output {name!r} has dims {list(dims)}, whose open sizes come from {source!r} with {given}"
                )
            scattered[name] = (dims, source)
    return Ragged(inputs=frozenset(ragged), made=made, scattered=scattered)


def ragged_interface(config: ModelConfig, interface: ModelInterface, ragged: Ragged | None) -> ModelInterface:
    """Return the interface that requests see: ragged inputs have their rows, and inputs that the server makes are left out."""
    if ragged is None:
        return interface
    made = {name for one in ragged.made for name in one.names}
    dims = {entry.name: tuple(entry.dims) for entry in config.input}
    dims.update({entry.name: tuple(entry.dims) for entry in config.output})

    def shown(spec: TensorSpec) -> TensorSpec:
        own = spec.name in ragged.inputs or spec.name in ragged.scattered
        return replace(spec, shape=(ANY_SIZE, *dims[spec.name])) if own else spec

    return replace(
        interface,
        inputs=tuple(shown(spec) for spec in interface.inputs if spec.name not in made),
        outputs=tuple(shown(spec) for spec in interface.outputs),
    )


def _made(declared: DeclaredInput, sources: set[str], specs: dict[str, TensorSpec], where: str) -> BatchInput:
    source = _one_source(declared.source_input, sources, where)
    wire = BY_CONFIG[declared.data_type].wire if declared.data_type in BY_CONFIG else ""
    if wire not in MADE_TYPES:
        raise ModelLoadError(f"{where} of {source!r} has data_type {wire or 'none'}, expected TYPE_INT32 or TYPE_FP32")
    if declared.kind not in MAKERS:
        raise ModelLoadError(f"{where} of {source!r} has an unknown kind {declared.kind}")
    if not declared.target_name:
        raise ModelLoadError(f"{where} of {source!r} has no target_name, expected the model's input that gets it")
    for name in declared.target_name:
        if name not in specs:
            raise ModelLoadError(f"{where} names the input {name!r}, the model's are {', '.join(map(repr, specs))}")
        if name in sources:
            raise ModelLoadError(f"{where} names {name!r}, which is also among the inputs that clients send; remove one")
        if specs[name].datatype.wire != wire:
            raise ModelLoadError(f"{where} {name!r} has {wire}, the model takes {specs[name].datatype.wire}")
    dtype = BY_CONFIG[declared.data_type].array_dtype
    return BatchInput(names=tuple(declared.target_name), source=source, make=MAKERS[declared.kind], dtype=dtype)


def _one_source(names: Iterable[str], sources: set[str], where: str) -> str:
    given = list(names)
    if len(given) != 1 or given[0] not in sources:
        known = ", ".join(map(repr, sorted(sources))) or "none"
        raise ModelLoadError(f"{where} has source_input {given}, expected one of the inputs in the configuration: {known}")
    return given[0]
