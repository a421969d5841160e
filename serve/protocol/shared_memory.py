"""Tensors that a client on the same machine leaves in memory that both reach, instead of sending them.

A region is known by its name, whether it lies in the system's memory or on a CUDA device. Names are never told to others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from serve.engine.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
)
from serve.protocol.cuda_region import CudaRegion, open_cuda_region
from serve.protocol.open_files import most_regions
from serve.protocol.system_region import SystemRegion, open_system_region

OFF = "shared memory is off on this server; start it with --shared-memory, or send the bytes"
MAX_BYTES = 2**31 - 1  # of one request's inputs: as many as one message may carry


class Region(Protocol):
    """Memory that a client has registered."""

    @property
    def name(self) -> str:
        """That requests use."""

    @property
    def byte_size(self) -> int:
        """Of the region."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Put bytes of the region where they are wanted.

        Raises:
            InferenceError: they are not there any more.
        """

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes into the region.

        Raises:
            InferenceError: there is no place for them any more.
        """


Kind = TypeVar("Kind", SystemRegion, CudaRegion)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one tensor lies.

    Attributes:
        region: by its name.
        offset: from the region's start, in bytes.
        byte_size: that is the tensor's, or that it may take.
    """

    region: str
    offset: int
    byte_size: int


class SharedMemory:
    """The regions of this server.

    Attributes:
        latest: number of the region that was registered last, counted from 1. A request that waits notes it: what is registered
            under a name of its own after it came may be another client's.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.latest = 0
        self._regions: dict[str, SystemRegion | CudaRegion] = {}
        self._numbers: dict[str, int] = {}

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a region of the system's memory.

        Raises:
            UnsupportedError: shared memory is off here.
            InvalidArgumentError: the name or the key is none, there is no such file, or it is smaller than the region.
            AlreadyExistsError: the name is taken.
            FailedPreconditionError: there are as many as there can be.
        """
        self._check_new(name)
        count, most = sum(isinstance(region, SystemRegion) for region in self._regions.values()), most_regions()
        if count >= most:
            raise FailedPreconditionError(
                f"{count} shared memory regions are registered here, and there can be no more; unregister those that nobody "
                "uses, or send the bytes"
            )
        self._add(open_system_region(name, key, offset, byte_size))

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Open a region on a CUDA device.

        Raises:
            UnsupportedError: shared memory is off here, or there is no CUDA device.
            InvalidArgumentError: the name or the handle is none, or the memory cannot be opened or is smaller than the region.
            AlreadyExistsError: the name is taken.
        """
        self._check_new(name)
        self._add(open_cuda_region(name, raw_handle, device_id, byte_size))

    def unregister(self, name: str, kind: type[Kind]) -> None:
        """Close a region of one kind; "" closes all of them. One that is not registered is as good as closed."""
        for region in [r for r in self._regions.values() if isinstance(r, kind) and name in {"", r.name}]:
            del self._regions[region.name]
            del self._numbers[region.name]

    def regions(self, name: str, kind: type[Kind]) -> list[Kind]:
        """The region of this name and kind; "" lists all of the kind.

        Raises:
            NotFoundError: it is not registered.
        """
        found = [region for region in self._regions.values() if isinstance(region, kind) and name in {"", region.name}]
        if name and not found:
            raise _unknown(name)
        return found

    def read(self, place: Place, *, since: int | None = None) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """A copy of the bytes of a tensor. Called on worker threads too; `since`: see `check`.

        Raises:
            NotFoundError: the region is not registered.
            InvalidArgumentError: the tensor is not wholly inside of the region, or the client has taken the memory away.
        """
        self.check(place, since=since)
        data = np.empty(place.byte_size, np.uint8)
        self.read_into(place, data.data, since=since)
        return data

    def read_into(self, place: Place, target: memoryview, *, since: int | None = None) -> None:
        """Put the bytes of a tensor where they are wanted. Called on worker threads too.

        Raises:
            NotFoundError: the region is not registered.
            InvalidArgumentError: the tensor is not wholly inside of the region, or the client has taken the memory away.
        """
        self.check(place, since=since).read_into(place.offset, target)

    def write(self, place: Place, data: bytes | memoryview, *, since: int | None = None) -> None:
        """Put a tensor's bytes into its place. Called on other threads too.

        Raises:
            NotFoundError: the region is not registered any more.
            InvalidArgumentError: the bytes do not fit the place, or the client has taken the memory away.
        """
        region = self.check(place, since=since)
        if len(data) > place.byte_size:
            raise InvalidArgumentError(
                f"an output of {len(data)} bytes does not fit its {place.byte_size} bytes of shared memory region "
                f"{place.region!r}; make them more"
            )
        region.write(place.offset, data)

    def check(self, place: Place, *, since: int | None = None) -> Region:
        """The region that holds a place.

        Args:
            place: of a tensor.
            since: `latest` when its request came, which has waited since; None where it has just come.

        Raises:
            UnsupportedError: shared memory is off here.
            NotFoundError: it is not registered, or the one that was when the request came is not any more.
            InvalidArgumentError: the place is not wholly inside of it.
        """
        if not self.enabled:
            raise UnsupportedError(OFF)
        region = self._regions.get(place.region)
        if since is not None and (region is None or self._numbers.get(place.region, math.inf) > since):
            raise NotFoundError(
                f"shared memory region {place.region!r} was unregistered while the request waited; register it and send the "
                "request again"
            )
        if region is None:
            raise _unknown(place.region)
        if place.offset < 0 or place.byte_size < 0 or place.offset + place.byte_size > region.byte_size:
            raise InvalidArgumentError(
                f"bytes {place.offset} to {place.offset + place.byte_size} are not inside of shared memory region "
                f"{place.region!r}, which has {region.byte_size}"
            )
        return region

    def _add(self, region: SystemRegion | CudaRegion) -> None:
        self.latest += 1
        # In this order: a thread that finds the region finds its number, too.
        self._numbers[region.name] = self.latest
        self._regions[region.name] = region

    def _check_new(self, name: str) -> None:
        if not self.enabled:
            raise UnsupportedError(OFF)
        if not name:
            raise InvalidArgumentError("the region has no name; expected one that requests can use")
        if name in self._regions:
            raise AlreadyExistsError(f"shared memory region {name!r} is registered already; unregister it first")


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"shared memory region {name!r} is not registered; register it first")
