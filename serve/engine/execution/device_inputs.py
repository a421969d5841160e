"""Inputs of a batch that lie on its CUDA device already: they are joined there, without a copy on the host.

The module is not compiled: compiled subclasses of Mapping pass `isinstance` for any mapping, and backends ask by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from halfserve.serve.engine.cuda_driver import CudaError, cuda_driver
from halfserve.serve.engine.tensors import Array


class DeviceReadError(Exception):
    """The memory of a client cannot be read on its device; a copy to the host shows which request is at fault."""


class DeviceRows:
    """One input of a batch, in pieces of a device's memory.

    Attributes:
        shape: shape of the input, with all rows.
        dtype: dtype of its elements.
        device_id: number of the device.
        pieces: address and size in bytes of each piece, in order.
    """

    __slots__ = ("device_id", "dtype", "pieces", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], device_id: int, pieces: Sequence[tuple[int, int]]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device_id = device_id
        self.pieces = pieces

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def copy_to(self, address: int) -> None:
        """Copy all pieces to memory of the same device.

        Raises:
            DeviceReadError: the driver refuses.
        """
        driver = cuda_driver()
        if driver is None:
            raise DeviceReadError("there is no CUDA driver")
        try:
            driver.copy_on_device(address, self.pieces, self.device_id)
        except CudaError as error:
            raise DeviceReadError(str(error)) from error


class DeviceInputs(Mapping[str, Array]):
    """A batch's inputs, all of which lie on one device; a copy on the host is made of the ones that are asked for.

    Clients can change their memory, so that a copy that is made later may differ from what was computed.

    Attributes:
        rows: the inputs on the device, by name.
    """

    __slots__ = ("_copies", "_copy", "rows")

    def __init__(self, rows: Mapping[str, DeviceRows], copy: Callable[[str], Array]) -> None:
        """`copy` copies an input to the host; it may raise an InferenceError."""
        self.rows = rows
        self._copy = copy
        self._copies: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        found = self._copies.get(name)
        if found is None:
            if name not in self.rows:
                raise KeyError(name)
            found = self._copies[name] = self._copy(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)
