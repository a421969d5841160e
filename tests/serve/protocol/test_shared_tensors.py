"""What is read of a tensor in shared memory, and when. Regions are sparse: their bytes take memory once they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.engine.errors import InvalidArgumentError, NotFoundError
from halfserve.serve.engine.tensors import Array
from halfserve.serve.protocol.codec import decode_inputs
from halfserve.serve.protocol.raw_tensors import from_raw, to_raw
from halfserve.serve.protocol.shared_memory import MAX_BYTES, WINDOW_BYTES, RegionSlice, SharedMemory, check_size, read_tensor
from halfserve.serve.protocol.shared_memory_regions import FOLDER, SystemRegion
from tests.serve.protocol.test_codec import model, spec

GIB = 2**30
TEXTS = BY_WIRE["BYTES"]


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    """An object of 1 TiB that holds nothing yet."""
    file = Path(FOLDER) / f"halfserve_test_sparse_{os.getpid()}"
    file.touch()
    os.truncate(file, 2**40)
    yield file
    file.unlink()


@pytest.fixture(scope="module")
def memory(path: Path) -> SharedMemory:
    regions = SharedMemory(enabled=True)
    regions.register_system("r", path.name, 0, 2**40)
    return regions


def asking(wire: str, shape: Sequence[int], *sizes: int) -> ModelInferRequest:
    """A request with inputs x0, x1, ... that say to have so many bytes of the region."""
    request = ModelInferRequest(model_name="m")
    for number, size in enumerate(sizes):
        tensor = request.inputs.add(name=f"x{number}", datatype=wire, shape=shape)
        tensor.parameters["shared_memory_region"].string_param = "r"
        tensor.parameters["shared_memory_byte_size"].int64_param = size
    return request


def bytes_read() -> int:
    """By this thread so far: others of the process may be at work on what earlier tests left."""
    return int(Path("/proc/thread-self/io").read_text().split()[1])


@pytest.mark.parametrize("size", [GIB, 6 * GIB, 2**40])
def test_a_tensor_of_another_size_is_refused_before_a_byte_is_read(memory: SharedMemory, size: int) -> None:
    before = bytes_read()
    with pytest.raises(InvalidArgumentError, match=rf"'x0' has {size} bytes, expected 8 for FP16 of shape \[1, 4\]"):
        decode_inputs(asking("FP16", [1, 4], size), model(spec("x0", "FP16", -1, 4)), memory)
    with pytest.raises(InvalidArgumentError, match=r"'x0' has 7 bytes, expected at least 8 for BYTES of shape \[1, 2\]"):
        decode_inputs(asking("BYTES", [1, 2], 7), model(spec("x0", "BYTES", -1, 2)), memory)
    assert bytes_read() - before < WINDOW_BYTES


def test_inputs_are_no_larger_than_in_a_message(memory: SharedMemory) -> None:
    before, half = bytes_read(), (MAX_BYTES + 1) // 2
    two = model(*(spec(name, "INT8", -1, -1) for name in ("x0", "x1")))
    decode_inputs(asking("INT8", [1, half - 1], half - 1, half - 1), two, memory)
    with pytest.raises(InvalidArgumentError, match="in shared memory have 2147483648 bytes, expected at most 2147483647"):
        decode_inputs(asking("INT8", [1, half], half, half), two, memory)
    assert bytes_read() - before < WINDOW_BYTES, "what fits is read by the thread that computes with it"


def test_of_texts_no_more_is_read_than_they_take(memory: SharedMemory) -> None:
    before = bytes_read()
    inputs = decode_inputs(asking("BYTES", [1, 2], GIB), model(spec("x0", "BYTES", -1, 2)), memory).inputs
    with pytest.raises(InvalidArgumentError, match="'x0' has more than 2 BYTES elements, expected 2"):
        inputs["x0"]
    assert bytes_read() - before < 2 * WINDOW_BYTES


def test_what_is_read_late_is_what_was_there_when_the_request_came(path: Path) -> None:
    regions = SharedMemory(enabled=True)
    regions.register_system("r", path.name, 2**20, GIB)
    one = model(spec("x0", "BF16", -1, 2), max_batch_size=2)
    inputs = decode_inputs(asking("BF16", [2, 2], 8), one, regions).inputs
    regions.write(RegionSlice(region="r", offset=0, byte_size=8), np.array([1, 2, 3, 4], BY_WIRE["BF16"].array_dtype).tobytes())
    assert inputs["x0"].astype(np.float32).tolist() == [[1, 2], [3, 4]]
    regions.unregister("r", SystemRegion)
    regions.register_system("r", path.name, 0, GIB)
    with pytest.raises(NotFoundError, match="was unregistered while the request waited"):
        inputs["x0"]


@given(
    st.lists(st.binary(max_size=9) | st.integers(0, 3 * WINDOW_BYTES).map(bytes), max_size=5),
    st.integers(0, 5),
    st.integers(-9, 9),
)
def test_texts_are_what_they_are_in_a_message(memory: SharedMemory, texts: list[bytes], asked: int, more: int) -> None:
    raw = to_raw(np.array([*texts, None], object)[:-1], TEXTS)
    raw = raw + bytes(more) if more >= 0 else raw[:more]
    place = RegionSlice(region="r", offset=2**39 + 3, byte_size=len(raw))
    memory.write(place, raw)

    def sent() -> Array:
        return from_raw(raw, TEXTS, (asked,))

    def shared() -> Array:
        check_size(place, TEXTS, (asked,))
        return read_tensor(memory, place, TEXTS, (asked,), memory.latest)

    try:
        expected = sent().tolist()
    except ValueError:
        with pytest.raises(ValueError, match="expected"):
            shared()
    else:
        assert shared().tolist() == expected
