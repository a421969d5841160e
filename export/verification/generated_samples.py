"""Samples derived from the user's (adversarial cases) or generated from a model's declared inputs (synthetic samples)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import ModelFile, ModelSource, open_model
from halfserve.export.verification.samples import Array, Feed, Input, SampleSet, inputs_of, is_batched
from halfserve.export.verification.sandbox import Sandbox, at_first_level, on_disk

ROWS = 2
TINY = 2.0**-12
FACTORS = (4.0, 16.0, 64.0)
SEED = 0
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


@dataclass(frozen=True, kw_only=True)
class AdversarialCase:
    """One adversarial batch.

    Attributes:
        name: Name of the case, such as "zeros".
        feed: An array for every input, by name.
        factor: How many times the case's floats exceed the user's; such a case measures headroom. None for other cases, which
            lie within the user's range.
    """

    name: str
    feed: Feed
    factor: float | None = None


def adversarial_cases(
    wanted: Sequence[Input], feeds: Sequence[Feed], *, resizable: bool, longest: Mapping[str, int] | None = None
) -> list[AdversarialCase]:
    """Derive adversarial batches, which break fp16 models first, from the user's.

    Floating inputs become zeros, ones (where the user's reach 1), tiny, constant in every row, or the user's largest magnitude
    with random signs where the user's have both; then 4, 16 and 64 times the user's. Masks (see `is_mask`) get their first row
    masked. Other integers take the largest value seen.

    Args:
        wanted: The model's inputs.
        feeds: The user's batches.
        resizable: Whether batches of any size can run; then there are also a batch of one and one of duplicates, and other
            cases have one or two rows.
        longest: Sizes of dynamic dimensions, by name, up to which samples are repeated along them.

    Raises:
        ExportError: The longest batch does not fit in memory.
    """
    if not feeds or not feeds[0]:
        return []
    resizable = resizable and all(array.ndim for array in feeds[0].values())
    base = {name: array[:ROWS] if resizable else array for name, array in feeds[0].items()}
    ranges = {value.name: _Range.of([feed[value.name] for feed in feeds]) for value in wanted}
    masks = {value.name for value in wanted if is_mask(value, feeds)}
    floats = [value.name for value in wanted if value.floating and value.name not in masks]
    first = {name: array[:1] for name, array in base.items()} if resizable else base
    cases = [case for case in _float_cases(first, floats, ranges) if floats]  # many, so one row each
    cases += _integer_cases(wanted, base, masks, ranges)
    if resizable:
        cases.append(AdversarialCase(name="batch of one", feed=first))
        cases.append(
            AdversarialCase(name="duplicates", feed={name: np.repeat(array, ROWS, axis=0) for name, array in first.items()})
        )
    if longest and (feed := lengthened(wanted, base, longest)) is not None:
        cases.append(AdversarialCase(name="longest", feed=feed))
    seen: list[AdversarialCase] = []
    for case in cases:
        fitting = replace(case, feed={value.name: _as_given(case.feed[value.name], base[value.name]) for value in wanted})
        if not any(_same(fitting.feed, other.feed) for other in seen):
            seen.append(fitting)
    return seen


def is_mask(value: Input, feeds: Sequence[Feed]) -> bool:
    """Whether an input is a mask: booleans, integers of 0 and 1, or floats up to 0 or 1 named "mask"; never a scalar."""
    arrays = [feed[value.name] for feed in feeds]
    if not all(array.ndim for array in arrays):
        return False
    if value.dtype == np.bool_:
        return True
    if np.issubdtype(value.dtype, np.integer):
        return all(np.isin(array, (0, 1)).all() for array in arrays)
    return "mask" in value.name.lower() and all(np.isin(array.max(initial=0), (0, 1)) for array in arrays)


def lengthened(wanted: Sequence[Input], feed: Feed, longest: Mapping[str, int]) -> Feed | None:
    """The batch repeated along the named dimensions up to their longest size; None where no input has such a dimension.

    Raises:
        ExportError: The batch does not fit in memory.
    """
    longer = dict(feed)
    for value in wanted:
        for axis, dim in enumerate(value.dims or ()):
            size = longest.get(dim) if isinstance(dim, str) else None
            if size is not None and longer[value.name].shape[axis]:
                try:
                    longer[value.name] = _lengthened(value.name, longer[value.name], axis, size)
                except (MemoryError, OverflowError, ValueError) as error:  # numpy raises ValueError for too many elements
                    raise ExportError(
                        f"input {value.name!r} with {size} along {dim!r} does not fit in memory; ask for a smaller size"
                    ) from error
    return None if _same(longer, feed) else longer


@dataclass(frozen=True, kw_only=True)
class _Range:
    low: float
    high: float

    @property
    def largest(self) -> float:
        return max(abs(self.low), abs(self.high))

    @staticmethod
    def of(arrays: Sequence[Array]) -> _Range:
        numeric = [array[np.isfinite(array)] for array in arrays if array.dtype.kind in "biuf"]
        lows, highs = ([float(edge(a)) for a in numeric if a.size] for edge in (np.min, np.max))
        return _Range(low=min(lows, default=0.0), high=max(highs, default=0.0))


def _float_cases(base: Feed, floats: list[str], ranges: Mapping[str, _Range]) -> Iterator[AdversarialCase]:
    def case(name: str, make: Callable[[str, Array], Array]) -> AdversarialCase:
        return AdversarialCase(name=name, feed={**base, **{key: make(key, base[key]) for key in floats}})

    yield case("zeros", lambda _, array: np.zeros_like(array))
    if all(ranges[name].high >= 1 for name in floats):
        yield case("ones", lambda _, array: np.ones_like(array))
    yield case("tiny", lambda _, array: array * TINY)
    yield case("constant rows", lambda _, array: _constant_rows(array))
    yield case("largest", lambda name, array: _extreme(array, ranges[name]))
    for factor in FACTORS:
        with np.errstate(over="ignore"):  # may exceed float32's range
            larger = {name: base[name] * factor for name in floats}
        yield AdversarialCase(name=f"{factor:g} times larger", feed={**base, **larger}, factor=factor)


def _integer_cases(
    wanted: Sequence[Input], base: Feed, masks: set[str], ranges: Mapping[str, _Range]
) -> Iterator[AdversarialCase]:
    if masks:
        lowest = {name: ranges[name].low if base[name].dtype.kind == "f" else 0 for name in masks}
        yield AdversarialCase(
            name="masked row", feed={**base, **{name: _first_row(base[name], lowest[name]) for name in masks}}
        )
    integers = [v.name for v in wanted if np.issubdtype(v.dtype, np.integer) and v.name not in masks and base[v.name].ndim]
    if integers:
        largest = {name: np.full_like(base[name], ranges[name].high) for name in integers}
        yield AdversarialCase(name="largest integers", feed={**base, **largest})


def _constant_rows(array: Array) -> Array:
    if array.ndim < 2 or not array.size:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        mean = array.mean(axis=-1, keepdims=True)  # rounding or overflow may exceed the row's range
        within = np.clip(mean, array.min(axis=-1, keepdims=True), array.max(axis=-1, keepdims=True))
    return np.broadcast_to(within, array.shape)


def _extreme(array: Array, extent: _Range) -> Array:
    signs = np.ones(array.shape)
    if extent.low < 0 < extent.high:
        signs = np.random.default_rng(SEED).choice([-1.0, 1.0], array.shape)
    elif extent.high <= 0:
        signs = -signs
    largest: Array = signs * extent.largest
    return largest


def _first_row(array: Array, value: float) -> Array:
    masked = array.copy()
    masked[:1] = value
    return masked


def _lengthened(name: str, array: Array, axis: int, size: int) -> Array:
    steps = np.diff(array, axis=axis) if np.issubdtype(array.dtype, np.integer) else np.zeros(0)
    if "position" in name.lower() and steps.size and (steps == 1).all():
        first = np.take(array, [0], axis=axis)
        shape = [size if index == axis else 1 for index in range(array.ndim)]
        counted: Array = (first + np.arange(size).reshape(shape)).astype(array.dtype)
        return counted
    longer: Array = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
    return longer


def _as_given(array: Array, like: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.array(array, like.dtype, order="C")  # np.ascontiguousarray adds a dimension to a scalar


def _same(one: Feed, other: Feed) -> bool:
    return all(np.array_equal(one[name], other[name], equal_nan=one[name].dtype.kind == "f") for name in one)


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
    """How many such batches, at most `count`, stay within the bounds, and the reason where these are fewer."""
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
        raise ExportError(f"input {value.name!r} declares no shape, so samples cannot be generated; give samples")
    return [_size(value, axis, dim, dims) for axis, dim in enumerate(value.dims)]


def _size(value: Input, axis: int, dim: int | str | None, dims: Mapping[str, int]) -> int:
    if isinstance(dim, int) and dim > 0:
        return dim
    chosen = next((dims[key] for key in _keys(value, axis, dim) if key in dims), None)
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
