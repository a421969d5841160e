"""The garbage collector while a server runs."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref
from pathlib import Path

import pytest

from serve.backends.onnx_runtime.backend import OnnxRuntime
from serve.collector import NEW_OBJECTS, seldom_collecting
from serve.engine.backend import DevicePlacement
from serve.server import Ready, ServerOptions, serve
from serve.transports.transport import TransportName
from tests.models import save_mlp


class Circle:
    """Keeps itself."""

    def __init__(self) -> None:
        self.me = self


def test_it_looks_seldom_and_not_at_what_was_there() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with seldom_collecting():
        assert gc.get_threshold() == (NEW_OBJECTS, *before[1:])
        assert gc.get_freeze_count() > frozen
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_circles_are_found_all_the_same() -> None:
    with seldom_collecting():
        circles = [weakref.ref(Circle()) for _ in range(3 * NEW_OBJECTS)]
        assert circles[0]() is None


def test_an_error_leaves_the_collector_as_it_was() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), seldom_collecting():
        raise KeyError
    assert gc.get_threshold() == before


@pytest.mark.parametrize(("transport", "is_seldom"), [(TransportName.NGHTTP2, True), (TransportName.GRPCIO, False)])
def test_only_the_transport_that_leaves_no_circles_has_it_look_seldom(
    tmp_path: Path, transport: TransportName, is_seldom: bool
) -> None:
    placement = DevicePlacement(use_gpu=False, threads=1)
    options = ServerOptions(
        path=save_mlp(tmp_path / "mlp.onnx"), grpc_port=0, placement=placement, http=None, transport=transport
    )
    seen: list[int] = []

    def end(_: Ready) -> None:
        seen.append(gc.get_threshold()[0])
        os.kill(os.getpid(), signal.SIGTERM)

    asyncio.run(serve(options, OnnxRuntime(), end))
    assert [threshold == NEW_OBJECTS for threshold in seen] == [is_seldom]
