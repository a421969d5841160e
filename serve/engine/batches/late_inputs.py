"""Inputs whose elements are read one by one, where they are many: by the thread that computes them, not by the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from serve.engine.tensors import Array


@dataclass(frozen=True, slots=True)
class LateArray:
    """An input that is still to be read.

    Attributes:
        shape: as the model takes it.
        read: gives the elements, in any shape; raises an InferenceError where they are not what the request says.
    """

    shape: tuple[int, ...]
    read: Callable[[], Array]


class LateInputs(Mapping[str, Array]):
    """The inputs of one request, by name. Nothing that was read is kept: who asks once need not, and frees it on its thread."""

    __slots__ = ("_arrays",)

    def __init__(self, arrays: Mapping[str, Array | LateArray]) -> None:
        """Inputs whose names, datatypes and shapes have been checked."""
        self._arrays = arrays

    def __getitem__(self, name: str) -> Array:
        """One input.

        Raises:
            InferenceError: the elements are not what the request says.
        """
        array = self._arrays[name]
        return array.read().reshape(array.shape) if isinstance(array, LateArray) else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
