"""The strategy `direct` with a row for each sequence: controls, rows without a request, and waiting for more rows."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from halfserve.serve.engine.errors import DeadlineExceededError, InvalidArgumentError
from tests.serve.engine.sequences.scene import TELLING, WAIT_S, Scene, play, played, save_telling

TOLD = ("y", "told_start", "told_end", "told_ready", "told_id")


def telling_model(root: Path, strategy: str = "direct { }", *, batch: int = 4) -> Path:
    save_telling(root / "telling" / "1" / "model.onnx")
    idle = "max_sequence_idle_microseconds: 60000000"
    (root / "telling" / "config.pbtxt").write_text(
        f"max_batch_size: {batch} sequence_batching {{ {idle} {strategy} {TELLING} }}"
    )
    return root


async def told(scene: Scene, key: int, x: float, *, start: bool = False, end: bool = False) -> tuple[float, ...]:
    answer = await scene.send(key, x, start=start, end=end, outputs=TOLD)
    assert [array.shape for array in answer.values()] == [(1, 1)] * len(TOLD)
    return tuple(float(array[0, 0]) for array in answer.values())


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
def test_controls_tell_where_in_its_sequence_a_row_is(tmp_path: Path, strategy: str) -> None:
    async def test(scene: Scene) -> None:
        assert await told(scene, 7, 1, start=True) == (1, 1, 5, 1, 7)
        assert await told(scene, 7, 2) == (2, 0, 5, 1, 7)
        assert await told(scene, 7, 3, end=True) == (3, 0, 6, 1, 7)
        assert await told(scene, 2**53, 4, start=True, end=True) == (4, 1, 6, 1, 2**53)

    play(telling_model(tmp_path, strategy), test)


@played(telling_model)
async def test_each_sequence_has_its_row(scene: Scene) -> None:
    await asyncio.gather(*(told(scene, key, key, start=True) for key in (1, 2, 3, 4)))
    assert scene.held.batches == [[1, 2, 3, 4]]
    answers = await asyncio.gather(told(scene, 4, 40), told(scene, 2, 20))
    assert [answer[0] for answer in answers] == [40, 20]
    assert scene.held.batches[1:] == [[20, 20, 40, 40]]  # rows without a request are like the next one
    await told(scene, 2, 21, end=True)
    await told(scene, 5, 50, start=True)  # takes the free row
    assert scene.held.batches[2:] == [[21, 21], [50, 50]]
    totals = scene.model.statistics.totals
    assert (totals.success.count, totals.batches) == (8, 4)


@played(telling_model)
async def test_rows_without_a_request_are_not_ready(scene: Scene) -> None:
    await asyncio.gather(*(told(scene, key, key, start=True) for key in (1, 2, 3)))
    seen: list[dict[str, list[float]]] = []
    run = scene.held.run

    def watched(inputs: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]) -> object:
        seen.append({name: array.ravel().tolist() for name, array in inputs.items()})
        return run(inputs)

    scene.held.run = watched  # type: ignore[method-assign,assignment]
    await told(scene, 3, 9, end=True)
    assert seen == [{"x": [9, 9, 9], "start": [0, 0, 0], "end": [5, 5, 6], "ready": [False, False, True], "id": [0, 0, 3]}]


@played(telling_model)
async def test_a_cancelled_row_stays_in_its_batch(scene: Scene) -> None:
    await asyncio.gather(*(told(scene, key, key, start=True) for key in (1, 2, 3)))
    await scene.until_computing()
    await scene.hold()
    first = scene.send(3, 30, outputs=TOLD)
    await scene.until_computing()
    gone, _ = scene.request(1, 10, outputs=TOLD)
    scene.scheduler.submit(gone)
    beside = scene.send(2, 20, outputs=TOLD)
    scene.scheduler.cancel(gone)
    again = scene.send(1, 11, outputs=TOLD)
    scene.held.release.set()
    assert [float((await one)["y"][0, 0]) for one in (first, beside, again)] == [30, 20, 11]
    assert scene.held.batches[2:] == [[11, 20]]


@played(telling_model)
async def test_a_row_whose_deadline_passes_during_a_batch_is_answered_then(scene: Scene) -> None:
    await scene.hold()
    first = scene.send(1, 1, start=True)
    await scene.until_computing()
    request, late = scene.request(2, 2, start=True)
    request.deadline = time.monotonic() + 0.1
    scene.scheduler.submit(request)
    with pytest.raises(DeadlineExceededError, match="passed while the request waited in the queue"):
        await asyncio.wait_for(late, WAIT_S)
    assert not first.done()
    scene.held.release.set()
    assert float((await first)["y"][0, 0]) == 1
    assert scene.held.batches == [[1]]


def test_a_batch_waits_for_the_asked_share_of_its_rows(tmp_path: Path) -> None:
    waiting = "direct { max_queue_delay_microseconds: 60000000 minimum_slot_utilization: 0.5 }"

    async def test(scene: Scene) -> None:
        first = asyncio.create_task(told(scene, 1, 1, start=True))
        for _ in range(5):  # turns of the loop, in which the first row finds that it has to wait
            await asyncio.sleep(0)
        assert await told(scene, 2, 2, start=True) == (2, 1, 5, 1, 2)
        assert await first == (1, 1, 5, 1, 1)
        assert scene.held.batches == [[1, 2]]

    play(telling_model(tmp_path, waiting), test)


def test_drain_waits_for_no_more_rows(tmp_path: Path) -> None:
    waiting = "direct { max_queue_delay_microseconds: 60000000 minimum_slot_utilization: 1 }"

    async def test(scene: Scene) -> None:
        first = scene.send(1, 1, start=True, end=True, outputs=TOLD)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not scene.held.batches
        await asyncio.wait_for(scene.scheduler.drain(), WAIT_S)
        assert (await first)["y"].tolist() == [[1]]

    play(telling_model(tmp_path, waiting), test)


def test_a_batch_goes_when_its_delay_is_over(tmp_path: Path) -> None:
    waiting = "direct { max_queue_delay_microseconds: 1000 minimum_slot_utilization: 1 }"

    async def test(scene: Scene) -> None:
        assert await told(scene, 1, 1, start=True) == (1, 1, 5, 1, 1)

    play(telling_model(tmp_path, waiting), test)


def test_a_string_id_is_told_to_a_model_that_reads_strings(tmp_path: Path) -> None:
    save_telling(tmp_path / "telling" / "1" / "model.onnx", id_type=TensorProto.STRING)
    controls = TELLING.replace("TYPE_UINT64", "TYPE_STRING")
    (tmp_path / "telling" / "config.pbtxt").write_text(f"max_batch_size: 4 sequence_batching {{ direct {{ }} {controls} }}")

    async def test(scene: Scene) -> None:
        answer = await scene.send("übung", 1, start=True, outputs=TOLD)
        assert answer["told_id"][0, 0] in {"übung", "übung".encode()}
        with pytest.raises(InvalidArgumentError, match="sequence_id is a number, expected a string: model 'telling' reads it"):
            scene.send(5, 1, start=True)

    play(tmp_path, test)


@played(telling_model)
async def test_a_string_id_is_refused_by_a_model_that_reads_numbers(scene: Scene) -> None:
    with pytest.raises(InvalidArgumentError, match="sequence_id is a string, expected a number: model 'telling' reads it"):
        scene.send("five", 1, start=True)
    assert scene.scheduler.running_sequences == 0
