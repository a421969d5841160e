"""Asking with tensors in shared memory: registered before, read after, and given back or given up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

from protos.datatypes import BY_WIRE
from protos.inference_pb2 import ModelInferResponse
from serve.client.errors import AlreadyExists, InferenceClientError, ModelNotFound, Repeat
from serve.client.exchanges.calls import Call, Exchange
from serve.client.exchanges.control import register_region, unregister_region
from serve.client.exchanges.messages import array_of, output_arrays
from serve.client.sharing.shared_region import SharedRegion
from serve.client.sharing.shared_tensors import SharedTensors, SlabPool
from serve.client.values.answer import InferAnswer, answer_of
from serve.client.values.tensors import Array, datatype_named

# After these nobody knows whether the server still reads and writes the request's memory.
MAY_STILL_RUN = ("DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE", "UNKNOWN", "INTERNAL")


class SharingRefused(Exception):  # noqa: N818  (a reason to go another way, not an error)
    """The server takes no shared memory from this client."""


def ask_sharing(
    pool: SlabPool | None, sharing: SharedTensors, call: Call, check: Callable[[ModelInferResponse], None]
) -> Exchange[InferAnswer]:
    """Make a ModelInfer call whose tensors lie partly in shared memory.

    Args:
        pool: the client's; None where it has none.
        sharing: the tensors in shared memory.
        call: to make.
        check: raises for an answer that is not to the request.

    Returns:
        The answer. Outputs in arrays of the caller are views of them, the others are the caller's own.

    Raises:
        SharingRefused: the server cannot reach the memory that the pool has given.
        InferenceClientError: as any inference.
    """
    if pool is not None:
        yield from _unregister(pool, pool.take_abandoned())
    for slab in sharing.slabs:
        if pool is not None and not pool.is_registered(slab):
            yield from _register_slab(pool, slab)
    try:
        response = yield call
    except ModelNotFound:
        # A server that was started again knows no regions. If it does now, another request may have told it meanwhile.
        if not sharing.regions:
            raise
        yield from _register_again(sharing)
        response = yield call
    check(response)
    return answer_of(response, _outputs(sharing, response))


def settle(pool: SlabPool | None, sharing: SharedTensors, failure: BaseException | None) -> None:
    """Give the pool its regions back, or give them up where the server may still write into them."""
    if pool is None:
        return
    ended = failure is None or (isinstance(failure, InferenceClientError) and failure.code not in MAY_STILL_RUN)
    (pool.give_back if ended or isinstance(failure, SharingRefused) else pool.abandon)(sharing.slabs)


def _register_slab(pool: SlabPool, slab: SharedRegion) -> Exchange[None]:
    pool.mark_registered(slab)  # before it is: a call that is given up may be heard all the same
    try:
        yield from register_region(slab.name, slab.key, slab.byte_size)
    except AlreadyExists:
        return  # a repetition of a call that the server had heard after all
    except InferenceClientError as error:
        may_be_heard = error.code in MAY_STILL_RUN
        if not may_be_heard or error.repeat is Repeat.SAFE:
            pool.mark_unregistered(slab)
        if may_be_heard:
            raise
        pool.is_on = False
        raise SharingRefused from None


def _register_again(sharing: SharedTensors) -> Exchange[None]:
    for region in sharing.regions.values():
        with contextlib.suppress(AlreadyExists):
            yield from register_region(region.name, region.key, region.byte_size)


def unregister_all(pool: SlabPool) -> Exchange[None]:
    """Take everything from the server, as far as it answers."""
    yield from _unregister(pool, pool.take_all())


def _unregister(pool: SlabPool, names: Sequence[str]) -> Exchange[None]:
    position = 0
    try:
        for position, name in enumerate(names):  # noqa: B007  (counted for what follows)
            yield from unregister_region(name)
    except InferenceClientError:
        pool.not_unregistered(names[position:])
    except BaseException:  # somebody has given up waiting
        pool.not_unregistered(names[position:])
        raise


def _outputs(sharing: SharedTensors, response: ModelInferResponse) -> dict[str, Array]:
    arrays = output_arrays(response, sharing.into)
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.name in sharing.own:
            sharing.check_own(tensor.name, datatype_named(tensor.datatype))
            if raw:  # a server that knows no shared memory for outputs
                sharing.write_own(tensor.name, raw)
                del arrays[tensor.name]
        if tensor.name in sharing.into and tensor.name not in arrays:
            itemsize = (BY_WIRE[tensor.datatype].itemsize if tensor.datatype in BY_WIRE else None) or 0
            view = array_of(tensor, sharing.output_bytes(tensor.name, math.prod(tensor.shape) * itemsize))
            arrays[tensor.name] = view if tensor.name in sharing.own else view.copy()
    return {tensor.name: arrays[tensor.name] for tensor in response.outputs if tensor.name in arrays}
