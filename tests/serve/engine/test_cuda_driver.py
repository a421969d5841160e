from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfserve.serve.engine import cuda_driver as module
from halfserve.serve.engine.cuda_driver import (
    HANDLE_BYTES,
    CudaDriver,
    CudaError,
    SharedDeviceMemory,
    cuda_driver,
    device_count,
)
from tests.serve.cuda_emulator.library import LIBRARIES, driver_of, library_path
from tests.serve.cuda_emulator.owner import Owner, owner

SIZE = 1000
CONTENT = bytes(number % 251 for number in range(SIZE))


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return library_path(request.param, tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def driver(library: str) -> CudaDriver:
    return driver_of(library)


@pytest.fixture(scope="module")
def client(library: str) -> Iterator[Owner]:
    with owner(library, SIZE) as process:
        yield process


@pytest.fixture
def memory(driver: CudaDriver, client: Owner) -> SharedDeviceMemory:
    client.write(0, CONTENT)
    return driver.open_shared(client.handle, 0)


def read(memory: SharedDeviceMemory, offset: int, size: int) -> bytes:
    target = bytearray(size)
    memory.read_into(offset, memoryview(target))
    return bytes(target)


def test_memory_of_another_process_is_read_and_written(memory: SharedDeviceMemory, client: Owner) -> None:
    assert read(memory, 0, SIZE) == CONTENT
    memory.write(990, b"0123456789")
    assert client.read(980, 20) == CONTENT[980:990] + b"0123456789"
    client.write(500, b"new")
    assert read(memory, 499, 5) == CONTENT[499:500] + b"new" + CONTENT[503:504]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pieces_keep_their_bytes(memory: SharedDeviceMemory, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, SIZE))
    piece = data.draw(st.binary(max_size=SIZE - offset))
    memory.write(offset, piece)
    assert read(memory, offset, len(piece)) == piece


def test_the_size_is_that_of_the_owners_allocation(memory: SharedDeviceMemory) -> None:
    assert memory.byte_size is not None
    assert memory.byte_size >= SIZE  # the driver may round up


def test_any_thread_may_use_it(memory: SharedDeviceMemory) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda _: read(memory, 0, SIZE), range(32))) == {CONTENT}


def test_a_threads_context_is_restored(memory: SharedDeviceMemory, library: str) -> None:
    def leftover() -> int:
        read(memory, 0, 1)
        return int(ctypes.CDLL(library).cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(leftover).result() != 0, "it had none, and has none"


def test_a_missing_range_is_refused_in_the_drivers_words(memory: SharedDeviceMemory) -> None:
    beyond = 1 << 30  # a real driver rounds allocations up
    with pytest.raises(CudaError, match=r"invalid argument.* \(CUDA error 1\)"):
        read(memory, beyond, 16)
    with pytest.raises(CudaError, match="CUDA error"):
        memory.write(beyond, b"abc")


@pytest.mark.parametrize("handle", [bytes(HANDLE_BYTES), b"\xff" * HANDLE_BYTES])
def test_an_unknown_handle_is_refused(driver: CudaDriver, handle: bytes) -> None:
    with pytest.raises(CudaError, match="CUDA error"):
        driver.open_shared(handle, 0)


def test_a_device_that_is_not_there_is_refused(driver: CudaDriver, client: Owner) -> None:
    with pytest.raises(CudaError, match=r"\(CUDA error 101\)"):
        driver.open_shared(client.handle, 99)


def test_memory_is_closed_with_its_last_reference(driver: CudaDriver, client: Owner, library: str) -> None:
    opened = getattr(ctypes.CDLL(library), "emulated_opened", None)
    if opened is None:
        pytest.skip("only the emulated driver counts")
    gc.collect()
    before = opened()
    first, second = (driver.open_shared(client.handle, 0) for _ in range(2))
    del first
    assert read(second, 0, 1)
    assert opened() == before + 1
    del second
    assert opened() == before


def test_a_machine_without_a_driver_has_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRIVER_NAMES", ("no_such_library.so", "libc.so.6"))  # none, and one that is no driver
    monkeypatch.setattr(module, "cuda_driver", cuda_driver.__wrapped__)
    assert module.cuda_driver() is None
    assert device_count() == 0


def test_a_driver_tells_its_devices(driver: CudaDriver) -> None:
    assert driver.device_count >= 1
