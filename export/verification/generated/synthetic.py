"""Samples generated from a model's declared inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import ModelFile, ModelSource, open_model
from halfserve.export.verification.samples import Array, Feed, Input, SampleSet, inputs_of, is_batched
from halfserve.export.verification.sandbox import Sandbox, at_first_level, on_disk

BATCH = 2
SPATIAL = 32
LENGTH = 16
LARGEST_INDEX = 8
SYNTHETIC_SEED = 0
SYNTHETIC_ROWS = 32
# Bounds of what these rows may cost. The float32 model's run is about a sixth of a verification, and a verdict takes some ten
# arrays of float64 as large as the outputs of all rows.
MOST_SECONDS = 10.0
MOST_NUMBERS = 1 << 24
# Indices pass through these operators unchanged or rearranged.
_CARRIERS = frozenset(
    {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Slice", "Gather", "Concat"}
)


def synthetic_samples(model: ModelSource | ModelFile, *, dims: Mapping[str, int] | None = None) -> SampleSet:
    """Generate samples from a model's declared inputs, in batches that `synthesize` makes, which may be as small as 2 rows.

    There are at least 32 rows, or as many batches for a model without a batch dimension. A model whose outputs would hold too
    many numbers, or that takes too long, gets fewer: as many as fit, and one batch at least. The note states the number of rows
    and what they cannot show. To see what a row costs, the float32 model runs on one batch, in a child process.

    Raises:
        ExportError: As `synthesize`.
    """
    opened = model if isinstance(model, ModelFile) else open_model(model)
    wanted = inputs_of(opened.outline)
    first = _batch(opened, wanted, dims, SYNTHETIC_SEED)
    size = next((len(array) for array in first.values()), 1) if is_batched(wanted) else 1
    count = max(1, math.ceil(SYNTHETIC_ROWS / size)) if wanted else 1
    fitting, reason = _affordable(opened, first, count) if count > 1 else (count, "")
    batches = [first, *(_batch(opened, wanted, dims, SYNTHETIC_SEED + number) for number in range(1, fitting))]
    rows = fitting * size
    fewer = f" and not {SYNTHETIC_ROWS}, since {reason}" if fitting < count else ""
    note = (
        f"the inputs are {rows} made-up rows{fewer}: random numbers, which show rounding and overflow at their own magnitude. "
        "They cannot show how large numbers become inside the model on real data, nor how often its classes change there "
        "(near-ties are not judged); give samples (--samples) for a verdict on your own"
    )
    return SampleSet(inputs=batches, note=note, made_up=True)


def _batch(model: ModelFile, wanted: Sequence[Input], dims: Mapping[str, int] | None, seed: int) -> Feed:
    return dict(zip((value.name for value in wanted), synthesize(model, dims=dims, seed=seed), strict=True))


def _affordable(model: ModelFile, feed: Feed, count: int) -> tuple[int, str]:
    """Return how many such batches, at most `count`, stay within the bounds, and the reason where these are fewer."""
    with Sandbox() as sandbox:
        try:
            answer = at_first_level(on_disk(model, sandbox), sandbox, sandbox.stage([feed]))
        except ExportError:  # the verification says why
            return count, ""
    values = [value for batch in answer.batches if not isinstance(batch, str) for value in batch]
    arrays = [array for value in values for array in (value if isinstance(value, list) else [value]) if array is not None]
    numbers = max(1, sum(array.size for array in arrays))
    by_seconds, by_numbers = (max(1, int(most)) for most in (MOST_SECONDS / max(answer.seconds, 1e-9), MOST_NUMBERS / numbers))
    if by_seconds < min(by_numbers, count):
        return by_seconds, f"the float32 model takes {answer.seconds:.1f} s for a batch"
    return min(by_numbers, count), f"the outputs of a batch hold {numbers:,} numbers"


def synthesize(
    model: ModelSource | ModelFile, *, dims: Mapping[str, int] | None = None, seed: int = SYNTHETIC_SEED
) -> list[Array]:
    """Generate one batch of inputs, in the model's order.

    Floats are normally distributed. Integers that index a table (Gather, an embedding) stay within it, others are 0 to 7;
    booleans and inputs named "mask" are ones; positions count up. Dynamic sizes are 2 for the first dimension, 32 for the
    spatial dimensions of images (rank 4 and more) and 16 for the rest, unless `dims` gives another size.

    Args:
        model: The model, in float32 or float16.
        dims: Sizes by the dimension's name, or by `INPUT.AXIS`, such as `{"sequence": 128, "image.2": 640}`.
        seed: Seed of the random numbers.

    Raises:
        ExportError: `dims` names an unknown dimension, an input has no shape or an unsupported type, or it does not fit in
            memory.
    """
    graph = (model if isinstance(model, ModelFile) else open_model(model)).outline.graph
    names = [onnx.TensorProto(name=tensor.name) for tensor in graph.initializer]
    wanted = inputs_of(onnx.ModelProto(graph=onnx.GraphProto(input=graph.input, initializer=names)))
    dims = dims or {}
    _require_known(wanted, dims)
    limits = dict(_index_limits(graph))
    generator = np.random.default_rng(seed)
    return [_made(value, _shape(value, dims), limits.get(value.name), generator) for value in wanted]


def _require_known(wanted: list[Input], dims: Mapping[str, int]) -> None:
    known = {key for value in wanted for axis in range(len(value.dims or ())) for key in value.keys(axis)}
    for name, size in dims.items():
        if name not in known:
            raise ExportError(f"no input has a dimension {name!r}; there are {', '.join(sorted(known)) or 'none that vary'}")
        if size < 1:
            raise ExportError(f"dimension {name!r} is {size}; expected at least 1")


def _shape(value: Input, dims: Mapping[str, int]) -> list[int]:
    if value.dims is None:
        raise ExportError(f"input {value.name!r} declares no shape, so samples cannot be generated; give samples")
    return [_size(value, axis, dim, dims) for axis, dim in enumerate(value.dims)]


def _size(value: Input, axis: int, dim: int | str | None, dims: Mapping[str, int]) -> int:
    if isinstance(dim, int) and dim > 0:
        return dim
    chosen = next((dims[key] for key in value.keys(axis) if key in dims), None)
    if chosen is not None:
        return chosen
    if axis == 0:
        return BATCH
    return SPATIAL if len(value.dims or ()) >= 4 and axis >= 2 else LENGTH


def _made(value: Input, shape: list[int], limit: int | None, generator: np.random.Generator) -> Array:
    try:
        return _values(value, shape, limit, generator)
    except (MemoryError, OverflowError, ValueError) as error:  # as above
        raise ExportError(f"input {value.name!r} of shape {shape} does not fit in memory; ask for smaller sizes") from error


def _values(value: Input, shape: list[int], limit: int | None, generator: np.random.Generator) -> Array:
    if value.elem_type == onnx.TensorProto.BFLOAT16:  # ONNX Runtime's CPU provider does not run such a reference
        raise ExportError(f"input {value.name!r} is {value}, which cannot be verified: export the model again, in float32")
    if value.floating:
        return generator.standard_normal(shape).astype(value.dtype)
    named = value.name.lower()
    if value.dtype == np.bool_ or ("mask" in named and np.issubdtype(value.dtype, np.integer)):
        return np.ones(shape, value.dtype)
    if not np.issubdtype(value.dtype, np.integer):
        raise ExportError(f"input {value.name!r} is {value}; values for it cannot be generated: give samples")
    if "token_type" in named or "segment" in named:
        return np.zeros(shape, value.dtype)
    if "position" in named and shape:
        return np.broadcast_to(np.arange(shape[-1]), shape).astype(value.dtype)
    return generator.integers(0, limit or LARGEST_INDEX, shape).astype(value.dtype)


def _index_limits(graph: onnx.GraphProto) -> Iterator[tuple[str, int]]:
    """For each integer input that indexes tables, the size of the smallest table."""
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
