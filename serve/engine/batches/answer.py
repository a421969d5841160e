"""What a request gets of its batch: some rows of every output, as arrays or as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from serve.engine.tensors import Array, Tensors

# Up to here the whole batch becomes bytes at once, and each answer is cut from them; beyond, that copy would not pay.
CUT_BYTES = 65_536


class BatchOutputs:
    """All outputs of one batch."""

    __slots__ = ("_raw", "arrays", "row_shapes")

    def __init__(self, arrays: Tensors) -> None:
        """Outputs as the backend gave them.

        Args:
            arrays: by name, the batch's rows first where the model has a batch dimension.
        """
        self.arrays = arrays
        self.row_shapes = tuple(array.shape[1:] for array in arrays.values())
        self._raw: dict[str, bytes] = {}

    def raw(self, name: str) -> bytes:
        """All elements of one output, row-major."""
        raw = self._raw.get(name)
        if raw is None:
            raw = self._raw[name] = self.arrays[name].tobytes()
        return raw


class Answer(Mapping[str, Array]):
    """The rows of one request, by the names of the outputs that it wants."""

    __slots__ = ("_end", "_names", "_start", "batch")

    def __init__(self, batch: BatchOutputs, names: tuple[str, ...], start: int, end: int) -> None:
        """Rows `start` to `end`, the latter not included, of a batch with a batch dimension."""
        self.batch = batch
        self._names = names
        self._start = start
        self._end = end

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        return self.batch.arrays[name][self._start : self._end]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def raw(self, name: str, row_bytes: int) -> bytes:
        """The elements of one output in these rows, row-major; each row has `row_bytes` bytes."""
        array = self.batch.arrays[name]
        if array.nbytes > CUT_BYTES:
            return np.ascontiguousarray(array[self._start : self._end]).tobytes()
        return self.batch.raw(name)[self._start * row_bytes : self._end * row_bytes]


class RemarkedAnswer(dict[str, Array]):
    """An answer that says something of itself.

    Attributes:
        parameters: of the response.
    """

    def __init__(self, outputs: Tensors, parameters: Mapping[str, str]) -> None:
        super().__init__(outputs)
        self.parameters = parameters
