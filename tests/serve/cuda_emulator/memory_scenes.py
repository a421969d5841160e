"""Where batches for the emulated device are put together; see scenes.py."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntimeBackend
from halfserve.serve.engine.backend import Backend, BackendView, DevicePlacement
from halfserve.serve.engine.cuda_driver import DRIVER_NAMES, cuda_driver
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.execution.assembly import assemble, device_inputs
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.execution.instance import Instance
from halfserve.serve.engine.execution.memory_limit import MemoryLimit
from halfserve.serve.engine.execution.runners import make_instance
from halfserve.serve.engine.execution.tensor_runner import Supervision
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import Answered, Failed, Results
from halfserve.serve.engine.tensors import DeviceBytes, RawInput, RawInputs, RawLayout, Tensors
from halfserve.serve.protocol.shared_memory import RegionBinding, RegionSlice, SharedMemory
from halfserve.serve.protocol.shared_memory_regions import CudaRegion
from tests.serve.backends.support import load_backend
from tests.serve.cuda_emulator.copying_model import COLUMNS, load, log, rows, save, with_graphs
from tests.serve.cuda_emulator.owner import owner


def requests(count: int, each: int) -> list[InferRequest]:
    """As they come from the wire: raw bytes, with numbers that go on."""
    entry = RawInput("x", np.dtype(np.float32), (each, COLUMNS), each * COLUMNS, 4 * each * COLUMNS)
    layout = RawLayout((entry,))
    datas = [rows(each, number * each * COLUMNS)["x"].tobytes() for number in range(count)]
    return [InferRequest(RawInputs(layout, data, (0,)), ("y",), each, 1, None, lambda _: None) for data in datas]


def numbers(backend: OnnxRuntimeBackend, several: list[InferRequest]) -> Sequence[float]:
    results = run_batch(backend, several, padded_sizes=[2 * 4096, 3 * 4096])
    assert len(results) == 1, results  # several where the batch failed and was halved, with the reasons
    (answered,) = results
    assert isinstance(answered, Answered), answered
    return [number for answer in answered.answers for number in answer["y"].ravel().tolist()]


@pytest.mark.parametrize("config", [ModelConfig(), with_graphs()], ids=["plain", "graphs"])
def test_batches_are_copied_from_locked_memory(tmp_path: Path, device: ctypes.CDLL, config: ModelConfig) -> None:
    backend = load(tmp_path / "m.onnx", config)
    before = device.emulated_locked_bytes()
    with ThreadPoolExecutor(1) as worker:
        for count in (2, 2, 3, 1, 3):
            answers = worker.submit(numbers, backend, requests(count, 4096)).result()
            assert list(answers) == list(range(count * 4096 * COLUMNS))
        assert device.emulated_locked_bytes() == before + 3 * 4096 * COLUMNS * 4
        del answers
    assert device.emulated_locked_bytes() == before, "the thread is gone, and with it its buffers"
    copies = [line for line in log(device) if " to the device" in line]
    assert [line.rsplit(", ")[-1] for line in copies] == ["pageable"] + ["locked"] * 4, "the first batch shows where it runs"


@dataclass(frozen=True)
class Held(BackendView):
    """Computes nothing until `release` is set; `entered` is set when a batch has come."""

    entered: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    def run(self, inputs: Tensors) -> Tensors:
        self.entered.set()
        assert self.release.wait(60)
        return self._backend.run(inputs)


def test_staged_batches_are_copied_from_locked_memory(tmp_path: Path, device: ctypes.CDLL) -> None:
    before, each = device.emulated_locked_bytes(), 2**15

    def one_row(backend: Backend) -> None:
        backend.run(rows(1))

    async def computed(instance: Instance, held: Held) -> list[Results]:
        """The results of a batch, and of the next one, which is staged."""
        held.entered.clear()
        held.release.clear()
        ends = [asyncio.get_running_loop().create_future() for _ in range(2)]
        for end in ends:
            several = requests(2, each)
            for request in several:
                request.size = each * COLUMNS * 4
            instance.run(several, end.set_result)
            assert await asyncio.to_thread(held.entered.wait, 60)
        held.release.set()
        return [await end for end in ends]

    async def main() -> None:
        held = Held(load(tmp_path / "m.onnx"))
        instance = make_instance(held, 0, Supervision(label="m/1"))
        held.release.set()
        instance.settle(partial(one_row, held))  # as the loader does, which shows where it runs
        log(device)
        for _ in range(3):
            for (answered,) in await computed(instance, held):
                assert isinstance(answered, Answered), answered
                values = [number for answer in answered.answers for number in answer["y"].ravel().tolist()]
                assert values == list(range(2 * each * COLUMNS))
        assert device.emulated_locked_bytes() == before + 2 * (2 * each * COLUMNS * 4), "two sets of buffers, and no more"
        instance.stop()

    others = set(threading.enumerate())
    asyncio.run(main())
    for thread in set(threading.enumerate()) - others:
        thread.join(60)
    gc.collect()
    assert device.emulated_locked_bytes() == before
    copies = [line.rsplit(", ")[-1] for line in log(device) if " to the device" in line]
    assert copies == ["locked"] * 6


def test_memory_that_cannot_be_locked_is_used_all_the_same(
    tmp_path: Path, device: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    backend = load(tmp_path / "m.onnx")
    device.emulated_refuse_locking(1)
    before = device.emulated_locked_bytes()
    with ThreadPoolExecutor(1) as worker:
        for count in (2, 3, 4):
            assert len(worker.submit(numbers, backend, requests(count, 4096)).result()) == count * 4096 * COLUMNS
    assert device.emulated_locked_bytes() == before
    assert [record.message for record in caplog.records] == [
        "memory for batches cannot be locked (out of memory (CUDA error 2)); copies to the device take a little longer"
    ]


def test_nothing_is_locked_for_the_cpu(tmp_path: Path, device: ctypes.CDLL) -> None:
    backend = load_backend(save(tmp_path / "m.onnx"), DevicePlacement(use_gpu=False))
    before = device.emulated_locked_bytes()
    with ThreadPoolExecutor(1) as worker:
        worker.submit(numbers, backend, requests(2, 4096)).result()
        worker.submit(assemble, requests(2, 4096), "x", np.dtype(np.float32)).result()
        assert device.emulated_locked_bytes() == before
    assert not log(device)


class Exported:
    """Tensors that clients have exported: they lie on the device."""

    def __init__(self, count: int, each: int) -> None:
        """Of `count` requests with `each` rows."""
        self.reads: list[int] = []  # how many bytes were copied to the host, by each copy
        driver = cuda_driver()
        assert driver is not None
        self._memory, _ = driver.allocate_shared(4 + count * each * COLUMNS * 4, 0)
        self._each = each
        for number in range(count):
            self._memory.write(self._offset(number), rows(each, number * each * COLUMNS)["x"].tobytes())

    def _offset(self, number: int) -> int:
        return 4 + number * self._each * COLUMNS * 4

    def request(self, number: int, *, is_there: bool = True) -> InferRequest:
        def read(target: memoryview) -> None:
            if not is_there:
                raise InvalidArgumentError("the region cannot be reached")
            self.reads.append(len(target))
            self._memory.read_into(self._offset(number), target)

        each = self._each
        entry = RawInput("x", np.dtype(np.float32), (each, COLUMNS), each * COLUMNS, 4 * each * COLUMNS)
        place = DeviceBytes(0, self._memory.address(self._offset(number)) if is_there else 8, read)
        return InferRequest(
            RawInputs(RawLayout((entry,)), b"", (0,), (place,)), ("y",), each, 1, None, lambda _: None, size=entry.size
        )


@pytest.mark.parametrize("config", [ModelConfig(), with_graphs()], ids=["plain", "graphs"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_inputs_on_the_device_stay_there(tmp_path: Path, device: ctypes.CDLL, config: ModelConfig, count: int) -> None:
    backend, each = load(tmp_path / "m.onnx", config), 5
    exported = Exported(count, each)

    def answered() -> list[float]:
        (result,) = run_batch(backend, [exported.request(number) for number in range(count)], padded_sizes=[each, 4 * each])
        assert isinstance(result, Answered), result
        return [number for answer in result.answers for number in answer["y"].ravel().tolist()]

    answered()  # shows where it runs
    exported.reads.clear()
    log(device)
    for _ in range(3):
        assert answered() == list(range(count * each * COLUMNS))
    assert exported.reads == [], "nothing is copied to the host"
    copies = [line for line in log(device) if "copy of" in line and "from the device" not in line]
    row_bytes, added = COLUMNS * 4, 0 if count == 1 else (4 - count) * each
    sizes = 3 * (count * [each * row_bytes] + added * [row_bytes])
    assert copies == [f"copy of {size} bytes on the device" for size in sizes], "nothing is copied to the device"


def test_memory_on_the_device_that_is_gone_fails_its_request_alone(tmp_path: Path, device: ctypes.CDLL) -> None:
    backend, exported = load(tmp_path / "m.onnx"), Exported(3, 2)
    run_batch(backend, [exported.request(0)])  # shows where it runs
    first, gone, last = run_batch(backend, [exported.request(number, is_there=number != 1) for number in range(3)])
    assert isinstance(first, Answered)
    assert isinstance(last, Answered)
    assert isinstance(gone, Failed)
    assert str(gone.error) == "the region cannot be reached"
    assert backend.run({"x": np.zeros((1, COLUMNS), np.float32)})["y"].tolist() == [[[0, 0], [0, 0]]]


def test_inputs_on_the_device_are_copied_to_the_host_for_what_reads_them(tmp_path: Path, device: ctypes.CDLL) -> None:
    backend, exported = load(tmp_path / "m.onnx"), Exported(2, 2)
    several = [exported.request(number) for number in range(2)]
    run_batch(backend, several)
    inputs = device_inputs(backend, several, 5)
    assert inputs is not None
    reads = len(exported.reads)
    expected = [*range(4 * COLUMNS), *range(3 * COLUMNS, 4 * COLUMNS)]
    assert [inputs["x"].ravel().tolist(), inputs["x"].ravel().tolist()] == [expected, expected]
    assert len(exported.reads) == reads + 2
    small = MemoryLimit("m/1")
    small.rows = 2
    outputs = small.run(backend, inputs, 5)
    assert outputs["y"].ravel().tolist() == expected


async def registered(memory: SharedMemory, name: str, handle: bytes, size: int) -> None:
    memory.register_cuda(name, handle, 0, size)  # on an event loop, as a server does


def test_a_registered_region_is_read_on_its_device(tmp_path: Path, device: ctypes.CDLL) -> None:
    backend, each = load(tmp_path / "m.onnx"), 3
    run_batch(backend, requests(1, each))  # shows where it runs
    size = each * COLUMNS * 4
    with owner(DRIVER_NAMES[0], 4 + size) as client:
        client.write(4, rows(each)["x"].tobytes())
        memory, binding = SharedMemory(enabled=True), RegionBinding()
        asyncio.run(registered(memory, "r", client.handle, 4 + size))
        place = RegionSlice(region="r", offset=4, byte_size=size)
        entry = RawInput("x", np.dtype(np.float32), (each, COLUMNS), each * COLUMNS, size)
        memory.bind(binding, [place], [entry], [place])
        inputs = RawInputs(RawLayout((entry,)), b"", (0,), binding.outside)
        log(device)
        (result,) = run_batch(backend, [InferRequest(inputs, ("y",), each, 1, None, lambda _: None)])
        assert isinstance(result, Answered)
        assert result.answers[0]["y"].ravel().tolist() == list(range(each * COLUMNS))
        assert f"copy of {size} bytes on the device" in log(device)
        binding.release()
        memory.unregister("r", CudaRegion)
