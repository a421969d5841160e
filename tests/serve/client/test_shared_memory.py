"""Tensors in shared memory, in regions of the caller and of the client."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

from halfserve import AsyncClient, Cancelled, Client, ClientError, InvalidRequest, SharedRegion, Unsupported
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client import shared_tensors
from halfserve.serve.client.infer_messages import SharedSlice
from halfserve.serve.client.shared_regions import FOLDER
from halfserve.serve.client.shared_tensors import SlabPool
from tests.models import save_model
from tests.serve.client.conftest import Connect
from tests.serve.client.scripted_server import Failure, ScriptedServer
from tests.serve.conftest import load_repository
from tests.serve.engine.fakes import HOLD_S, HeldBackend, held_model
from tests.serve.running_server import RunningServer, running_server

SHARING: dict[str, list[Any]] = {
    "SystemSharedMemoryRegister": [pb.SystemSharedMemoryRegisterResponse()],
    "ModelInfer": [pb.ModelInferResponse()],
    "SystemSharedMemoryUnregister": [pb.SystemSharedMemoryUnregisterResponse()],
}


def ours() -> set[str]:
    """This process's shared memory objects."""
    return {path.name for path in Path(FOLDER).glob(f"halfserve-{os.getpid()}-*")}


def echo_inputs(**changed: Any) -> dict[str, Any]:
    """Inputs of the model "echo_types", small ones."""
    names = ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"]
    return {"in_BYTES": [["a"]], **{f"in_{name}": [[1]] for name in names}, **changed}


def test_inputs_and_outputs_stay_in_the_region(sharing: RunningServer, connect: Connect) -> None:
    client, before = connect(sharing.address), ours()
    with client.shared_region(200_000) as region:
        x, y = region.array((2, 64), np.float16), region.array((2, 10), np.float16)
        x[:] = np.linspace(-1, 1, 128).reshape(2, 64)
        assert list(client.shared_regions()) == [region.name]
        answer = client.infer("mlp", {"x": x}, into={"y": y})["y"]
        assert np.shares_memory(answer, y)
    np.testing.assert_allclose(y, client.infer("mlp", {"x": np.array(x)})["y"], atol=2e-3)
    assert ours() == before
    assert client.shared_regions() == {}


def test_an_output_smaller_than_its_array(sharing: RunningServer, connect: Connect) -> None:
    client = connect(sharing.address)
    with client.shared_region(4096) as region:
        room = region.array((8, 10), np.float16)
        answer = client.infer("mlp", {"x": np.ones((3, 64), np.float16)}, into={"y": room})["y"]
    assert answer.shape == (3, 10)
    np.testing.assert_array_equal(answer, room[:3])


def test_a_region_is_unregistered_when_its_block_fails(sharing: RunningServer, connect: Connect) -> None:
    client, before = connect(sharing.address), ours()
    with pytest.raises(ZeroDivisionError), client.shared_region(64):
        _ = 1 // 0
    assert ours() == before
    assert client.shared_regions() == {}


def test_large_tensors_use_shared_memory_automatically(sharing: RunningServer, connect: Connect) -> None:
    client, before = connect(sharing.address, shared_memory=True), ours()
    large = np.random.default_rng(0).standard_normal((1, 40_000)).astype(np.float32)
    for factor in (1, 2):
        outputs = client.infer("echo_types", echo_inputs(in_FP32=large * factor))
        np.testing.assert_array_equal(outputs["out_FP32"], large * factor)
        assert outputs["out_FP32"].flags.writeable
    assert len(client.shared_regions()) == 1
    client.close()
    assert ours() == before
    assert connect(sharing.address).shared_regions() == {}


def test_a_forked_child_leaves_the_memory_of_its_parent(
    sharing: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(sharing.address, shared_memory=True)
    large = np.ones((1, 40_000), np.float32)
    model = client.model("echo_types")
    client.infer("echo_types", echo_inputs(in_FP32=large))
    held, process = {name: Path(FOLDER, name).read_bytes() for name in ours()}, os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: process + 1)
        with pytest.raises(ClientError, match="does not survive a fork"):
            client.infer("echo_types", echo_inputs(in_FP32=large * 2))
        with pytest.raises(ClientError, match="does not survive a fork"):
            model.infer(echo_inputs(in_FP32=large * 2))
    assert held
    assert {name: Path(FOLDER, name).read_bytes() for name in ours()} == held


def test_a_server_without_shared_memory_gets_messages(server: RunningServer, connect: Connect) -> None:
    client, before = connect(server.address, shared_memory=True), ours()
    large = np.ones((1, 40_000), np.float32)
    np.testing.assert_array_equal(client.infer("echo_types", echo_inputs(in_FP32=large))["out_FP32"], large)
    with pytest.raises(Unsupported, match="--shared-memory"), client.shared_region(64):
        pass
    client.close()
    assert ours() == before


def test_closing_unregisters_once(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model()
    scripted.answers |= SHARING | {
        "SystemSharedMemoryUnregister": [Failure("RESOURCE_EXHAUSTED", "busy", (("grpc-retry-pushback-ms", "1"),))],
    }
    client = connect(scripted.address, shared_memory=True, retries=3)
    client.infer("m", {"x": np.ones((40_000, 2), np.float32)})
    client.close()
    assert scripted.count("SystemSharedMemoryUnregister") == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_closing_unregisters_what_a_call_under_way_uses(*, is_async: bool) -> None:
    backend, inputs = HeldBackend(held=True), {"x": np.ones((1, 40_000), np.float32)}

    async def close_meanwhile(address: str) -> None:
        client = AsyncClient(address, shared_memory=True)
        asking = asyncio.create_task(client.infer("held", inputs))
        assert await asyncio.to_thread(backend.entered.wait, HOLD_S)
        await client.close()
        with pytest.raises(Cancelled):
            await asking

    with running_server(lambda: [held_model(backend, size=40_000)], shared_memory=True) as server:
        if is_async:
            asyncio.run(close_meanwhile(server.address))
        else:
            client = Client(server.address, shared_memory=True)
            with ThreadPoolExecutor() as threads:
                asking = threads.submit(client.infer, "held", inputs)
                assert backend.entered.wait(HOLD_S)
                client.close()
                with pytest.raises(Cancelled):
                    asking.result()
        with Client(server.address) as other:
            assert other.shared_regions() == {}
        backend.release.set()


def test_nothing_is_registered_while_a_client_closes(scripted: ScriptedServer) -> None:
    scripted.serve_model()
    scripted.answers |= SHARING
    scripted.held = {"SystemSharedMemoryUnregister"}
    inputs = {"x": np.ones((40_000, 2), np.float32)}

    async def ask_meanwhile() -> None:
        client = AsyncClient(scripted.address, shared_memory=True)
        await client.infer("m", inputs)
        closing = asyncio.create_task(client.close())
        assert await asyncio.to_thread(scripted.arrived.wait, 10)
        with pytest.raises(Cancelled, match="this client is closed"):
            await client.infer("m", inputs)
        scripted.release.set()
        await closing

    asyncio.run(ask_meanwhile())
    assert scripted.count("SystemSharedMemoryUnregister") == scripted.count("SystemSharedMemoryRegister") == 1


def test_closing_unregisters_open_regions(sharing: RunningServer, connect: Connect) -> None:
    client = connect(sharing.address)
    with client.shared_region(4096):
        client.close()
        assert connect(sharing.address).shared_regions() == {}


def test_closing_in_another_loop_unregisters_regions_too(sharing: RunningServer) -> None:
    client, inputs = (AsyncClient(sharing.address, shared_memory=True), echo_inputs(in_FP32=np.ones((1, 40_000), np.float32)))

    async def ask() -> None:
        await client.infer("echo_types", inputs)

    with Client(sharing.address) as other:
        asyncio.run(ask())
        assert len(other.shared_regions()) == 1
        asyncio.run(client.close())
        assert other.shared_regions() == {}


@pytest.mark.parametrize("held", ["SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"])
@pytest.mark.parametrize("then", ["close", "another region"])
def test_a_region_of_a_cancelled_request_is_unregistered(scripted: ScriptedServer, held: str, then: str) -> None:
    """The server may have heard of it, and may not have heard that it is gone; it would hold its memory for ever."""
    scripted.answers |= SHARING
    scripted.held = {held}

    async def use(client: AsyncClient) -> None:
        async with client.shared_region(4096):
            pass

    async def be_cancelled() -> None:
        async with AsyncClient(scripted.address) as client:
            using = asyncio.create_task(use(client))
            assert await asyncio.to_thread(scripted.arrived.wait, 10)
            using.cancel()
            await asyncio.wait([using])
            scripted.release.set()
            scripted.calls.clear()
            if then == "another region":
                await use(client)

    asyncio.run(be_cancelled())
    calls = [method.removeprefix("SystemSharedMemory") for method, _, _ in scripted.calls]
    assert calls == ["Unregister", *(["Register", "Unregister"] if then == "another region" else [])]


def test_streams_work_beside_shared_memory(sharing: RunningServer, connect: Connect) -> None:
    client = connect(sharing.address)
    with client.shared_region(4096) as region:
        x = region.array((1, 64), np.float16)
        x[:] = 1
        expected = client.infer("mlp", {"x": np.ones((1, 64), np.float16)})["y"]
        answers = list(client.stream_infer("mlp", [{"x": x}] * 3))
    for answer in answers:
        np.testing.assert_allclose(answer.outputs["y"], expected, atol=2e-3)


def test_an_output_needs_an_array_of_the_region(sharing: RunningServer, connect: Connect) -> None:
    client = connect(sharing.address)
    inputs = {"x": np.ones((1, 64), np.float16)}
    with pytest.raises(InvalidRequest, match="the array for output 'y' does not lie in shared memory of this client"):
        client.infer("mlp", inputs, into={"y": np.zeros((1, 10), np.float16)})
    with client.shared_region(4096) as region:
        with pytest.raises(InvalidRequest, match="has no output 'z'; its outputs are: y"):
            client.infer("mlp", inputs, into={"z": region.array(10, np.float16)})
        with pytest.raises(InvalidRequest, match="an output of 20 bytes does not fit its 18 bytes"):
            client.infer("mlp", inputs, into={"y": region.array(9, np.float16)})


@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_an_output_needs_an_array_of_its_dtype(sharing: RunningServer, connect: Connect, dtype: Any) -> None:
    client = connect(sharing.address)
    with client.shared_region(4096) as region:
        into = {"y": region.array((1, 10), dtype)}
        with pytest.raises(InvalidRequest, match=f"output 'y' has the dtype {np.dtype(dtype)}, expected float16"):
            client.infer("mlp", {"x": np.ones((1, 64), np.float16)}, into=into)


@pytest.mark.parametrize("max_batch_size", [0, 4])
def test_outputs_may_have_other_rows_than_inputs(tmp_path: Path, connect: Connect, max_batch_size: int) -> None:
    path = tmp_path / "model"
    nodes = [helper.make_node("Concat", ["x", "x"], ["y"], axis=1 if max_batch_size else 0)]
    tensors = [(name, TensorProto.FLOAT, ["n", "m"]) for name in "xy"]
    save_model(path / "1" / "model.onnx", nodes, tensors[:1], tensors[1:])  # type: ignore[arg-type]  # (as in tests.models)
    (path / "config.pbtxt").write_text(f"max_batch_size: {max_batch_size}")
    with running_server(lambda: load_repository(tmp_path), shared_memory=True) as running:
        client = connect(running.address, shared_memory=True)
        x = np.random.default_rng(0).standard_normal((2, 40_000)).astype(np.float32)
        np.testing.assert_array_equal(client.infer("model", {"x": x})["y"], np.concatenate([x, x], 1 if max_batch_size else 0))


def test_arrays_of_all_the_bytes_fit() -> None:
    region = SharedRegion(4096)
    assert sum(region.array(1, np.uint8).nbytes + region.array(127, np.uint8).nbytes for _ in range(32)) == 4096


def test_the_place_of_an_array_in_a_region() -> None:
    region = SharedRegion(1000)
    first, second = region.array(3, np.int8), region.array((2, 2), ml_dtypes.bfloat16)
    place = region.place_of(second)
    assert place is not None
    assert (place.offset, place.byte_size) == (64, 8)
    assert region.place_of(first[1:]) is not None
    for other in (np.zeros(3), second.T, second[:, :1], first[:0]):
        assert region.place_of(other) is None
    region.clear()
    assert np.shares_memory(region.array(3, np.int8), first)


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        (9999, np.int16, r"an array of 19998 bytes does not fit the region of 8192 bytes \(0 are taken\)"),
        (1, object, "holds numbers, not object"),
        (4, "S", r"holds numbers, not \|S0"),
        (-1, np.float32, "sizes of 0 or more, whole numbers all, not -1"),
        ((2, -3), np.float16, r"not \(2, -3\)"),
        (2.5, np.float32, r"not 2\.5"),
    ],
)
def test_arrays_that_a_region_cannot_hold(shape: Any, dtype: Any, text: str) -> None:
    region = SharedRegion(1000)
    with pytest.raises(InvalidRequest, match=text):
        region.array(shape, dtype)
    assert region.place_of(region.array(1, np.int8)) == SharedSlice(region=region.name, offset=0, byte_size=1)


def test_sizes_may_be_numbers_of_numpy() -> None:
    sizes = np.array([300, 300], np.int16)  # whose product is no int16
    assert SharedRegion(300 * 300).array(sizes, np.uint8).shape == (300, 300)  # type: ignore[arg-type]  # (as numpy takes them)
    assert SharedRegion(1000).array(np.int64(4), np.float32).shape == (4,)  # type: ignore[arg-type]  # (likewise)


def test_impossible_region_sizes_are_refused() -> None:
    before = ours()
    for odd in (0, 1.5, "5"):
        with pytest.raises(InvalidRequest, match=f"needs a whole number of bytes, 1 or more, not {odd!r}"):
            SharedRegion(odd)  # type: ignore[arg-type]  # (what a caller may have computed)
    for much in (2**60, 2**70):
        with pytest.raises(ClientError, match="has no room for .* bytes: .*; send the tensors in the message") as full:
            SharedRegion(much)
        assert full.value.code == "RESOURCE_EXHAUSTED"
    assert ours() == before


def test_an_interrupted_region_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = ours()
    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SharedRegion(64)
    assert ours() == before


def test_unreferenced_regions_are_freed() -> None:
    before = ours()
    region = SharedRegion(64)
    assert len(ours()) == len(before) + 1
    array = region.array(4, np.float16)
    del region
    assert ours() == before
    array[:] = 1  # the memory itself lives as long as its arrays


def test_a_pool_keeps_a_limited_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlabPool()
    slabs = [slab for _ in range(4) if (slab := pool.take(1)) is not None]
    for slab in slabs:
        pool.mark_registered(slab)
    monkeypatch.setattr(shared_tensors, "KEPT_BYTES", 3 * slabs[0].byte_size)
    pool.give_back(slabs)
    assert pool.take_abandoned() == [slabs[0].name]
    assert pool.take(1) is slabs[1]
    assert sorted(pool.take_all()) == sorted(slab.name for slab in slabs[1:])
    assert not ours() & {slabs[0].name, slabs[2].name, slabs[3].name}
