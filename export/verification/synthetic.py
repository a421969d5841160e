"""Inputs for a model that came without samples, from what its graph says about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from export.errors import ExportError
from export.files.model_file import ModelFile, ModelSource, open_model
from export.verification.interface import Input, inputs_of
from export.verification.metrics import Array

BATCH = 2
SPATIAL = 32
LENGTH = 16
LARGEST_INDEX = 8
SEED = 0
# Values pass through these on their way to a table, unchanged or only rearranged.
_CARRIERS = frozenset(
    {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Slice", "Gather", "Concat"}
)


def synthesize(model: ModelSource | ModelFile, *, dims: Mapping[str, int] | None = None, seed: int = SEED) -> list[Array]:
    """Make one batch of inputs, in the model's order.

    Floats are normally distributed. Integers that index a table (Gather, an embedding) stay within it, other ones are 0 to 7;
    those whose name says mask, and booleans, are ones; positions count up. Sizes that are not fixed are 2 for the first
    dimension, 32 for the others of images (rank 4 and more) and 16 for the rest, unless `dims` says otherwise.

    Args:
        model: The model, in float32 or float16.
        dims: Sizes by the dimension's name, or by `INPUT.AXIS`, such as `{"sequence": 128, "image.2": 640}`.
        seed: Of the random numbers.

    Raises:
        ExportError: `dims` names a dimension that no input has, an input has no shape or a type that cannot be made up, or does
            not fit in memory.
    """
    graph = (model if isinstance(model, ModelFile) else open_model(model)).outline.graph
    wanted = inputs_of(onnx.ModelProto(graph=onnx.GraphProto(input=graph.input, initializer=_names_only(graph))))
    dims = dims or {}
    _require_known(wanted, dims)
    limits = dict(_index_limits(graph))
    generator = np.random.default_rng(seed)
    return [_made(value, _shape(value, dims), limits.get(value.name), generator) for value in wanted]


def _names_only(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    return (onnx.TensorProto(name=tensor.name) for tensor in graph.initializer)


def _require_known(wanted: list[Input], dims: Mapping[str, int]) -> None:
    known = {key for value in wanted for axis, dim in enumerate(value.dims or ()) for key in _keys(value, axis, dim)}
    for name, size in dims.items():
        if name not in known:
            raise ExportError(f"no input has a dimension {name!r}; there are {', '.join(sorted(known)) or 'none that vary'}")
        if size < 1:
            raise ExportError(f"dimension {name!r} is {size}; expected at least 1")


def _keys(value: Input, axis: int, dim: int | str | None) -> list[str]:
    if isinstance(dim, int) and dim > 0:
        return []
    return [f"{value.name}.{axis}", *([dim] if isinstance(dim, str) else [])]


def _shape(value: Input, dims: Mapping[str, int]) -> list[int]:
    if value.dims is None:
        raise ExportError(f"input {value.name!r} declares no shape, so none can be made up; give samples")
    return [_size(value, axis, dim, dims) for axis, dim in enumerate(value.dims)]


def _size(value: Input, axis: int, dim: int | str | None, dims: Mapping[str, int]) -> int:
    if isinstance(dim, int) and dim > 0:
        return dim
    asked = next((dims[key] for key in _keys(value, axis, dim) if key in dims), None)
    if asked is not None:
        return asked
    if axis == 0:
        return BATCH
    return SPATIAL if len(value.dims or ()) >= 4 and axis >= 2 else LENGTH


def _made(value: Input, shape: list[int], limit: int | None, generator: np.random.Generator) -> Array:
    try:
        return _values(value, shape, limit, generator)
    except (MemoryError, OverflowError, ValueError) as error:  # numpy's ValueError: more elements than it can count
        raise ExportError(f"input {value.name!r} of shape {shape} does not fit in memory; ask for smaller sizes") from error


def _values(value: Input, shape: list[int], limit: int | None, generator: np.random.Generator) -> Array:
    if value.floating:
        return generator.standard_normal(shape).astype(value.dtype)
    named = value.name.lower()
    if value.dtype == np.bool_ or ("mask" in named and np.issubdtype(value.dtype, np.integer)):
        return np.ones(shape, value.dtype)
    if value.elem_type == onnx.TensorProto.BFLOAT16:  # samples would not help: ONNX Runtime takes none from numpy
        raise ExportError(f"input {value.name!r} is {value}, which cannot be verified: export the model again, in float32")
    if not np.issubdtype(value.dtype, np.integer):
        raise ExportError(f"input {value.name!r} is {value}; values for it cannot be made up: give samples")
    if "token_type" in named or "segment" in named:
        return np.zeros(shape, value.dtype)
    if "position" in named and shape:
        return np.broadcast_to(np.arange(shape[-1]), shape).astype(value.dtype)
    return generator.integers(0, limit or LARGEST_INDEX, shape).astype(value.dtype)


def _index_limits(graph: onnx.GraphProto) -> Iterator[tuple[str, int]]:
    """For each integer input that indexes tables: the size of the smallest."""
    rows = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    consumers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    for value in graph.input:
        sizes = list(_tables(value.name, consumers, rows, set()))
        if sizes:
            yield value.name, min(sizes)


def _tables(
    name: str, consumers: Mapping[str, list[onnx.NodeProto]], rows: Mapping[str, list[int]], seen: set[str]
) -> Iterator[int]:
    if name in seen:
        return
    seen.add(name)
    for node in consumers.get(name, ()):
        if node.op_type == "Gather" and len(node.input) > 1 and node.input[1] == name and node.input[0] in rows:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            yield max(1, rows[node.input[0]][axis])
        elif node.op_type in _CARRIERS and node.input[0] == name:
            yield from _tables(node.output[0], consumers, rows, seen)
