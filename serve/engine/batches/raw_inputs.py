"""Inputs that are still the bytes of their request: a batch can join them as they are, and whoever wants arrays gets views."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serve.engine.tensors import Array

# Fills a view with the bytes of one input, which lie outside of the request.
Reader = Callable[[memoryview], None]
Readers = tuple[Reader | None, ...]


@dataclass(frozen=True, slots=True)
class RawInput:
    """What the bytes of one input mean.

    Attributes:
        name: of the model's input.
        dtype: of its elements, little-endian.
        shape: as the model takes it.
        elements: of that shape.
        size: in bytes.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    elements: int
    size: int


@dataclass(frozen=True)
class RawLayout:
    """What the bytes of all inputs of a request mean.

    Attributes:
        inputs: in the order of the request.
    """

    inputs: tuple[RawInput, ...]
    places: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {entry.name: place for place, entry in enumerate(self.inputs)})


class RawInputs(Mapping[str, Array]):
    """The inputs of one request, by name: read-only views on its bytes, or copies of what lies elsewhere."""

    __slots__ = ("_data", "_offsets", "_readers", "layout")

    def __init__(
        self, layout: RawLayout, data: bytes | memoryview, offsets: tuple[int, ...], readers: Readers | None = None
    ) -> None:
        """Inputs that have been checked against their layout.

        Args:
            layout: what the bytes mean.
            data: the whole request.
            offsets: where each input begins in it, in the layout's order.
            readers: for each input, what fetches bytes that are not in the request; None in place of all where all are.
        """
        self.layout = layout
        self._data = data
        self._offsets = offsets
        self._readers = readers

    def __getitem__(self, name: str) -> Array:
        place = self.layout.places[name]
        entry = self.layout.inputs[place]
        reader = None if self._readers is None else self._readers[place]
        if reader is None:
            return np.frombuffer(self._data, entry.dtype, entry.elements, self._offsets[place]).reshape(entry.shape)
        array = np.empty(entry.size, np.uint8)
        reader(array.data)
        return array.view(entry.dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.places)

    def __len__(self) -> int:
        return len(self.layout.inputs)

    def size(self, name: str) -> int:
        """Bytes of one input."""
        return self.layout.inputs[self.layout.places[name]].size

    def has_aligned(self, name: str) -> bool:
        """Whether the bytes of one input lie in the request, and begin where an element may."""
        place = self.layout.places[name]
        if self._readers is not None and self._readers[place] is not None:
            return False
        return self[name].flags.aligned

    def piece(self, name: str) -> bytes | memoryview:
        """The bytes of one small input."""
        place = self.layout.places[name]
        if self._readers is not None and self._readers[place] is not None:
            return self[name].tobytes()
        start = self._offsets[place]
        return self._data[start : start + self.layout.inputs[place].size]

    def copy_into(self, name: str, target: memoryview) -> None:
        """Put the bytes of one input where they are wanted.

        Raises:
            InferenceError: what fetches them could not.
        """
        place = self.layout.places[name]
        reader = None if self._readers is None else self._readers[place]
        if reader is not None:
            reader(target)
        else:
            start = self._offsets[place]
            target[:] = memoryview(self._data)[start : start + len(target)]
