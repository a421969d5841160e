"""A region of the caller's: made, told to the server, and taken back."""

from __future__ import annotations

from serve.client.errors import InferenceClientError, Repeat
from serve.client.exchanges.calls import Exchange
from serve.client.exchanges.control import register_region, unregister_region
from serve.client.infer_exchange import InferState
from serve.client.sharing.shared_exchange import MAY_STILL_RUN, unregister_all
from serve.client.sharing.shared_region import SharedRegion


def open_region(state: InferState, byte_size: int) -> Exchange[SharedRegion]:
    """Make a region and register it; its name is gone again if the server refuses it."""
    yield from _unregister_left(state)
    region = SharedRegion(byte_size)
    try:
        yield from register_region(region.name, region.key, region.byte_size)
    except BaseException as error:
        region.unlink()
        if _may_have_been_heard(error):
            state.leave(region.name)
        raise
    state.add_region(region)
    return region


def close_region(state: InferState, region: SharedRegion) -> Exchange[None]:
    """Unregister a region and remove its name, whether the server answers or not."""
    state.remove_region(region)
    region.unlink()
    state.leave(region.name)
    yield from _unregister_left(state)


def take_back(state: InferState) -> Exchange[None]:
    """Unregister whatever the server may know of this client, as far as it answers."""
    if state.pool is not None:
        yield from unregister_all(state.pool)
    state.leave(*(region.name for region in state.regions))  # a block that ends later can say no more
    yield from _unregister_left(state)


def _unregister_left(state: InferState) -> Exchange[None]:
    """The server holds the memory of a region until it is told; whoever gives up waiting leaves that to the next one."""
    names = state.take_left()
    try:
        while names:
            yield from unregister_region(names[0])
            names = names[1:]
    except InferenceClientError:
        return  # the server is gone, or going: with it goes what it has open
    except BaseException:
        state.leave(*names)
        raise


def _may_have_been_heard(error: BaseException) -> bool:
    if not isinstance(error, InferenceClientError):
        return True  # somebody has given up waiting
    return error.code in MAY_STILL_RUN and error.repeat is not Repeat.SAFE
