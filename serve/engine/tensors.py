"""Tensors: the specifications of a model's inputs and outputs, and the inputs of one request.

Inputs are views on the received bytes, lie in shared memory, or are read on the thread that computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from halfserve.protos.datatypes import Datatype

Array: TypeAlias = np.ndarray[Any, Any]
Tensors: TypeAlias = Mapping[str, Array]

ANY_SIZE = -1
MAX_SHOWN = 16  # most sizes that an error text quotes; a client's shape may have millions
# Copies from this size on release Python's lock, so that the event loop need not wait for them. Below it the wait for the lock
# costs more: images of 301 KB, 4 at a time on 2 cores, came at 0.88 of the rate.
FREE_BYTES: Final = 1 << 19
_array: Final = np.ndarray  # a name of this module: compiled code finds it in fewer steps


def memory_of(array: Array) -> int:
    """Return the bytes of an array and of the texts that it refers to."""
    if not array.dtype.hasobject:
        return array.nbytes
    return sum([sys.getsizeof(element) for element in array.ravel()], array.nbytes)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One input or output of a model.

    Attributes:
        name: name in the ONNX graph.
        datatype: datatype on the wire; the backend may compute in a wider one.
        shape: sizes, with the batch dimension first if the model has one; -1 for any size.
        model_shape: the model's own shape, if the configuration gives clients another one (`reshape`).
        optional: whether a request may leave the input out.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    model_shape: tuple[int, ...] | None = None
    optional: bool = False

    def shape_for_model(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the model's own shape for a client's shape that fits."""
        if self.model_shape is None:
            return shape
        return _filled(self.model_shape, self.shape, shape)

    def to_model(self, array: Array) -> Array:
        """Return a client's array in the model's own shape."""
        return array if self.model_shape is None else array.reshape(self.shape_for_model(array.shape))

    def to_client(self, array: Array) -> Array:
        """Return the model's array in the clients' shape."""
        if self.model_shape is None:
            return array
        return array.reshape(_filled(self.shape, self.model_shape, array.shape))

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Return why `shape` does not fit, as the end of a sentence; None if it fits."""
        if len(shape) != len(self.shape):
            return f"has shape {_shown(shape)}, expected {len(self.shape)} dimensions: {list(self.shape)}"
        for given, expected in zip(shape, self.shape, strict=True):
            if given < 0 or expected not in {ANY_SIZE, given}:
                return f"has shape {list(shape)}, expected {list(self.shape)} (-1 takes any size)"
        return None


def can_reshape(dims: Sequence[int], own: Sequence[int]) -> bool:
    """Return whether tensors of `dims` can have the shape `own`: each open size is the other's, with equally many elements
    between.
    """
    sizes = [*dims, *own]
    return min(sizes, default=1) >= ANY_SIZE and 0 not in sizes and _runs(dims) == _runs(own)


def _runs(sizes: Sequence[int]) -> list[int]:
    """Elements before, between and after the open sizes."""
    runs = [1]
    for size in sizes:
        if size == ANY_SIZE:
            runs.append(1)
        else:
            runs[-1] *= size
    return runs


def _filled(shape: tuple[int, ...], pattern: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with the sizes that `given` has where `pattern` leaves them open, in their order."""
    sizes = iter([size for size, wanted in zip(given, pattern, strict=False) if wanted == ANY_SIZE])
    return tuple([next(sizes, size) if size == ANY_SIZE else size for size in shape])


def _shown(shape: Sequence[int]) -> str:
    if len(shape) <= MAX_SHOWN:
        return str(list(shape))
    return f"[{', '.join(map(str, shape[:MAX_SHOWN]))}, ...]"


# Fills a view with the bytes of one input that are not in the request.
Reader = Callable[[memoryview], None]
# Per input: None for one in the request, else a reader of its bytes, or an array on them.
Outside = tuple[Reader | Array | None, ...]


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of one input in memory of a CUDA device. Calling it copies them to the host.

    Attributes:
        device_id: number of the device.
        address: the device's address of the first byte.
        read: copies the bytes to the host, and keeps the memory open.
    """

    device_id: int
    address: int
    read: Reader

    def __call__(self, target: memoryview) -> None:
        self.read(target)


@dataclass(frozen=True)
class RawInput:
    """Datatype, shape and size of one input's bytes.

    Attributes:
        name: name of the model's input.
        dtype: dtype of its elements, little-endian.
        shape: shape that the model takes.
        elements: product of the shape.
        size: size in bytes.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    elements: int
    size: int


@dataclass(frozen=True)
class RawLayout:
    """Datatypes, shapes and sizes of a request's inputs.

    Attributes:
        inputs: inputs in the order of the request.
    """

    inputs: tuple[RawInput, ...]
    places: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {entry.name: place for place, entry in enumerate(self.inputs)})


class RawInputs(Mapping[str, Array]):
    """A request's inputs by name, as bytes, which a batch joins as they are. Arrays are views on them, or copies."""

    __slots__ = ("_data", "_offsets", "_outside", "layout")

    def __init__(
        self, layout: RawLayout, data: bytes | memoryview, offsets: tuple[int, ...], outside: Outside | None = None
    ) -> None:
        """Make inputs that have been checked against their layout.

        Args:
            layout: layout of the bytes.
            data: the whole request.
            offsets: start of each input in `data`, in the layout's order.
            outside: sources of the inputs that are not in the request; None if all are.
        """
        self.layout = layout
        self._data = data
        self._offsets = offsets
        self._outside = outside

    def __getitem__(self, name: str) -> Array:
        place = self.layout.places[name]
        entry = self.layout.inputs[place]
        source = None if self._outside is None else self._outside[place]
        if source is None:
            return np.frombuffer(self._data, entry.dtype, entry.elements, self._offsets[place]).reshape(entry.shape)
        if isinstance(source, np.ndarray):
            return source
        array = np.empty(entry.size, np.uint8)
        source(array.data)
        return array.view(entry.dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.places)

    def __len__(self) -> int:
        return len(self.layout.inputs)

    def small_arrays(self, most_bytes: int) -> dict[str, Array] | None:
        """Return all inputs as views on the request; None if one has `most_bytes` or more, or lies outside the request."""
        if self._outside is not None:
            return None
        data, offsets = self._data, self._offsets
        arrays: dict[str, Array] = {}
        for place, entry in enumerate(self.layout.inputs):
            if entry.size >= most_bytes:
                return None
            arrays[entry.name] = _array(entry.shape, entry.dtype, data, offsets[place])
        return arrays

    def late_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of an input whose bytes are outside the request; None for one in the request."""
        place = self.layout.places[name]
        return None if self._outside is None or self._outside[place] is None else self.layout.inputs[place].shape

    @property
    def all_sent(self) -> bool:
        """Whether all bytes are in the request, and none in shared memory."""
        return self._outside is None

    def device_bytes(self, name: str) -> DeviceBytes | None:
        """Return where an input lies on a CUDA device; None for one in the host's memory."""
        source = None if self._outside is None else self._outside[self.layout.places[name]]
        return source if isinstance(source, DeviceBytes) else None

    def size(self, name: str) -> int:
        return self.layout.inputs[self.layout.places[name]].size

    def has_aligned(self, name: str) -> bool:
        """Return whether an input's bytes need not be read, and are at an address that is aligned for its dtype."""
        source = None if self._outside is None else self._outside[self.layout.places[name]]
        return (source is None or isinstance(source, np.ndarray)) and self[name].flags.aligned

    def piece(self, name: str) -> bytes | memoryview:
        """Return the bytes of one small input."""
        place = self.layout.places[name]
        if self._outside is not None and self._outside[place] is not None:
            return self[name].tobytes()
        start = self._offsets[place]
        return self._data[start : start + self.layout.inputs[place].size]

    def copy_into(self, name: str, target: memoryview) -> None:
        """Copy one input's bytes into `target`.

        Raises:
            InferenceError: the bytes cannot be read.
        """
        place = self.layout.places[name]
        source = None if self._outside is None else self._outside[place]
        if isinstance(source, np.ndarray):
            given = source.reshape(-1).view(np.uint8).data
        elif source is not None:
            source(target)
            return
        else:
            start = self._offsets[place]
            given = memoryview(self._data)[start : start + len(target)]
        if len(target) < FREE_BYTES:
            target[:] = given
        else:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(given, np.uint8))


@dataclass(frozen=True)
class LateArray:
    """An input that has not been parsed yet.

    Attributes:
        shape: shape that the model takes.
        read: returns the elements, in any shape; raises an InferenceError if they differ from the request's declaration.
    """

    shape: tuple[int, ...]
    read: Callable[[], Array]


class LateInputs(Mapping[str, Array]):
    """A request's inputs by name, some of which have many elements that are parsed one by one, on the thread that computes.

    Parsed elements are not kept, so that they are freed on that thread and not on the event loop.
    """

    __slots__ = ("_arrays",)

    def __init__(self, arrays: Mapping[str, Array | LateArray]) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> Array:
        """Return one input.

        Raises:
            InferenceError: the elements differ from the request's declaration.
        """
        array = self._arrays[name]
        return array.read().reshape(array.shape) if isinstance(array, LateArray) else array

    def late_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of an input that has not been parsed yet; None for one that has."""
        array = self._arrays[name]
        return array.shape if isinstance(array, LateArray) else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
