"""Which tensors of a request lie in shared memory: those that the caller made there, and those that are put there for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from protos.datatypes import BY_WIRE, Datatype
from serve.client.errors import InferenceClientError, InvalidRequest
from serve.client.sharing.shared_region import SharedRegion
from serve.client.values.places import Place
from serve.client.values.tensors import Array, datatype_named

if TYPE_CHECKING:
    from protos.inference_pb2 import ModelMetadataResponse

WORTH_SHARING_BYTES = 128 * 1024  # measured: up to here a message costs no more; at 512 KiB it costs twice as much
SMALLEST_SLAB_BYTES = 256 * 1024
KEPT_BYTES = 256 * 2**20  # of regions that nobody uses at the moment


class SlabPool:
    """Regions that are used again and again, one tensor at a time. Safe to use from many threads.

    Attributes:
        is_on: whether the server takes shared memory, as far as is known.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._free: list[SharedRegion] = []
        self._registered: set[str] = set()
        self._abandoned: list[str] = []
        self._lock = threading.Lock()

    def take(self, byte_size: int) -> SharedRegion | None:
        """A region of at least so many bytes, for the caller alone; None if there is not enough shared memory."""
        rounded = max(SMALLEST_SLAB_BYTES, 1 << (byte_size - 1).bit_length())
        with self._lock:
            for index, slab in enumerate(self._free):
                if rounded <= slab.byte_size < 2 * rounded:
                    return self._free.pop(index)
        try:
            return SharedRegion(rounded)
        except InferenceClientError:
            return None

    def give_back(self, slabs: Iterable[SharedRegion]) -> None:
        """Keep regions for later; when they are too much memory, the longest unused ones go."""
        surplus = []
        with self._lock:
            self._free += slabs
            while sum(slab.byte_size for slab in self._free) > KEPT_BYTES:
                surplus.append(self._free.pop(0))
        self.abandon(surplus)

    def abandon(self, slabs: Iterable[SharedRegion]) -> None:
        """Give regions up: the server may still write into them. Their names wait to be unregistered."""
        for slab in slabs:
            slab.unlink()
            with self._lock:
                if slab.name in self._registered:
                    self._registered.remove(slab.name)
                    self._abandoned.append(slab.name)

    def take_abandoned(self) -> list[str]:
        """The names that are to be unregistered; they are the caller's from now on."""
        if not self._abandoned:
            return []
        with self._lock:
            names, self._abandoned = self._abandoned, []
        return names

    def not_unregistered(self, names: Iterable[str]) -> None:
        """The server did not hear of these; they wait again."""
        with self._lock:
            self._abandoned += names

    def is_registered(self, slab: SharedRegion) -> bool:
        """Whether the server knows the region, or may know it."""
        return slab.name in self._registered

    def mark_registered(self, slab: SharedRegion) -> None:
        """The server may know the region from now on."""
        with self._lock:
            self._registered.add(slab.name)

    def mark_unregistered(self, slab: SharedRegion) -> None:
        """The server does not know the region."""
        with self._lock:
            self._registered.discard(slab.name)

    def take_all(self) -> list[str]:
        """Give everything up, what requests under way use too; the names that are to be unregistered."""
        with self._lock:
            slabs, self._free = self._free, []
        self.abandon(slabs)
        with self._lock:
            in_use, self._registered = self._registered, set()
            self._abandoned += in_use
        return self.take_abandoned()


class SharedTensors:
    """The tensors of one request that lie in shared memory.

    Attributes:
        regions: all that the request speaks of, by name.
        into: places for outputs, by the outputs' names.
        own: the dtypes of those that are arrays of the caller.
    """

    def __init__(self, own: Iterable[SharedRegion], pool: SlabPool | None) -> None:
        """Nothing is shared yet.

        Args:
            own: the regions that the caller has open.
            pool: where large tensors are put that lie in none; None sends them.
        """
        self._own = tuple(own)
        self._pool = pool
        self.slabs: list[SharedRegion] = []
        self.regions: dict[str, SharedRegion] = {}
        self.into: dict[str, Place] = {}
        self.own: dict[str, np.dtype[Any]] = {}

    def find_place(self, _: str, array: Array) -> Place | None:
        """The place of an input: where it is, or where it was copied to; None if it is to be sent."""
        if array.dtype.hasobject:
            return None
        place = self._in_own(array)
        if place is not None or self._pool is None or array.nbytes < WORTH_SHARING_BYTES:
            return place
        slab = self._new_slab(array.nbytes)
        if slab is None:
            return None
        np.copyto(np.frombuffer(slab.bytes_at(0, array.nbytes), array.dtype).reshape(array.shape), array)
        return Place(region=slab.name, offset=0, byte_size=array.nbytes)

    def place_outputs(self, metadata: ModelMetadataResponse, into: Mapping[str, Array]) -> None:
        """Let outputs be written into arrays of the caller.

        Raises:
            InvalidRequest: an array does not lie in a region of this client, or has another dtype than the output.
        """
        dtypes = {tensor.name: datatype_named(tensor.datatype).array_dtype for tensor in metadata.outputs}
        for name, array in into.items():
            place = self._in_own(array) if isinstance(array, np.ndarray) else None
            if place is not None and array.dtype != dtypes.get(name, array.dtype):
                raise InvalidRequest(f"the array for output {name!r} has the dtype {array.dtype}, expected {dtypes[name]}")
            if place is None:
                raise InvalidRequest(
                    f"the array for output {name!r} does not lie in shared memory of this client; make it with "
                    "`with client.shared_region(BYTES) as region: region.array(shape, dtype)`"
                )
            self.into[name], self.own[name] = place, array.dtype

    def reserve_outputs(
        self, metadata: ModelMetadataResponse, inputs: Mapping[str, Any], wanted: Collection[str] | None, *, batching: bool
    ) -> None:
        """Let large outputs whose size is known be written into the pool's regions.

        Args:
            metadata: the model's.
            inputs: name -> array.
            wanted: names of outputs; None for all.
            batching: whether outputs have as many rows as the inputs.
        """
        if self._pool is None:
            return
        rows = _rows(metadata, inputs) if batching else None
        for tensor in metadata.outputs:
            itemsize = BY_WIRE[tensor.datatype].itemsize if tensor.datatype in BY_WIRE else None
            shape = [rows if position == 0 and size == -1 else size for position, size in enumerate(tensor.shape)]
            unwanted = tensor.name in self.into or (wanted is not None and tensor.name not in wanted)
            if unwanted or itemsize is None or any(size is None or size < 0 for size in shape):
                continue
            byte_size = math.prod(size or 0 for size in shape) * itemsize
            slab = self._new_slab(byte_size) if byte_size >= WORTH_SHARING_BYTES else None
            if slab is not None:
                self.into[tensor.name] = Place(region=slab.name, offset=0, byte_size=byte_size)

    def output_bytes(self, name: str, byte_size: int) -> memoryview:
        """The bytes of an output that the server has written."""
        place = self.into[name]
        return self.regions[place.region].bytes_at(place.offset, min(byte_size, place.byte_size))

    def check_own(self, name: str, datatype: Datatype) -> None:
        """Refuse an output whose bytes are not what the caller's array takes them for.

        Raises:
            InferenceClientError: they are of another dtype (code "INTERNAL").
        """
        if datatype.array_dtype != self.own[name]:
            text = f"output {name!r} of the server's answer is {datatype.wire}, but the array for it has the dtype"
            raise InferenceClientError(f"{text} {self.own[name]}", code="INTERNAL")

    def write_own(self, name: str, raw: bytes) -> None:
        """Put an output that came in the message where the caller wants it.

        Raises:
            InferenceClientError: it is longer than the array (code "INTERNAL").
        """
        place = self.into[name]
        if len(raw) > place.byte_size:
            text = f"output {name!r} of the server's answer has {len(raw)} bytes, the array for it {place.byte_size}"
            raise InferenceClientError(text, code="INTERNAL")
        self.output_bytes(name, len(raw))[:] = raw

    def _in_own(self, array: Array) -> Place | None:
        for region in self._own:
            place = region.place_of(array)
            if place is not None:
                self.regions[region.name] = region
                return place
        return None

    def _new_slab(self, byte_size: int) -> SharedRegion | None:
        slab = None if self._pool is None else self._pool.take(byte_size)
        if slab is not None:
            self.slabs.append(slab)
            self.regions[slab.name] = slab
        return slab


def _rows(metadata: ModelMetadataResponse, inputs: Mapping[str, Any]) -> int | None:
    for tensor in metadata.inputs:
        shape: tuple[int, ...] = getattr(inputs.get(tensor.name), "shape", ())
        if len(shape) and len(shape) == len(tensor.shape) and tensor.shape[0] == -1:
            return int(shape[0])
    return None
