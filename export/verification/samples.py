"""A model's declared inputs, the user's samples cut into batches for them, and true labels from a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper

from halfserve.export.certificate.budget import Budget
from halfserve.export.export_errors import ExportError
from halfserve.protos.captured_requests import SampledTraffic

if TYPE_CHECKING:
    from torch import Tensor

    from halfserve.export.onnx_files.model_file import ModelFile

Array: TypeAlias = np.ndarray[Any, Any]
Value: TypeAlias = Array | list[Array] | None
Feed: TypeAlias = dict[str, Array]
Dim = int | str | None
UNNAMED = "arr_0"  # the name that numpy.savez gives to an array without one
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
Values: TypeAlias = "Tensor | Array"
Inputs: TypeAlias = "Values | Mapping[str, Values] | Sequence[Values] | Sequence[Mapping[str, Values]]"


@dataclass(frozen=True, kw_only=True)
class Input:
    """A required input of a model.

    Attributes:
        name: Name of the input.
        elem_type: Element type, a number of `onnx.TensorProto.DataType`.
        dims: Size, name or None for each dimension; None where the rank is not declared.
    """

    name: str
    elem_type: int
    dims: tuple[Dim, ...] | None

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Numpy's dtype of the elements; `str_` for text."""
        if self.elem_type == TensorProto.STRING:
            return np.dtype(np.str_)
        return np.dtype(helper.tensor_dtype_to_np_dtype(self.elem_type))

    @property
    def floating(self) -> bool:
        """Whether samples of any floating dtype fit, since they are cast."""
        return self.elem_type in FLOATS

    def __str__(self) -> str:
        dims = "of any rank" if self.dims is None else f"[{', '.join(str(dim or '?') for dim in self.dims)}]"
        return f"{TensorProto.DataType.Name(self.elem_type).lower()} {dims}"

    def keys(self, axis: int) -> list[str]:
        """Return the names by which a dimension's size can be given: `INPUT.AXIS`, and its own name; none where its size is
        fixed.
        """
        dim = None if self.dims is None else self.dims[axis]
        if isinstance(dim, int) and dim > 0:
            return []
        return [f"{self.name}.{axis}", *([dim] if isinstance(dim, str) else [])]

    def misfit(self, array: Array) -> str | None:
        """Explain why an array does not fit this input; None when it fits."""
        given = f"{array.dtype} {list(array.shape)}"
        if self.floating != np.issubdtype(array.dtype, np.floating) or not (self.floating or self._same_kind(array)):
            return f"input {self.name!r}: expected {self}, got {given}"
        if self.dims is None:
            return None
        sizes = zip(self.dims, array.shape, strict=False)
        if len(self.dims) != array.ndim or any(isinstance(dim, int) and dim != size for dim, size in sizes):
            return f"input {self.name!r}: expected {self}, got {given}"
        return None

    def _same_kind(self, array: Array) -> bool:
        return array.dtype.kind == "U" if self.elem_type == TensorProto.STRING else bool(array.dtype == self.dtype)


def inputs_of(model: onnx.ModelProto) -> list[Input]:
    """Return the model's required inputs, which have no initializer.

    Raises:
        ExportError: An input is not a tensor, or has no element type.
    """
    initialized = {tensor.name for tensor in model.graph.initializer}
    return [_input(value) for value in model.graph.input if value.name not in initialized]


def _input(value: onnx.ValueInfoProto) -> Input:
    kind = value.type.WhichOneof("value")
    if kind == "optional_type" and value.type.optional_type.elem_type.WhichOneof("value") == "tensor_type":
        tensor = value.type.optional_type.elem_type.tensor_type
    elif kind == "tensor_type":
        tensor = value.type.tensor_type
    else:
        raise ExportError(
            f"input {value.name!r} is a {(kind or 'value of no type').removesuffix('_type')}; only tensors are supported"
        )
    if tensor.elem_type not in TensorProto.DataType.values() or tensor.elem_type == TensorProto.UNDEFINED:
        raise ExportError(f"input {value.name!r} is a tensor of no known type; export the model again")
    dims = tuple(_dim(dim) for dim in tensor.shape.dim) if tensor.HasField("shape") else None
    return Input(name=value.name, elem_type=tensor.elem_type, dims=dims)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value") and dim.dim_value >= 0:  # some converters write -1 for an unknown size
        return int(dim.dim_value)
    return dim.dim_param or None


@dataclass(frozen=True, kw_only=True)
class Feeds:
    """Batches for one model.

    Attributes:
        batches: An array for every input, by name, in each batch.
        samples: Count of samples in all batches; a batch without a batch dimension counts as one.
        resizable: Whether the first dimension of every input counts samples and may have any size.
    """

    batches: tuple[Feed, ...]
    samples: int
    resizable: bool


@dataclass(frozen=True, kw_only=True)
class SampleSet:
    """Samples to verify a model on.

    Attributes:
        inputs: The samples, as `make_feeds` takes them.
        note: A remark for the certificate: what the samples are and cannot show; "" for none.
        made_up: Whether they are random numbers.
        traffic: The captured requests that they are; None for others.
    """

    inputs: Inputs
    note: str = ""
    made_up: bool = False
    traffic: SampledTraffic | None = None

    def budget(self, budget: Budget) -> Budget:
        """Return the limits on these samples: on made-up ones near-ties are not judged."""
        return replace(budget, judge_near_ties=False) if self.made_up else budget

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.note, self.traffic.text if self.traffic else "")))


def make_feeds(wanted: Sequence[Input], given: Inputs, batch_size: int) -> Feeds:
    """Cut samples into batches, and check that they fit.

    Args:
        wanted: The model's inputs.
        given: One array, or one for each input in the model's order or by name, whose first dimension counts samples; or a
            list of such mappings, each an unchanged batch.
        batch_size: Largest batch. A fixed batch dimension overrides it, and a remainder is left out.

    Raises:
        ExportError: An input is missing or unknown, or its array does not fit.
    """
    if isinstance(given, Sequence) and given and all(isinstance(entry, Mapping) for entry in given):
        batches = tuple(_checked(wanted, _by_name(wanted, batch)) for batch in given)
        batched = is_batched(wanted)
        counts = [next((len(array) for array in batch.values() if array.ndim and batched), 1) for batch in batches]
        if 0 in counts:
            raise ExportError(
                f"batch {counts.index(0)} of the samples is empty; expected at least 1 sample in each: leave it out"
            )
        return Feeds(batches=batches, samples=sum(counts), resizable=_is_resizable(wanted))
    arrays = _by_name(wanted, given)
    if not is_batched(wanted):
        return Feeds(batches=(_checked(wanted, arrays),), samples=1, resizable=False)
    return _cut(wanted, arrays, batch_size)


def require_finite(batches: Sequence[Feed], answers: Sequence[list[Value]]) -> None:
    """Check that the reference answers every sample with NaN or infinity in finite numbers.

    NaN may stand for a missing value, and -inf may mask. Where they propagate to the answer, the comparison proves nothing.

    Raises:
        ExportError: The answer to such a sample is not finite or holds no floats.
    """
    found = [
        (before + row, name)
        for before, batch, outputs in zip(_starts(batches), batches, answers, strict=True)
        for name, rows in _with_non_finite(batch)
        for row in rows
        if not _answers_finitely(outputs, row, len(batch[name]) if batch[name].ndim else 0)
    ]
    if found:
        row, name = found[0]
        others = len({row for row, _ in found}) - 1
        more = f"; so do {others} more" if others else ""
        raise ExportError(
            f"sample {row} (counted from 0) holds NaN or infinity in input {name!r}, and float32 does not answer it with "
            f"finite numbers{more}: such samples prove nothing; leave them out or correct them"
        )


def as_array(values: Any) -> Array:
    """Return a torch tensor, an array or an array-like as a numpy array."""
    torch = sys.modules.get("torch")  # a tensor exists only where torch is loaded, and its import is slow
    if torch is not None and isinstance(values, torch.Tensor):
        array: Array = values.detach().cpu().numpy()
        return array
    array = np.asarray(values)
    return array.astype(np.str_) if array.dtype == object else array


def _starts(batches: Sequence[Feed]) -> Iterator[int]:
    start = 0
    for batch in batches:
        yield start
        start += next((len(array) for array in batch.values() if array.ndim), 1)


def _with_non_finite(batch: Feed) -> Iterator[tuple[str, list[int]]]:
    """Return inputs with NaN or infinities, and the rows that hold them; row 0 of a scalar."""
    for name, array in batch.items():
        if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
            rows = finite.reshape(len(finite), -1).all(1) if finite.ndim else finite.reshape(1)
            yield name, np.flatnonzero(~rows).tolist()


def _answers_finitely(outputs: Sequence[Value], row: int, rows: int) -> bool:
    """Return whether the answer to a row holds floats and all are finite; an output of another length is checked as a whole."""
    arrays = [array for output in outputs for array in (output if isinstance(output, list) else [output])]
    floats = [array for array in arrays if array is not None and array.dtype.kind == "f"]
    parts = [array[row] if array.ndim and len(array) == rows else array for array in floats]
    return bool(parts) and all(bool(np.isfinite(part).all()) for part in parts)


def _by_name(wanted: Sequence[Input], given: Any) -> Feed:
    names = [value.name for value in wanted]
    listed = ", ".join(names) or "none"
    if isinstance(given, Mapping):
        for name in names:
            if name not in given:
                raise ExportError(
                    f"input {name!r} is not among the samples ({', '.join(given) or 'none'}); the model takes {listed}"
                )
        if unknown := sorted(given.keys() - set(names)):
            raise ExportError(f"the samples name {unknown[0]!r}, which is not an input of the model; it takes {listed}")
        return {name: as_array(given[name]) for name in names}
    several = isinstance(given, Sequence)
    arrays = [as_array(values) for values in given] if several else [as_array(given)]
    if len(arrays) != len(names):
        raise ExportError(f"the model takes {len(names)} inputs ({listed}), {len(arrays)} were given")
    return dict(zip(names, arrays, strict=True))


def _checked(wanted: Sequence[Input], feed: Feed) -> Feed:
    for value in wanted:
        if misfit := value.misfit(feed[value.name]):
            raise ExportError(misfit)
    return feed


def is_batched(wanted: Sequence[Input]) -> bool:
    """Return whether all first dimensions are one name or one fixed size; unnamed ones match any name."""
    if not wanted or any(value.dims is not None and not value.dims for value in wanted):
        return False
    firsts = {value.dims[0] for value in wanted if value.dims}
    return len(firsts - {None}) <= 1 and not (None in firsts and any(isinstance(first, int) for first in firsts))


def _is_resizable(wanted: Sequence[Input]) -> bool:
    return is_batched(wanted) and not any(value.dims and isinstance(value.dims[0], int) for value in wanted)


def _cut(wanted: Sequence[Input], arrays: Feed, batch_size: int) -> Feeds:
    counts = {len(array) for array in arrays.values() if array.ndim}
    if len(counts) != 1 or 0 in counts or any(array.ndim == 0 for array in arrays.values()):
        shapes = ", ".join(str(list(array.shape)) for array in arrays.values())
        raise ExportError(f"inputs: expected arrays with the same number of samples first, at least 1; got {shapes}")
    count = counts.pop()
    fixed = next((value.dims[0] for value in wanted if value.dims and isinstance(value.dims[0], int)), 0)
    size = fixed or min(batch_size, count)
    if count < size:
        raise ExportError(f"the model takes batches of exactly {size}, only {count} samples were given")
    last = count - count % size if fixed else count
    starts = range(0, last, size)
    batches = ({name: array[start : min(start + size, last)] for name, array in arrays.items()} for start in starts)
    return Feeds(batches=tuple(_checked(wanted, batch) for batch in batches), samples=last, resizable=not fixed)


def load_labels(path: Path) -> Array:
    """Read integers that `numpy.save(path, array)` wrote, or an .npz with one such array.

    Raises:
        ExportError: The file cannot be read, or holds anything else.
    """
    arrays = list(read_array_file(path, "labels", ".npy file of numbers; write one with numpy.save(path, labels)").values())
    if len(arrays) != 1 or not np.issubdtype(arrays[0].dtype, np.integer):
        found = ", ".join(f"{array.dtype} {list(array.shape)}" for array in arrays) or "nothing"
        raise ExportError(f"{path} holds {found}; expected one array of whole numbers, the class of every sample")
    array: Array = arrays[0]
    return array


def load_samples(source: Path | Mapping[str, Array], model: ModelFile) -> list[Array]:
    """Read samples and check that they fit the model: arrays in the order of its inputs and in their types, samples first.

    They come by input name, or from a file that `numpy.savez(path, input_name=array, ...)` wrote. For a model with a single
    input, the file may hold one array without a name, also as .npy.

    Raises:
        ExportError: The file cannot be read, holds no such arrays, one does not fit its input, or an input is no tensor.
    """
    inputs = inputs_of(model.outline)
    arrays, path = (read_array_file(source), source) if isinstance(source, Path) else (dict(source), Path("samples"))
    if len(inputs) == 1 and arrays.keys() == {UNNAMED} and inputs[0].name != UNNAMED:
        arrays = {inputs[0].name: arrays[UNNAMED]}
    names = [value.name for value in inputs]
    absent = [name for name in names if name not in arrays]
    if absent:
        raise ExportError(
            f"{path} has no array {absent[0]!r}; it has {', '.join(arrays) or 'none'}; the model takes {', '.join(names)}"
        )
    unknown = [name for name in arrays if name not in names]
    if unknown:
        raise ExportError(f"{path} has an array {unknown[0]!r}, which is no input of the model; it takes {', '.join(names)}")
    return [_fitting(arrays[value.name], value, path) for value in inputs]


def read_array_file(
    path: Path,
    what: str = "samples",
    expected: str = ".npz file of numbers; write one with numpy.savez(path, input_name=array)",
) -> dict[str, Array]:
    """Return the arrays of an .npz by name, or of an .npy under `UNNAMED`.

    Raises:
        ExportError: The file cannot be read, or holds anything else.
    """
    try:
        with path.open("rb") as file:  # numpy does not close a path that holds no archive
            loaded = np.load(file, allow_pickle=False)
            return {UNNAMED: loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except OSError as error:
        raise ExportError(f"cannot read the {what} {path}: {error.strerror or error}") from error
    except Exception as error:  # numpy evaluates the header, and allocates the size that it states
        raise ExportError(f"{path} is no {expected}") from error


def _fitting(array: Array, wanted: Input, path: Path) -> Array:
    texts = array.dtype.kind == wanted.dtype.kind == "U"
    if not texts and not np.can_cast(array.dtype, wanted.dtype, "same_kind"):
        raise ExportError(f"{path}: {wanted.name!r} is {array.dtype}, the model takes {wanted.dtype}")
    if wanted.dims is not None:
        fits = len(wanted.dims) == array.ndim and all(
            not isinstance(want, int) or want == have for want, have in zip(wanted.dims[1:], array.shape[1:], strict=True)
        )
        if not fits:
            shown = ", ".join("?" if dim is None else str(dim) for dim in wanted.dims)
            raise ExportError(
                f"{path}: {wanted.name!r} has shape {list(array.shape)}, the model takes [{shown}] (samples first)"
            )
    return array if texts else array.astype(wanted.dtype, copy=False)
