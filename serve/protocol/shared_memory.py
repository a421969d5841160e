"""Tensors that a client on this machine passes in shared memory instead of sending them.

A region is identified by its name, in system memory or on a CUDA device. Names are never disclosed to other clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from halfserve.protos.datatypes import Datatype
from halfserve.protos.shared_memory_parameters import BYTE_SIZE, OFFSET, PARAMETERS, REGION
from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.errors import (
    AlreadyExistsError,
    ByteCountError,
    FailedPreconditionError,
    InferenceError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
)
from halfserve.serve.engine.resource_limits import most_regions
from halfserve.serve.engine.tensors import Array, DeviceBytes, Outside, RawInput, Reader
from halfserve.serve.protocol.raw_tensors import LENGTH_PREFIX, LENGTH_PREFIX_BYTES, from_raw
from halfserve.serve.protocol.shared_memory_regions import (
    CudaRegion,
    SharedMemoryMode,
    SystemRegion,
    open_cuda_region,
    open_system_region,
)

OFF: Final = "shared memory is off on this server; start it with --shared-memory, or send the bytes"
MAX_BYTES: Final = 2**31 - 1  # most bytes of one request's inputs, as in one message
WINDOW_BYTES: Final = 2**16  # bytes that are read ahead in a BYTES tensor
MAX_BOUND: Final = 1024  # most bindings of all clients together


class Region(Protocol):
    """Memory that a client has registered."""

    @property
    def name(self) -> str: ...
    @property
    def byte_size(self) -> int: ...
    @property
    def mapping(self) -> memoryview | None: ...  # all its bytes, where the server computes on them without a copy

    def read_into(self, offset: int, target: memoryview) -> None:
        """Copy bytes of the region to `target`.

        Raises:
            InferenceError: the memory is gone.
        """

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copy bytes into the region.

        Raises:
            InferenceError: the memory is gone.
        """


Kind = TypeVar("Kind", SystemRegion, CudaRegion)


@dataclass(frozen=True, kw_only=True)
class RegionSlice:
    """The location of one tensor in a region."""

    region: str  # the region's name
    offset: int  # distance from the region's start, in bytes
    byte_size: int  # size of the tensor, or of the room for it


class RegionBinding:
    """The inputs of equal requests, as found in the registered regions by the first of them; see `SharedMemory.bind`.

    Attributes:
        is_bound: whether no region was unregistered since, so that `outside` holds.
        outside: mapped array or reader of each input, None for an input whose bytes are in the request; None if all are.
    """

    __slots__ = ("is_bound", "outside")

    def __init__(self) -> None:
        self.is_bound = False
        self.outside: Outside | None = None

    def release(self) -> None:
        """Let go of the regions, so that their files can be closed."""
        self.is_bound = False
        self.outside = None


class SharedMemory:
    """The registered regions.

    Attributes:
        enabled: whether clients may use shared memory.
        uses: number of unanswered requests that use a region, by the region's name; see `RegionUse`.
        ending: names of the regions that are unregistered once their requests have ended.
        on_lost_device: called on the event loop with the error of a device that is lost to this process.
    """

    def __init__(self, *, enabled: bool, mode: SharedMemoryMode = SharedMemoryMode.SAFE) -> None:
        self.enabled = enabled
        self._mode = mode
        # Number of the latest registration, counted from 1. A request notes it when it arrives: a region that is registered
        # later under the same name may be another client's.
        self.latest = 0
        self._regions: dict[str, SystemRegion | CudaRegion] = {}
        self._numbers: dict[str, int] = {}
        self.uses: dict[str, int] = {}
        self.ending: set[str] = set()
        self.on_lost_device: Callable[[str], None] = lambda _: None
        self._bindings: list[RegionBinding] = []

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a region of system memory.

        Raises:
            UnsupportedError: shared memory is off.
            InvalidArgumentError: the name or key is invalid, or the file is missing or smaller than the region.
            AlreadyExistsError: the name is taken.
            FailedPreconditionError: the limit of regions is reached.
        """
        self._check_new(name, TritonPhrase.REGION_NOT_OPENED, key=key)
        count, most = sum(isinstance(region, SystemRegion) for region in self._regions.values()), most_regions()
        if count >= most:
            raise FailedPreconditionError(
                f"{count} shared memory regions are registered, which is the limit; unregister unused ones, or send the bytes"
            )
        self._add(open_system_region(name, key, offset, byte_size, self._mode))

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Open a region on a CUDA device.

        Raises:
            UnsupportedError: shared memory is off, or there is no CUDA device.
            InvalidArgumentError: the name or handle is invalid, or the memory cannot be opened or is smaller than the region.
            AlreadyExistsError: the name is taken.
        """
        self._check_new(name, TritonPhrase.REGION_INVALID, region=name)
        loop = asyncio.get_running_loop()

        def on_lost_device(fault: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.on_lost_device, fault)

        self._add(open_cuda_region(name, raw_handle, device_id, byte_size, on_lost_device))

    def unregister(self, name: str, kind: type[Kind]) -> None:
        """Close a region of one kind; "" closes all of that kind. Unknown names are ignored.

        A region that requests use is closed when the last of them ends; until then it stays registered, as in Triton.
        """
        for region in [r for r in self._regions.values() if isinstance(r, kind) and name in {"", r.name}]:
            if region.name in self.uses:
                self.ending.add(region.name)
            else:
                self._close(region.name)

    def ended(self, name: str) -> None:
        """Close a region whose last request has ended, if it was unregistered meanwhile."""
        if name in self.ending:
            self._close(name)

    def _close(self, name: str) -> None:
        self.ending.discard(name)
        del self._regions[name]
        del self._numbers[name]
        self._release()

    def regions(self, name: str, kind: type[Kind]) -> list[Kind]:
        """Return the region of this name and kind; "" lists all of the kind.

        Raises:
            NotFoundError: the region is not registered.
        """
        found = [region for region in self._regions.values() if isinstance(region, kind) and name in {"", region.name}]
        if name and not found:
            is_system = kind is SystemRegion
            phrase = TritonPhrase.UNKNOWN_SYSTEM_REGION if is_system else TritonPhrase.UNKNOWN_CUDA_REGION
            raise _unknown(name).like(phrase, region=name)
        return found

    def bind(
        self,
        binding: RegionBinding,
        slices: Sequence[RegionSlice],
        inputs: Sequence[RawInput],
        input_slices: Sequence[RegionSlice | None] | None,
    ) -> None:
        """Check a request's slices, and keep where its inputs are until a region is unregistered.

        Args:
            binding: gets the result.
            slices: slices of all inputs and outputs.
            inputs: the inputs, of checked sizes.
            input_slices: slice of each input, None for an input whose bytes are in the request; None if all are.

        Raises:
            InferenceError: see `check`.
        """
        for place in slices:
            self.check(place)
        if len(self._bindings) >= MAX_BOUND:
            self._release()
        if input_slices is not None:
            pairs = zip(input_slices, inputs, strict=True)
            binding.outside = tuple([None if place is None else self._source(place, entry) for place, entry in pairs])
        binding.is_bound = True
        self._bindings.append(binding)

    def _source(self, place: RegionSlice, entry: RawInput) -> Array | Reader:
        """Return an input's array in a mapped region, or the function that reads its bytes."""
        region = self.check(place)
        if isinstance(region, CudaRegion):
            address = region.memory.address(place.offset)
            return DeviceBytes(region.device_id, address, partial(region.read_into, place.offset))
        if region.mapping is None:
            return partial(region.read_into, place.offset)
        return np.frombuffer(region.mapping, entry.dtype, entry.elements, place.offset).reshape(entry.shape)

    def _release(self) -> None:
        for binding in self._bindings:
            binding.release()
        self._bindings.clear()

    def read(self, place: RegionSlice, *, since: int | None = None) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Copy a tensor's bytes; thread-safe.

        Raises:
            InferenceError: see `check` and `Region.read_into`.
        """
        self.check(place, since=since)
        data = np.empty(place.byte_size, np.uint8)
        self.read_into(place, data.data, since=since)
        return data

    def read_into(self, place: RegionSlice, target: memoryview, *, since: int | None = None) -> None:
        """Copy a tensor's bytes to `target`; thread-safe.

        Raises:
            InferenceError: see `check` and `Region.read_into`.
        """
        self.check(place, since=since).read_into(place.offset, target)

    def copies(self, places: Sequence[RegionSlice | None]) -> list[bytes | None] | None:
        """Copy the bytes of inputs, None for one that is sent; None if one lies on a device or cannot be read."""
        try:
            regions = [None if place is None else self.check(place) for place in places]
            if any(isinstance(region, CudaRegion) for region in regions):
                return None
            return [None if place is None else self.read(place).tobytes() for place in places]
        except InferenceError:
            return None  # the request itself gets the error

    def write(self, place: RegionSlice, data: bytes | memoryview, *, since: int | None = None) -> None:
        """Write a tensor's bytes to its slice; thread-safe.

        Raises:
            InvalidArgumentError: the bytes do not fit the slice.
            InferenceError: see `check` and `Region.write`.
        """
        region = self.check(place, since=since)
        if len(data) > place.byte_size:
            raise InvalidArgumentError(
                f"an output of {len(data)} bytes does not fit its {place.byte_size} bytes of shared memory region "
                f"{place.region!r}; make them more"
            )
        region.write(place.offset, data)

    def check(self, place: RegionSlice, *, since: int | None = None) -> Region:
        """Return the region of a slice.

        Args:
            place: the slice of one tensor.
            since: `latest` when the request arrived; None for a request that has just arrived.

        Raises:
            UnsupportedError: shared memory is off.
            NotFoundError: the region is not registered, or has been replaced since the request arrived.
            InvalidArgumentError: the slice exceeds the region.
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
            ).like(
                TritonPhrase.REGION_SIZE if 0 <= place.offset < region.byte_size else TritonPhrase.REGION_OFFSET,
                region=place.region,
            )
        return region

    def _add(self, region: SystemRegion | CudaRegion) -> None:
        self.latest += 1
        # In this order: a thread that finds the region also finds its number.
        self._numbers[region.name] = self.latest
        self._regions[region.name] = region

    def _check_new(self, name: str, unnamed: TritonPhrase, **facts: str) -> None:
        if not self.enabled:
            raise UnsupportedError(OFF)
        if not name:
            raise InvalidArgumentError("the region has no name; expected one that requests can use").like(unnamed, **facts)
        if name in self._regions:
            text = f"shared memory region {name!r} is registered already; unregister it first"
            raise AlreadyExistsError(text).like(TritonPhrase.REGION_EXISTS, region=name)


class RegionUse:
    """Keeps the regions of one request registered until its end. On the event loop only."""

    __slots__ = ("_has_ended", "_memory", "_names", "_uses")

    def __init__(self, memory: SharedMemory, places: Sequence[RegionSlice]) -> None:
        self._memory = memory
        self._uses = memory.uses
        self._names = {place.region for place in places}
        self._has_ended = False

    def begin(self) -> None:
        """Count the request as queued. Does nothing if the request has ended before."""
        if not self._has_ended:
            for name in self._names:
                self._uses[name] = self._uses.get(name, 0) + 1

    def end(self) -> None:
        """Count the request as answered, or as abandoned by its client. May be called twice."""
        if not self._has_ended:
            self._has_ended = True
            for name in self._names:
                count = self._uses.pop(name, 0) - 1
                if count > 0:
                    self._uses[name] = count
                elif self._memory.ending:
                    self._memory.ended(name)


def _unknown(name: str) -> NotFoundError:
    error = NotFoundError(f"shared memory region {name!r} is not registered; register it first")
    return error.like(TritonPhrase.UNKNOWN_REGION, region=name)


def slice_of(what: str, parameters: Any) -> RegionSlice | None:
    """Return the slice that a tensor's map of InferParameter names; None if the tensor's bytes are in the request.

    `what`: beginning of error texts, such as "input 'x'".

    Raises:
        InvalidArgumentError: the parameters are incomplete or of the wrong kind.
    """
    if not any(name in parameters for name in PARAMETERS):
        return None
    if REGION not in parameters or BYTE_SIZE not in parameters:
        missing, there = (REGION, BYTE_SIZE) if REGION not in parameters else (BYTE_SIZE, REGION)
        raise InvalidArgumentError(f"{what} has parameter {there} without {missing}; expected both")
    region = parameters[REGION]
    if not region.string_param:
        raise InvalidArgumentError(f"{what}: parameter {REGION} is not text, expected a region's name")
    expected = "bytes as an int64"
    offset = whole_number(parameters[OFFSET], f"{what}: parameter {OFFSET}", expected) if OFFSET in parameters else 0
    byte_size = whole_number(parameters[BYTE_SIZE], f"{what}: parameter {BYTE_SIZE}", expected)
    return RegionSlice(region=region.string_param, offset=offset, byte_size=byte_size)


def put_slice(parameters: Any, place: RegionSlice, byte_size: int) -> None:
    """Write the slice of an output of `byte_size` bytes into a response's parameters."""
    parameters[REGION].string_param = place.region
    parameters[BYTE_SIZE].int64_param = byte_size
    if place.offset:
        parameters[OFFSET].int64_param = place.offset


def check_size(place: RegionSlice, datatype: Datatype, shape: Sequence[int]) -> None:
    """Compare a slice's size with the tensor's shape before reading it.

    Raises:
        ValueError: the size differs, or is too small for elements of variable size.
    """
    elements = math.prod(shape)
    if datatype.itemsize is None:
        expected, words, fits = elements * LENGTH_PREFIX_BYTES, "at least ", elements * LENGTH_PREFIX_BYTES <= place.byte_size
    else:
        expected, words, fits = elements * datatype.itemsize, "", elements * datatype.itemsize == place.byte_size
    if not fits:
        text = f"has {place.byte_size} bytes, expected {words}{expected} for {datatype.wire} of shape {list(shape)}"
        raise ByteCountError(text, TritonPhrase.BYTE_SIZE, given=place.byte_size, expected=expected)


def read_tensor(memory: SharedMemory, place: RegionSlice, datatype: Datatype, shape: Sequence[int], since: int) -> Array:
    """Copy a tensor of checked size, in the format of `from_raw`; thread-safe.

    Raises:
        InferenceError: the region is gone or has shrunk; `since`: see `SharedMemory.check`.
        ValueError: the bytes do not fit the shape.
    """
    if datatype.itemsize is None:
        return _read_elements(memory, place, shape, since)
    array = from_raw(memory.read(place, since=since).data, datatype, shape)
    return array.view(datatype.array_dtype) if datatype.numpy is None else array


def _read_elements(memory: SharedMemory, place: RegionSlice, shape: Sequence[int], since: int) -> Array:
    """Read BYTES elements in windows: the slice may be much larger than the elements."""
    expected, data, position = math.prod(shape), bytearray(), 0
    elements: list[bytes] = []

    def reach(end: int) -> None:
        if end > place.byte_size:
            raise ValueError(
                f"ends inside BYTES element {len(elements)}, expected a {LENGTH_PREFIX_BYTES}-byte length and as many bytes"
            )
        if (start := len(data)) < end:
            data.extend(bytes(min(place.byte_size, end + WINDOW_BYTES) - start))
            part = RegionSlice(region=place.region, offset=place.offset + start, byte_size=len(data) - start)
            memory.read_into(part, memoryview(data)[start:], since=since)

    while len(elements) < expected:
        start = position + LENGTH_PREFIX_BYTES
        reach(start)
        position = start + LENGTH_PREFIX.unpack_from(data, start - LENGTH_PREFIX_BYTES)[0]
        reach(position)
        elements.append(bytes(memoryview(data)[start:position]))
    if position < place.byte_size:
        raise ValueError(f"has more than {expected} BYTES elements, expected {expected} for shape {list(shape)}")
    array = np.empty(expected, object)
    array[:] = elements
    return array.reshape(shape)


def whole_number(parameter: Any, what: str, expected: str) -> int:
    """Return the value of an InferParameter that is a whole number.

    Raises:
        InvalidArgumentError: it is none of 0 or more; `what` and `expected` are the beginning and the end of the text.
    """
    choice = parameter.WhichOneof("parameter_choice")
    number: int = getattr(parameter, choice) if choice in {"int64_param", "uint64_param"} else -1
    if number < 0:
        raise InvalidArgumentError(f"{what} is not a whole number of 0 or more, expected {expected}")
    return number
