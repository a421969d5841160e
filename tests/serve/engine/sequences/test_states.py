"""States: their precision, open sizes, and the memory that they take."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from halfserve.serve.engine.errors import RequestCancelledError
from halfserve.serve.engine.sequences.sequence import Sequence, Step
from tests.models import save_model
from tests.serve.engine.sequences.scene import Scene, play, played, sum_model


def halves(root: Path) -> Path:
    """x FP32 [n, 1], h FP16 [n, 1] -> y FP32: h + x / 3, and new_h the same in FP16: it is rounded after each step."""
    nodes = [
        helper.make_node("Cast", ["h"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["x", "three"], ["third"]),
        helper.make_node("Add", ["wide", "third"], ["y"]),
        helper.make_node("Cast", ["y"], ["new_h"], to=TensorProto.FLOAT16),
    ]
    wide, half = TensorProto.FLOAT, TensorProto.FLOAT16
    inputs: list[tuple[str, int, list[int | str]]] = [("x", wide, ["n", 1]), ("h", half, ["n", 1])]
    outputs: list[tuple[str, int, list[int | str]]] = [("y", wide, ["n", 1]), ("new_h", half, ["n", 1])]
    save_model(root / "halves" / "1" / "model.onnx", nodes, inputs, outputs, {"three": np.array([3], np.float32)})
    state = 'state { input_name: "h" output_name: "new_h" data_type: TYPE_FP16 dims: 1 }'
    (root / "halves" / "config.pbtxt").write_text(f"max_batch_size: 4 sequence_batching {{ {state} }}")
    return root


@played(halves)
async def test_an_fp16_state_is_rounded_after_each_step(scene: Scene) -> None:
    state = np.float16(0)
    for step in range(20):
        expected = np.float32(state) + np.float32(step) / np.float32(3)
        assert np.float32(await scene.step(1, step, start=step == 0)) == expected
        state = np.float16(expected)


def growing(root: Path) -> Path:
    """x FP32 [n, 1], past FP32 [n, any] -> y: the sum of the past and x; all: the past with x behind it."""
    nodes = [
        helper.make_node("Concat", ["past", "x"], ["all"], axis=1),
        helper.make_node("ReduceSum", ["all", "axis"], ["y"], keepdims=1),
    ]
    number = TensorProto.FLOAT
    inputs: list[tuple[str, int, list[int | str]]] = [("x", number, ["n", 1]), ("past", number, ["n", "seen"])]
    outputs: list[tuple[str, int, list[int | str]]] = [("y", number, ["n", 1]), ("all", number, ["n", "all_seen"])]
    save_model(root / "growing" / "1" / "model.onnx", nodes, inputs, outputs, {"axis": np.array([1], np.int64)})
    initial = 'initial_state { name: "none" data_type: TYPE_FP32 dims: 0 zero_data: true }'
    state = f'state {{ input_name: "past" output_name: "all" data_type: TYPE_FP32 dims: -1 {initial} }}'
    (root / "growing" / "config.pbtxt").write_text(f"max_batch_size: 4 sequence_batching {{ {state} }}")
    return root


@played(growing)
async def test_sequences_whose_states_differ_in_size_share_no_batch(scene: Scene) -> None:
    assert [await scene.step(1, x, start=x == 1) for x in (1, 2, 3)] == [1, 3, 6]
    answers = await asyncio.gather(scene.step(1, 4), *(scene.step(key, key, start=True) for key in (2, 3)))
    assert answers == [10, 2, 3]
    assert sorted(map(len, scene.held.batches[3:])) == [1, 2]


def test_a_state_is_a_copy_of_its_row(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        await asyncio.gather(*(scene.step(key, key, start=True) for key in (1, 2, 3)))
        held = [one for one in gc.get_objects() if type(one) is Sequence and one.states is not None]
        assert len(held) == 3
        assert all(state.base is None and state.nbytes == 4 for one in held for state in one.states or ())

    gc.collect()
    play(sum_model(tmp_path), test)


def test_requests_are_freed_without_a_garbage_collection(tmp_path: Path) -> None:
    def steps() -> int:
        return sum(type(one) is Step for one in gc.get_objects())

    async def test(scene: Scene) -> None:
        for key in range(1, 5):
            await scene.step(key, 1, start=True)
            request, _ = scene.request(key, 2)
            scene.scheduler.submit(request)
            behind = scene.send(key, 3)
            scene.scheduler.cancel(request)
            with pytest.raises(RequestCancelledError):
                await behind
            await scene.step(key, 4, end=True)
            del request, behind
        assert (steps(), scene.scheduler.running_sequences, scene.scheduler.waiting) == (0, 0, 0)

    gc.collect()
    gc.disable()
    try:
        play(sum_model(tmp_path), test)
    finally:
        gc.enable()
