"""What goes wrong with a region on a device; what goes right is in tests/serve/transports/test_cuda_shared_memory.py."""

from __future__ import annotations

import pytest

from halfserve.serve.engine.cuda_driver import HANDLE_BYTES, CudaDriver, CudaError, SharedDeviceMemory
from halfserve.serve.engine.errors import (
    InferenceError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
    is_device_lost,
)
from halfserve.serve.protocol import shared_memory_regions
from halfserve.serve.protocol.shared_memory_regions import CudaRegion, has_cuda, open_cuda_region
from tests.serve.cuda_emulator.library import driver_of, library_path
from tests.serve.cuda_emulator.owner import owner


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return library_path("emulated", tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(library: str, monkeypatch: pytest.MonkeyPatch) -> CudaDriver:
    driver = driver_of(library)
    monkeypatch.setattr(shared_memory_regions, "cuda_driver", lambda: driver)
    return driver


@pytest.mark.parametrize(
    ("is_lost", "error", "text"),
    [
        (False, InvalidArgumentError, "region 'r' cannot be reached: an illegal .*; keep"),
        (True, UnavailableError, "CUDA device 0, which holds shared memory region 'r', was lost to the server; send"),
    ],
)
def test_who_is_to_blame_depends_on_the_device(
    monkeypatch: pytest.MonkeyPatch, driver: CudaDriver, library: str, is_lost: bool, error: type[InferenceError], text: str
) -> None:
    def refuse(*_: object) -> None:
        raise CudaError("an illegal memory access was encountered (CUDA error 700)", 700)

    faults: list[str] = []
    with owner(library, 16) as memory:
        region = open_cuda_region("r", memory.handle, 0, 16, faults.append)
        with monkeypatch.context() as patch:
            patch.setattr(driver, "call_within", refuse)
            patch.setattr(driver, "is_lost", lambda _: is_lost)
            with pytest.raises(error, match=text) as unread:
                region.read_into(0, memoryview(bytearray(4)))
            with pytest.raises(error, match=text) as unwritten:
                region.write(0, b"abcd")
    assert faults == ["an illegal memory access was encountered (CUDA error 700)"] * 2 * is_lost
    assert not any(is_device_lost(failed.value) for failed in (unread, unwritten)), "a copy on another device goes on"


def test_a_driver_that_has_lost_its_devices_has_none(monkeypatch: pytest.MonkeyPatch, driver: CudaDriver) -> None:
    assert has_cuda()

    def refuse(*_: object) -> None:
        raise CudaError("no CUDA-capable device is detected (CUDA error 100)")

    monkeypatch.setattr(driver, "_call", refuse)
    assert not has_cuda()
    with pytest.raises(UnsupportedError, match="this server has no CUDA device"):
        open_cuda_region("r", bytes(HANDLE_BYTES), 0, 16, print)


def test_a_size_that_the_driver_does_not_tell_is_taken_as_it_was_given(
    monkeypatch: pytest.MonkeyPatch, driver: CudaDriver, library: str
) -> None:
    del driver
    monkeypatch.setattr(SharedDeviceMemory, "byte_size", None)
    with owner(library, 16) as memory:
        region = open_cuda_region("r", memory.handle, 0, 64, print)
        assert isinstance(region, CudaRegion)
        with pytest.raises(InvalidArgumentError, match="cannot be reached"):
            region.read_into(32, memoryview(bytearray(32)))


def test_no_driver_means_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_regions, "cuda_driver", lambda: None)
    assert not has_cuda()
