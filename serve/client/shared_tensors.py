"""Places a request's tensors in shared memory: the slab pool, placement, registration and release."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from halfserve.protos.datatypes import BY_WIRE, Datatype
from halfserve.protos.inference_pb2 import ModelMetadataResponse
from halfserve.serve.client.array_conversion import Array, datatype_named
from halfserve.serve.client.errors import AlreadyExists, ClientError, InvalidRequest, ModelNotFound, Repeat, Unsupported
from halfserve.serve.client.exchange import Exchange, UnaryRpc
from halfserve.serve.client.infer_messages import (
    InferAnswer,
    InferResponse,
    Raw,
    SharedSlice,
    answer_of,
    array_of,
    output_arrays,
)
from halfserve.serve.client.management import register_region, unregister_region
from halfserve.serve.client.shared_regions import SharedRegion

WORTH_SHARING_BYTES = 128 * 1024  # measured: below, sending costs no more; at 512 KiB it costs twice as much
SMALLEST_SLAB_BYTES = 256 * 1024
KEPT_BYTES = 256 * 2**20  # most bytes of free regions that are kept
# After these statuses the server may still read and write the request's memory.
MAY_STILL_RUN = ("DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE", "UNKNOWN", "INTERNAL")


class SlabPool:
    """Reusable shared memory regions, each for one tensor at a time. Thread-safe."""

    def __init__(self) -> None:
        self.is_on = True  # whether the server supports shared memory, as far as is known
        self._free: list[SharedRegion] = []
        self._registered: set[str] = set()
        self._abandoned: list[str] = []
        self._lock = threading.Lock()

    def take(self, byte_size: int) -> SharedRegion | None:
        """Return a free region of at least `byte_size` bytes; None if there is not enough shared memory."""
        rounded = max(SMALLEST_SLAB_BYTES, 1 << (byte_size - 1).bit_length())
        with self._lock:
            for index, slab in enumerate(self._free):
                if rounded <= slab.byte_size < 2 * rounded:
                    return self._free.pop(index)
        try:
            return SharedRegion(rounded)
        except ClientError:
            return None

    def give_back(self, slabs: Iterable[SharedRegion]) -> None:
        """Keep regions for reuse; above KEPT_BYTES, abandon those unused for longest."""
        surplus = []
        with self._lock:
            self._free += slabs
            while sum(slab.byte_size for slab in self._free) > KEPT_BYTES:
                surplus.append(self._free.pop(0))
        self.abandon(surplus)

    def abandon(self, slabs: Iterable[SharedRegion]) -> None:
        """Give up regions that the server may still write to; their names are kept for unregistration."""
        for slab in slabs:
            slab.unlink()
            with self._lock:
                if slab.name in self._registered:
                    self._registered.remove(slab.name)
                    self._abandoned.append(slab.name)

    def take_abandoned(self) -> list[str]:
        """Return the names to unregister, and forget them."""
        if not self._abandoned:
            return []
        with self._lock:
            names, self._abandoned = self._abandoned, []
        return names

    def not_unregistered(self, names: Iterable[str]) -> None:
        with self._lock:
            self._abandoned += names

    def is_registered(self, slab: SharedRegion) -> bool:
        """Return whether the region is registered at the server, or may be."""
        return slab.name in self._registered

    def mark_registered(self, slab: SharedRegion) -> None:
        with self._lock:
            self._registered.add(slab.name)

    def mark_unregistered(self, slab: SharedRegion) -> None:
        with self._lock:
            self._registered.discard(slab.name)

    def take_all(self) -> list[str]:
        """Abandon all regions, even those in use; return the names to unregister."""
        with self._lock:
            slabs, self._free = self._free, []
        self.abandon(slabs)
        with self._lock:
            in_use, self._registered = self._registered, set()
            self._abandoned += in_use
        return self.take_abandoned()


class SharedTensors:
    """The tensors of one request that are in shared memory: in a region of the caller's, or, if they are large, of the pool."""

    def __init__(self, own: Iterable[SharedRegion], pool: SlabPool | None) -> None:
        self._own = tuple(own)
        self._pool = pool
        self.slabs: list[SharedRegion] = []
        self.regions: dict[str, SharedRegion] = {}  # regions that the request uses, by name
        self.into: dict[str, SharedSlice] = {}  # locations for outputs, by output name
        self.own: dict[str, np.dtype[Any]] = {}  # dtypes of the caller's arrays for outputs, by output name

    def find_place(self, _: str, array: Array) -> SharedSlice | None:
        """Location of an input in shared memory, where it is or where it was copied to; None if it must be sent."""
        if array.dtype.hasobject:
            return None
        place = self._in_own(array)
        if place is not None or self._pool is None or array.nbytes < WORTH_SHARING_BYTES:
            return place
        slab = self._new_slab(array.nbytes)
        if slab is None:
            return None
        np.copyto(np.frombuffer(slab.bytes_at(0, array.nbytes), array.dtype).reshape(array.shape), array)
        return SharedSlice(region=slab.name, offset=0, byte_size=array.nbytes)

    def place_outputs(self, metadata: ModelMetadataResponse, into: Mapping[str, Array]) -> None:
        """Have outputs written to arrays of the caller.
        Raises InvalidRequest: an array does not lie in a region of this client, or has another dtype than the output.
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
        """Have large outputs of known size written to regions of the pool.

        `wanted` names the requested outputs (None for all); `batching`: whether outputs have as many rows as the inputs.
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
                self.into[tensor.name] = SharedSlice(region=slab.name, offset=0, byte_size=byte_size)

    def output_bytes(self, name: str, byte_size: int) -> memoryview:
        place = self.into[name]
        return self.regions[place.region].bytes_at(place.offset, min(byte_size, place.byte_size))

    def take_own(self, name: str, datatype: Datatype, raw: Raw) -> None:
        """Check an output that belongs into the caller's array, and copy it there if it came in the message.
        Raises ClientError: its dtype differs from the array's, or it is longer than the array (code "INTERNAL").
        """
        place, what = self.into[name], f"output {name!r} of the server's answer"
        if datatype.array_dtype != self.own[name]:
            raise ClientError(
                f"{what} is {datatype.wire}, but the array for it has the dtype {self.own[name]}", code="INTERNAL"
            )
        if len(raw) > place.byte_size:
            raise ClientError(f"{what} has {len(raw)} bytes, the array for it {place.byte_size}", code="INTERNAL")
        self.output_bytes(name, len(raw))[:] = raw

    def _in_own(self, array: Array) -> SharedSlice | None:
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
        shape: Any = getattr(inputs.get(tensor.name), "shape", ())
        if len(shape) and len(shape) == len(tensor.shape) and tensor.shape[0] == -1:
            return int(shape[0])
    return None


class SharingRefused(Exception):  # noqa: N818  (leads to a second attempt, not to the caller)
    """The server does not accept shared memory from this client; the tensors must be sent."""


def ask_sharing(
    pool: SlabPool | None, sharing: SharedTensors, call: UnaryRpc, check: Callable[[InferResponse], None]
) -> Exchange[InferAnswer]:
    """Make a ModelInfer call with some tensors in shared memory; `check` raises if the response answers another request.

    Outputs in the caller's arrays are views of these; the caller owns the others.

    Raises SharingRefused: the server cannot open the memory of the pool; ClientError: any error of an inference.
    """
    if pool is not None:
        yield from unregister(pool, pool.take_abandoned())
    for slab in sharing.slabs:
        if pool is not None and not pool.is_registered(slab):
            yield from _register_slab(pool, slab)
    try:
        response = yield call
    except ModelNotFound:
        # A restarted server has no regions registered; another request may have registered them again meanwhile.
        if not sharing.regions:
            raise
        yield from _register_again(sharing)
        response = yield call
    except Unsupported:  # in a cluster: no member on this machine serves the model any more
        if pool is None or not pool.is_on:
            raise
        pool.is_on = False
        raise SharingRefused from None
    check(response)
    return answer_of(response, _outputs(sharing, response))


def settle(pool: SlabPool | None, sharing: SharedTensors, failure: BaseException | None) -> None:
    """Return the request's regions to the pool, or abandon them if the server may still write to them."""
    if pool is None:
        return
    ended = failure is None or (isinstance(failure, ClientError) and failure.code not in MAY_STILL_RUN)
    (pool.give_back if ended or isinstance(failure, SharingRefused) else pool.abandon)(sharing.slabs)


def _register_slab(pool: SlabPool, slab: SharedRegion) -> Exchange[None]:
    pool.mark_registered(slab)  # first, because the server may have received a call that is given up here
    try:
        yield from register_region(slab.name, slab.key, slab.byte_size)
    except AlreadyExists:
        return  # the server had received an attempt that was repeated
    except ClientError as error:
        may_be_registered = error.code in MAY_STILL_RUN
        if not may_be_registered or error.repeat is Repeat.SAFE:
            pool.mark_unregistered(slab)
        if may_be_registered:
            raise
        pool.is_on = False
        raise SharingRefused from None


def _register_again(sharing: SharedTensors) -> Exchange[None]:
    for region in sharing.regions.values():
        with contextlib.suppress(AlreadyExists):
            yield from register_region(region.name, region.key, region.byte_size)


def unregister(pool: SlabPool, names: Sequence[str]) -> Exchange[None]:
    """Unregister regions of the pool, while the server answers."""
    position = 0
    try:
        for position, name in enumerate(names):  # noqa: B007  (counted for what follows)
            yield from unregister_region(name)
    except ClientError:
        pool.not_unregistered(names[position:])
    except BaseException:  # cancelled or interrupted
        pool.not_unregistered(names[position:])
        raise


def _outputs(sharing: SharedTensors, response: InferResponse) -> dict[str, Array]:
    arrays = output_arrays(response, sharing.into)
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.name in sharing.own:
            sharing.take_own(tensor.name, datatype_named(tensor.datatype), raw)
            if raw:  # the server does not support shared memory for outputs
                del arrays[tensor.name]
        if tensor.name in sharing.into and tensor.name not in arrays:
            itemsize = (BY_WIRE[tensor.datatype].itemsize if tensor.datatype in BY_WIRE else None) or 0
            view = array_of(tensor, sharing.output_bytes(tensor.name, math.prod(tensor.shape) * itemsize))
            arrays[tensor.name] = view if tensor.name in sharing.own else view.copy()
    return {tensor.name: arrays[tensor.name] for tensor in response.outputs if tensor.name in arrays}
