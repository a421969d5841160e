from __future__ import annotations

import asyncio

import pytest

from serve.lost_device import DRAIN_S, LostDevice, LostDeviceError

FAULT = "CUDA failure 700: an illegal memory access was encountered"


def test_a_supervised_server_leaves_soon_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()
    lost = LostDevice(stop, is_supervised=True)
    assert (stop.is_set(), lost.shorten(30.0)) == (False, 30.0)
    lost.check()
    lost.tell(FAULT)
    lost.tell(FAULT)
    assert stop.is_set()
    assert (lost.shorten(30.0), lost.shorten(0.5)) == (DRAIN_S, 0.5)
    with pytest.raises(LostDeviceError, match=FAULT):
        lost.check()
    assert caplog.messages == ["a device computes for this process no more; another process takes over"]


def test_any_other_server_goes_on_and_says_what_would_help(caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()
    lost = LostDevice(stop, is_supervised=False)
    for _ in range(2):
        lost.tell(FAULT)
    lost.check()
    assert (stop.is_set(), lost.shorten(30.0)) == (False, 30.0)
    assert caplog.messages == [
        "a device computes for this process no more; with --supervise another process would take over now"
    ]
