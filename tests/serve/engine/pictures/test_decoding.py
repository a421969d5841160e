"""Requests with pictures before a model's queue: turns of clients, memory, cancellation, and time limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Event, current_thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halfserve.protos.pictures import EncodedPicture, PicturePreparation
from halfserve.serve.engine.errors import (
    DeadlineExceededError,
    InferenceError,
    InvalidArgumentError,
    QueueFullError,
    UnavailableError,
)
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.pictures import decoding_threads
from halfserve.serve.engine.pictures.decoding_threads import PICTURE_THREADS, DecodingThreads
from halfserve.serve.engine.pictures.encoded_inputs import EncodedInputs, EncodedPictures
from halfserve.serve.engine.pictures.picture_scheduler import PictureScheduler
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Array, Tensors
from halfserve.serve.security.memory_budget import MemoryBudget
from tests.serve.engine.fakes import ByHand
from tests.serve.http.tasks.small_picture_models import encoded

PREPARATION = PicturePreparation(height=8, width=8, resize=(8, 8), resample="box")
WAIT_S = 20
MIB = 2**20


class Decoder:
    """Stands in for the decoding of a picture: notes its thread and width, and waits for its release."""

    def __init__(self) -> None:
        self.threads: list[str] = []  # names of the threads that have decoded
        self.widths: list[int] = []  # widths of the pictures, in the order in which decoding began
        self.begun: SimpleQueue[int] = SimpleQueue()  # gets the width of each picture
        self.release = Event()  # lets all pictures be decoded

    def pixels(self, picture: EncodedPicture, preparation: PicturePreparation) -> Array:
        self.threads.append(current_thread().name)
        self.widths.append(picture.width)
        self.begun.put(picture.width)
        assert self.release.wait(WAIT_S)
        return np.full((preparation.height, preparation.width, 3), picture.width % 256, np.uint8)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoder]:
    decoder = Decoder()

    def pixels(picture: EncodedPicture, preparation: PicturePreparation) -> Array:
        return decoder.pixels(picture, preparation)

    monkeypatch.setattr(EncodedPicture, "pixels", pixels)
    yield decoder
    decoder.release.set()


class Scene:
    """A picture scheduler before a recorder, and the results of its requests."""

    def __init__(self, limit_bytes: int = 256 * MIB, budget: MemoryBudget | None = None) -> None:
        self.budget = budget or MemoryBudget(limit_bytes)
        self.threads = DecodingThreads()
        self.threads.bound(limit_bytes, self.budget.share(is_known=True))
        self.behind, self.statistics = ByHand(), Statistics()
        self.scheduler = PictureScheduler(self.behind, self.statistics, self.threads)
        self.results: list[Tensors | InferenceError] = []

    def request(self, *widths: int, client: str = "", height: int = 4, **given: Any) -> InferRequest:
        """Submit pictures of these widths; `given` as InferRequest takes it."""
        files = [encoded("PNG", Image.new("1", (width, height))) for width in widths]
        shape = (len(files), PREPARATION.height, PREPARATION.width, 3)
        pictures = EncodedPictures(
            name="image", files=np.array(files, object), shape=shape, preparation=PREPARATION, client=client
        )
        inputs, size = EncodedInputs(pictures, {"other": np.zeros(2, np.float32)}), sum(map(len, files))
        deadline = given.pop("deadline", None)
        request = InferRequest(inputs, ("y",), len(files), (1,), deadline, self.results.append, size=size, **given)
        self.scheduler.submit(request)
        return request

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not reached():  # noqa: ASYNC110  (each look is a turn of the event loop)
                await asyncio.sleep(0)

    async def begun(self, decoder: Decoder, count: int) -> list[int]:
        return [await asyncio.to_thread(decoder.begun.get, timeout=WAIT_S) for _ in range(count)]


async def test_pictures_become_pixels_off_the_event_loop_before_the_queue(decoder: Decoder) -> None:
    scene = Scene()
    request = scene.request(4, 5)
    await scene.begun(decoder, 1)  # the loop goes on meanwhile
    assert not scene.behind.submitted
    decoder.release.set()
    await scene.until(lambda: bool(scene.behind.submitted))
    assert scene.behind.submitted == [request]
    assert type(request.inputs) is dict
    assert request.inputs["image"].dtype == np.uint8
    assert request.inputs["image"][:, 0, 0, 0].tolist() == [4, 5]
    assert request.size == 2 * 8 * 8 * 3 + 8
    assert scene.budget.held_bytes == scene.threads.held_bytes == 2 * 8 * 8 * 3
    request.finish({})
    assert scene.results == [{}]
    assert scene.budget.held_bytes == 0
    scene.threads.stop()
    assert {name.partition("-")[0] for name in decoder.threads} == {"pictures"}


def test_requests_with_pixels_pass_by(decoder: Decoder) -> None:
    scene = Scene()
    request = InferRequest({"image": np.zeros((1, 8, 8, 3), np.uint8)}, ("y",), 1, (1,), None, scene.results.append)
    scene.scheduler.submit(request)
    scene.scheduler.cancel(request)
    assert (scene.behind.submitted, scene.behind.cancelled) == ([request], [request])
    assert not decoder.threads


async def test_a_cancelled_request_is_not_decoded(decoder: Decoder) -> None:
    scene = Scene()
    for width in range(PICTURE_THREADS):
        scene.request(10 + width, 20 + width, client=str(width))
    await scene.begun(decoder, PICTURE_THREADS)
    waiting = scene.request(30, client="a")
    scene.scheduler.cancel(waiting)
    running = scene.request(31, client="b")
    scene.scheduler.cancel(running)
    decoder.release.set()
    await scene.until(lambda: len(scene.behind.submitted) == PICTURE_THREADS)
    assert sorted(decoder.widths) == [10, 11, 20, 21]
    assert scene.statistics.totals.fail.count == 2
    for request in scene.behind.submitted:
        scene.scheduler.cancel(request)
    assert scene.behind.cancelled == scene.behind.submitted
    assert scene.budget.held_bytes == 0
    assert not scene.results
    scene.threads.stop()


async def test_a_request_that_is_cancelled_while_it_is_decoded_leaves_after_that_picture(decoder: Decoder) -> None:
    scene = Scene()
    request = scene.request(4, 5, 6)
    await scene.begun(decoder, 1)
    scene.scheduler.cancel(request)
    decoder.release.set()
    await scene.until(lambda: not scene.threads.held_bytes)
    assert decoder.widths == [4]
    assert not scene.behind.submitted
    scene.threads.stop()


@pytest.mark.parametrize("limit", ["deadline", "leave_by"])
async def test_a_request_whose_time_is_up_is_answered_and_not_decoded(limit: str, decoder: Decoder) -> None:
    scene = Scene()
    for width in range(PICTURE_THREADS):
        scene.request(10 + width, client=str(width))
    await scene.begun(decoder, PICTURE_THREADS)
    soon = time.monotonic() + 0.01
    scene.request(30, deadline=soon if limit == "deadline" else None, leave_by=soon if limit == "leave_by" else None)
    await scene.until(lambda: bool(scene.results))
    assert isinstance(scene.results[0], DeadlineExceededError)
    decoder.release.set()
    await scene.until(lambda: len(scene.behind.submitted) == PICTURE_THREADS)
    assert 30 not in decoder.widths
    scene.threads.stop()


async def test_each_client_has_its_turn_after_one_picture_that_takes_long(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding_threads, "PICTURE_THREADS", 1)
    scene = Scene()
    scene.request(3000, 3001, 3002, client="a", height=3000)  # 9 million pixels: long
    scene.request(3003, client="a", height=3000)
    scene.request(5, client="b")
    scene.request(6, client="c")
    await scene.begun(decoder, 1)
    decoder.release.set()
    await scene.until(lambda: len(scene.behind.submitted) == 4)
    assert set(decoder.widths[:3]) & {5, 6}
    assert [width for width in decoder.widths if width >= 3000] == [3000, 3001, 3002, 3003]
    scene.threads.stop()


async def test_one_thread_is_free_of_pictures_that_take_long(decoder: Decoder) -> None:
    scene = Scene()
    for width in (4300, 4301):  # one takes most of the memory
        scene.request(width, client=str(width), height=4600)
    assert len(await scene.begun(decoder, 1)) == 1
    for client in ("b", "4300", "4301"):  # also of a client whose long picture is decoded, or waits
        scene.request(5, client=client)
    assert await scene.begun(decoder, 1) == [5]
    decoder.release.set()
    await scene.until(lambda: len(scene.behind.submitted) == 5)
    assert decoder.widths[:2] in ([4300, 5], [4301, 5])
    scene.threads.stop()


async def test_pixels_in_the_queue_are_bounded() -> None:
    pixels = 8 * 8 * 3
    scene = Scene(limit_bytes=8 * 10 * pixels)  # an eighth is for pixels
    for client in range(30):
        scene.request(4, client=str(client))
    while len(scene.results) < 30:
        await scene.until(lambda: len(scene.behind.submitted) > len(scene.results))
        assert len(scene.behind.submitted) - len(scene.results) <= 10
        scene.behind.submitted[len(scene.results)].finish({})
    assert scene.budget.held_bytes == 0
    scene.threads.stop()


async def test_a_large_picture_is_refused_while_others_hold_the_memory(decoder: Decoder) -> None:
    scene = Scene()
    others = [scene.budget.share(is_known=True) for _ in range(20)]
    for share in others:
        share.resize(10 * MIB)
    scene.request(3000, height=3000)  # takes 78 MiB
    scene.request(5)
    decoder.release.set()
    await scene.until(lambda: bool(scene.results and scene.behind.submitted))
    assert isinstance(scene.results[0], UnavailableError)
    assert "--max-buffered-mib" in str(scene.results[0])
    assert decoder.widths == [5]
    scene.behind.submitted[0].finish({})
    for share in others:
        share.close()
    assert scene.budget.held_bytes == 0
    scene.threads.stop()


async def test_what_cannot_be_held_is_refused_by_name() -> None:
    scene = Scene(limit_bytes=MIB)
    scene.request(400, height=400)
    await scene.until(lambda: bool(scene.results))
    error = scene.results[0]
    assert isinstance(error, InvalidArgumentError)
    assert "'image' has a picture that has 400 by 400 pixels, which take 2 MiB while they are decoded" in str(error)
    with pytest.raises(InvalidArgumentError, match="send fewer at once"):
        scene.request(*[4] * 5000)
    assert scene.budget.held_bytes == 0
    scene.threads.stop()


async def test_the_number_of_unanswered_requests_is_bounded(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_threads, "MOST_REQUESTS", 3)
    scene = Scene()
    requests = [scene.request(4) for _ in range(3)]
    with pytest.raises(QueueFullError, match="3 requests with pictures are unanswered"):
        scene.request(4)
    assert scene.statistics.totals.fail.count == 1
    for request in requests:
        scene.scheduler.cancel(request)
    scene.scheduler.cancel(scene.request(4))
    decoder.release.set()
    await scene.until(lambda: not scene.threads.held_bytes)
    scene.threads.stop()


async def test_a_refusal_of_the_queue_is_the_answer() -> None:
    scene = Scene()
    scene.behind.refusal = QueueFullError("full", retry_after_s=1.0)
    scene.request(4)
    await scene.until(lambda: bool(scene.results))
    assert scene.results == [scene.behind.refusal]
    assert scene.budget.held_bytes == 0
    scene.threads.stop()


async def test_a_drain_decodes_what_was_accepted_and_takes_no_more(decoder: Decoder) -> None:
    scene = Scene()
    scene.request(4)
    await scene.begun(decoder, 1)
    draining = asyncio.create_task(scene.scheduler.drain())
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="shutting down"):
        scene.request(5)
    drained_before = scene.behind.is_drained
    decoder.release.set()
    async with asyncio.timeout(WAIT_S):
        await draining
    assert len(scene.behind.submitted) == 1
    assert (drained_before, scene.behind.is_drained) == (False, True)
    scene.threads.stop()
