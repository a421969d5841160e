"""A region of the caller's: made, told to the server, and taken back."""

from __future__ import annotations

from serve.client.calls import Exchange
from serve.client.control import register_region, unregister_region
from serve.client.errors import InferenceClientError
from serve.client.infer_exchange import InferState
from serve.client.sharing.shared_region import SharedRegion


def open_region(state: InferState, byte_size: int) -> Exchange[SharedRegion]:
    """Make a region and register it; its name is gone again if the server refuses it."""
    region = SharedRegion(byte_size)
    try:
        yield from register_region(region.name, region.key, region.byte_size)
    except BaseException:
        region.unlink()
        raise
    state.add_region(region)
    return region


def close_region(state: InferState, region: SharedRegion) -> Exchange[None]:
    """Unregister a region and remove its name, whether the server answers or not."""
    state.remove_region(region)
    region.unlink()
    try:
        yield from unregister_region(region.name)
    except InferenceClientError:
        return  # the server is gone, or going: with it goes what it has open
