from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory as SystemMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from halfserve.protos.inference_pb2 import InferParameter
from halfserve.serve.engine.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InferenceError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
)
from halfserve.serve.protocol.shared_memory import RegionSlice, SharedMemory, slice_of
from halfserve.serve.protocol.shared_memory_regions import FOLDER, CudaRegion, SharedMemoryMode, SystemRegion
from tests.serve.engine.fakes import HOLD_S, HeldBackend, held_model
from tests.serve.running_server import RunningServer, running_server

NAME, ONE, OTHER = "data", f"halfserve_test_one_{os.getpid()}", f"halfserve_test_other_{os.getpid()}"
BYTES = 4


@dataclass(frozen=True)
class Block:
    """A shared memory object."""

    name: str

    @property
    def path(self) -> Path:
        return Path(FOLDER) / self.name

    @property
    def content(self) -> bytes:
        return self.path.read_bytes()


@pytest.fixture
def block() -> Iterator[Block]:
    """Hundred bytes, 0 to 99."""
    memory = SystemMemory(create=True, size=100)
    made = Block(memory.name)
    made.path.write_bytes(bytes(range(100)))
    yield made
    memory.close()
    memory.unlink()


@pytest.fixture(params=SharedMemoryMode)
def mode(request: pytest.FixtureRequest) -> SharedMemoryMode:
    return SharedMemoryMode(request.param)


@pytest.fixture
def memory(block: Block, mode: SharedMemoryMode) -> Iterator[SharedMemory]:
    """With the block's bytes 10 to 59 as "r"."""
    regions = SharedMemory(enabled=True, mode=mode)
    regions.register_system("r", block.name, 10, 50)
    yield regions
    regions.unregister("", SystemRegion)


def place(offset: int, byte_size: int, region: str = "r") -> RegionSlice:
    return RegionSlice(region=region, offset=offset, byte_size=byte_size)


def test_what_lies_there_is_read_and_written(block: Block, memory: SharedMemory) -> None:
    assert memory.read(place(5, 3)).tolist() == [15, 16, 17]
    memory.write(place(40, 10), b"abc")
    assert block.content[50:54] == b"abc" + bytes([53])


def test_the_leading_slash_of_a_posix_name_is_taken(block: Block) -> None:
    regions = SharedMemory(enabled=True)
    regions.register_system("s", f"/{block.name}", 0, 100)
    (region,) = regions.regions("", SystemRegion)
    assert (region.name, region.key, region.offset, region.byte_size) == ("s", f"/{block.name}", 0, 100)
    regions.unregister("", SystemRegion)
    assert regions.regions("", SystemRegion) == []


@pytest.mark.parametrize("at", [place(0, 51), place(50, 1), place(-1, 2), place(0, -1), place(2**63, 2**63)])
def test_nothing_outside_of_the_region_is_reached(memory: SharedMemory, at: RegionSlice) -> None:
    for reach in (lambda: memory.read(at), lambda: memory.write(at, b"")):
        with pytest.raises(InvalidArgumentError, match="are not inside of shared memory region 'r', which has 50"):
            reach()


def test_an_output_that_does_not_fit_is_not_written(block: Block, memory: SharedMemory) -> None:
    with pytest.raises(InvalidArgumentError, match="an output of 5 bytes does not fit its 4 bytes"):
        memory.write(place(0, 4), b"abcde")
    assert block.content[:20] == bytes(range(20))


def test_regions_leave_files_for_connections(block: Block, memory: SharedMemory) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        for number in range(127):
            memory.register_system(f"r{number}", block.name, 0, 1)
        with pytest.raises(FailedPreconditionError, match="128 shared memory regions are registered, which is the limit"):
            memory.register_system("one more", block.name, 0, 1)
        memory.unregister("r5", SystemRegion)
        memory.register_system("one more", block.name, 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("mode", [SharedMemoryMode.SAFE])
def test_a_client_that_shrinks_its_file_hurts_itself_alone(block: Block, memory: SharedMemory) -> None:
    block.path.write_bytes(bytes(20))
    with pytest.raises(InvalidArgumentError, match="shared memory region 'r' has become smaller"):
        memory.read(place(0, 50))
    with pytest.raises(InvalidArgumentError, match="shared memory region 'r' has become smaller"):
        memory.write(place(0, 50), bytes(50))
    assert block.content == bytes(20)


@pytest.mark.parametrize("mode", [SharedMemoryMode.SAFE])
def test_an_output_for_which_there_is_no_memory_is_no_answer(block: Block, memory: SharedMemory) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))  # as where memory runs out after so many bytes
    try:
        with pytest.raises(InvalidArgumentError, match=r"an output of 40 bytes cannot be written to .* 'r': .*; make room"):
            memory.write(place(0, 40), bytes(40))
        memory.write(place(0, 30), bytes(30))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert block.content[40:] == bytes(range(40, 100))


@pytest.mark.parametrize(
    "key", ["", "/", "//a", ".", "/.", "..", "../etc/passwd", "/../x", "a/b", "a/", "a\0b", "x" * 256, "é" * 128]
)
def test_keys_that_are_no_names_are_refused(key: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected the name of a shared memory object"):
        SharedMemory(enabled=True).register_system("s", key, 0, 1)


@pytest.mark.parametrize("key", ["/input:0_0_0", "a b", "in(1)", "/a+b", ".hidden", "...", "é", "x" * 255, "/" + "é" * 127])
def test_keys_may_be_any_name_of_a_file(key: str) -> None:
    file = Path(FOLDER) / key.removeprefix("/")
    file.write_bytes(b"abc")
    try:
        regions = SharedMemory(enabled=True)
        regions.register_system("s", key, 1, 2)
        assert bytes(regions.read(place(0, 2, "s"))) == b"bc"
        regions.unregister("", SystemRegion)
    finally:
        file.unlink()


def test_what_is_no_regular_file_is_refused() -> None:
    pipe = Path(FOLDER) / f"halfserve_test_pipe_{os.getpid()}"
    os.mkfifo(pipe)
    try:
        with pytest.raises(InvalidArgumentError, match="the key of region 's' is not that of a shared memory object"):
            SharedMemory(enabled=True).register_system("s", pipe.name, 0, 1)
    finally:
        pipe.unlink()


def test_what_cannot_be_registered_says_why(block: Block, memory: SharedMemory) -> None:
    with pytest.raises(AlreadyExistsError, match="shared memory region 'r' is registered already; unregister it first"):
        memory.register_system("r", block.name, 0, 1)
    with pytest.raises(InvalidArgumentError, match="region 's' ends at byte 101, its shared memory object has 100"):
        memory.register_system("s", block.name, 1, 100)
    with pytest.raises(InvalidArgumentError, match="cannot be opened: No such file or directory; create it first"):
        memory.register_system("s", "halfserve_no_such_object", 0, 1)
    with pytest.raises(InvalidArgumentError, match="the region has no name"):
        memory.register_system("", block.name, 0, 1)
    with pytest.raises(UnsupportedError, match="start it with --shared-memory"):
        SharedMemory(enabled=False).register_system("s", block.name, 0, 1)
    link = Path(FOLDER) / "halfserve_test_link"
    link.symlink_to(__file__)
    try:
        with pytest.raises(InvalidArgumentError, match="cannot be opened"):
            memory.register_system("s", link.name, 0, 1)
    finally:
        link.unlink()


def test_regions_come_and_go_by_name(memory: SharedMemory) -> None:
    memory.unregister("never there", SystemRegion)
    memory.unregister("r", SystemRegion)
    for ask in (lambda: memory.regions("r", SystemRegion), lambda: memory.read(place(0, 1))):
        with pytest.raises(NotFoundError, match="shared memory region 'r' is not registered"):
            ask()


def test_what_is_unregistered_is_what_was_named_and_of_that_kind(block: Block, memory: SharedMemory) -> None:
    memory.register_system("s", block.name, 0, 1)
    memory.unregister("", CudaRegion)
    memory.unregister("r", CudaRegion)
    assert [region.name for region in memory.regions("", SystemRegion)] == ["r", "s"]
    memory.unregister("r", SystemRegion)
    assert [region.name for region in memory.regions("", SystemRegion)] == ["s"]


def times_open(path: Path) -> int:
    """How often this process has a file open; others of its files come and go with other tests' threads."""
    found = 0
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208  (numbers)
        with suppress(FileNotFoundError):  # closed since
            found += os.readlink(f"/proc/self/fd/{number}") == str(path)  # noqa: PTH115  (a text, which a deleted file has too)
    return found


def test_no_file_stays_open_of_what_is_unregistered_or_was_refused(block: Block, memory: SharedMemory) -> None:
    before = times_open(block.path)
    memory.register_system("s", block.name, 0, 1)
    assert times_open(block.path) == before + 1
    memory.unregister("s", SystemRegion)
    with pytest.raises(InvalidArgumentError, match="register less"):
        memory.register_system("s", block.name, 0, 101)
    assert times_open(block.path) == before


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"shared_memory_region": ""}, "has parameter shared_memory_region without shared_memory_byte_size"),
        ({"shared_memory_region": "", "shared_memory_byte_size": 4}, "shared_memory_region is not text"),
        ({"shared_memory_region": "r"}, "has parameter shared_memory_region without shared_memory_byte_size"),
        ({"shared_memory_byte_size": 4}, "has parameter shared_memory_byte_size without shared_memory_region"),
        ({"shared_memory_offset": 4}, "without shared_memory_region"),
        ({"shared_memory_region": 4, "shared_memory_byte_size": 4}, "shared_memory_region is not text"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": "4"}, "shared_memory_byte_size is not a whole number"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": -4}, "shared_memory_byte_size is not a whole number"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": 4, "shared_memory_offset": -1}, "shared_memory_offset is no"),
    ],
)
def test_incomplete_parameters_are_refused(parameters: dict[str, Any], text: str) -> None:
    given = {
        name: InferParameter(string_param=value) if isinstance(value, str) else InferParameter(int64_param=value)
        for name, value in parameters.items()
    }
    with pytest.raises(InferenceError, match=f"input 'x'.*{text}"):
        slice_of("input 'x'", given)


def test_parameters_that_say_nothing_of_shared_memory_mean_none() -> None:
    assert slice_of("input 'x'", {}) is None
    assert slice_of("output 'y'", {"binary_data": InferParameter(bool_param=True)}) is None


@pytest.fixture
def blocks() -> Iterator[tuple[Any, Any]]:
    """Two clients' memory: one fp32 for the input, and room for one fp32 of the output."""
    made = [shm.create_shared_memory_region(key, f"/{key}", 2 * BYTES) for key in (ONE, OTHER)]
    for handle, value in zip(made, (1.0, 50.0), strict=True):
        shm.set_shared_memory_region(handle, [np.array([value, 0.0], np.float32)])
    yield made[0], made[1]
    for handle in made:
        shm.destroy_shared_memory_region(handle)


class Asking:
    """A request whose input or output lies in the region, and what becomes of it."""

    def __init__(self, client: triton.InferenceServerClient, shared: str) -> None:
        x, y = triton.InferInput("x", (1, 1), "FP32"), triton.InferRequestedOutput("y")
        if shared == "input":
            x.set_shared_memory(NAME, BYTES)
        else:
            x.set_data_from_numpy(np.ones((1, 1), np.float32))
            y.set_shared_memory(NAME, BYTES, offset=BYTES)
        self._ended = threading.Event()
        self._error: InferenceServerException | None = None
        self.result: triton.InferResult | None = None
        self.cancel = client.async_infer("held", [x], self._end, outputs=[y]).cancel

    def _end(self, result: triton.InferResult | None, error: InferenceServerException | None) -> None:
        self.result, self._error = result, error
        self._ended.set()

    def error(self) -> InferenceServerException | None:
        assert self._ended.wait(HOLD_S)
        return self._error


def wait_until_taken(server: RunningServer, count: int) -> None:
    batcher = server.core.model("held").batcher
    server.until(
        lambda: batcher.waiting + batcher._refusals.running >= count
    )  # the second one may be handed to the thread already


@pytest.mark.parametrize("shared", ["input", "output"])
def test_a_region_stays_registered_until_its_requests_end(shared: str, blocks: tuple[Any, Any]) -> None:
    backend = HeldBackend()
    with (
        running_server(lambda: [held_model(backend, max_rows=1)], shared_memory=True) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        client.register_system_shared_memory(NAME, f"/{ONE}", 2 * BYTES)
        for _ in range(2):  # from the second one on, the request is known by its bytes
            assert Asking(client, shared).error() is None
        backend.entered.clear()
        backend.release.clear()
        computes = Asking(client, shared)
        assert backend.entered.wait(HOLD_S)
        waits = Asking(client, shared)
        wait_until_taken(server, 2)
        client.register_system_shared_memory("unused", f"/{OTHER}", BYTES)
        for name in (NAME, ""):
            client.unregister_system_shared_memory(name)
        assert list(client.get_system_shared_memory_status().regions) == [NAME], "what no request uses has gone"
        with pytest.raises(InferenceServerException, match="is registered already"):
            client.register_system_shared_memory(NAME, f"/{OTHER}", 2 * BYTES)
        later = Asking(client, shared)
        wait_until_taken(server, 3)
        backend.release.set()
        for asking in (computes, waits, later):
            assert asking.error() is None
        assert not client.get_system_shared_memory_status().regions
    assert shm.get_contents_as_numpy(blocks[0], np.float32, [2]).tolist() == [1.0, 2.0 * (shared == "output")]


@pytest.mark.parametrize("shared", ["input", "output"])
def test_a_cancelled_request_neither_holds_nor_touches_a_region(shared: str, blocks: tuple[Any, Any]) -> None:
    backend = HeldBackend(held=True)
    with (
        running_server(lambda: [held_model(backend, max_rows=1)], shared_memory=True) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        client.register_system_shared_memory(NAME, f"/{ONE}", 2 * BYTES)
        computes = Asking(client, shared)
        assert backend.entered.wait(HOLD_S)
        waits = Asking(client, shared)
        wait_until_taken(server, 2)
        for asking in (computes, waits):
            asking.cancel()
        while server.call(lambda: bool(server.service.memory.uses)):
            pass
        client.unregister_system_shared_memory()
        client.register_system_shared_memory(NAME, f"/{OTHER}", 2 * BYTES)
        backend.release.set()
        assert Asking(client, "output").error() is None
    assert shm.get_contents_as_numpy(blocks[1], np.float32, [2]).tolist() == [50.0, 2.0]
    assert [50.0] not in backend.batches


def descriptors(key: str) -> int:
    """Number of this process's open descriptors of a shared memory object."""
    return sum(link.resolve() == Path(FOLDER) / key for link in Path("/proc/self/fd").iterdir())


def test_known_requests_keep_no_file_of_an_unregistered_region(mode: SharedMemoryMode, blocks: tuple[Any, Any]) -> None:
    with (
        running_server(lambda: [held_model(HeldBackend(), max_rows=1)], shared_memory=True, shared_memory_mode=mode) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        before = descriptors(ONE)
        client.register_system_shared_memory(NAME, f"/{ONE}", 2 * BYTES)
        for _ in range(3):
            assert Asking(client, "input").error() is None
        assert descriptors(ONE) == before + 1
        client.unregister_system_shared_memory(NAME)
        assert descriptors(ONE) == before
        refused = Asking(client, "input").error()
        assert refused is not None
        assert "is not registered" in str(refused)
        client.register_system_shared_memory(NAME, f"/{OTHER}", 2 * BYTES)
        asking = Asking(client, "input")
        assert asking.error() is None
        assert asking.result is not None
        assert asking.result.as_numpy("y").tolist() == [[51.0]], "the known request reads the new region"


@pytest.mark.parametrize(("mode", "answer"), [(SharedMemoryMode.SAFE, 2.0), (SharedMemoryMode.TRUSTED, 8.0)])
def test_only_trusted_regions_are_computed_on_without_a_copy(
    mode: SharedMemoryMode, answer: float, blocks: tuple[Any, Any]
) -> None:
    backend = HeldBackend()
    with (
        running_server(lambda: [held_model(backend, max_rows=1)], shared_memory=True, shared_memory_mode=mode) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        client.register_system_shared_memory(NAME, f"/{ONE}", 2 * BYTES)
        for _ in range(2):
            assert Asking(client, "input").error() is None
        backend.entered.clear()
        backend.release.clear()
        asking = Asking(client, "input")
        assert backend.entered.wait(HOLD_S)
        shm.set_shared_memory_region(blocks[0], [np.array([7.0], np.float32)])
        backend.release.set()
        assert asking.error() is None
        assert asking.result is not None
        assert asking.result.as_numpy("y").tolist() == [[answer]]
