"""Requests to the real batcher with the response cache before it."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Mapping

import numpy as np
import pytest

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.caching.caching_scheduler import cache_answers
from halfserve.serve.engine.caching.response_cache import APART_BYTES, WHOLE_BYTES, RequestKeys, ResponseCache
from halfserve.serve.engine.errors import (
    BackendError,
    DeadlineExceededError,
    InferenceError,
    OutOfMemoryError,
    UnavailableError,
)
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import NO_PARAMETERS, InferRequest, Parameter
from halfserve.serve.engine.tensors import LateArray, LateInputs, RawInput, RawInputs, RawLayout, Tensors
from tests.serve.engine.fakes import HeldBackend
from tests.serve.engine.scene import Answers


def cached_model(answers: Answers, backend: HeldBackend, cache: ResponseCache | None = None, *, levels: int = 1) -> Model:
    model = answers.model(backend, config=ModelConfig(max_batch_size=8, response_cache={"enable": True}), levels=levels)
    cache_answers(model, ResponseCache(2**20) if cache is None else cache)
    return model


def counts(model: Model) -> tuple[int, int, int, int]:
    """Hits, misses, successes, failures."""
    totals = model.statistics.totals
    return totals.cache_hit.count, totals.cache_miss.count, totals.success.count, totals.fail.count


async def test_a_second_request_is_not_computed_again(answers: Answers) -> None:
    backend = HeldBackend()
    model = cached_model(answers, backend)
    for count in (1, 2, 3):
        model.scheduler.submit(answers.request(4))
        await answers.all(count)
    model.scheduler.submit(answers.request(5))
    await answers.all(4)
    results = [result for of in answers.results.values() for result in of]
    assert [float(result["y"][0, 0]) for result in results if not isinstance(result, InferenceError)] == [5, 5, 5, 6]
    assert (backend.batches, counts(model)) == ([[4.0], [5.0]], (2, 2, 4, 0))
    totals = model.statistics.totals
    assert (totals.queue.count, totals.compute_infer.count, totals.rows) == (4, 2, 2)


async def test_a_hit_is_answered_later_and_not_within_submit(answers: Answers) -> None:
    model = cached_model(answers, HeldBackend())
    model.scheduler.submit(answers.request(4))
    await answers.all(1)
    model.scheduler.submit(answers.request(4))
    assert len(answers.results[4]) == 1
    gone = answers.request(4)
    model.scheduler.submit(gone)
    model.scheduler.cancel(gone)
    await model.scheduler.drain()
    assert (len(answers.results[4]), counts(model)) == (2, (1, 1, 2, 1))


async def test_identical_requests_in_flight_are_computed_once(answers: Answers) -> None:
    backend = HeldBackend(held=True)
    model = cached_model(answers, backend)
    answers.submit(model, *[4] * 5)
    backend.release.set()
    await answers.all(5)
    assert (backend.batches, counts(model)) == ([[4.0]], (4, 1, 5, 0))


@pytest.mark.parametrize("begun", [True, False])
async def test_a_cancelled_first_request_does_not_cost_the_others_their_answer(answers: Answers, begun: bool) -> None:
    backend = HeldBackend(held=True)
    model = cached_model(answers, backend)
    first, second = answers.request(4), answers.request(4)
    model.scheduler.submit(first)
    if begun:
        assert await asyncio.to_thread(backend.entered.wait, 20)
    model.scheduler.submit(second)
    model.scheduler.cancel(first)
    backend.release.set()
    await answers.all(1)
    assert (answers.value(4), backend.batches, counts(model)) == (5.0, [[4.0]], (0, 1, 1, 1))


async def test_what_all_clients_have_left_is_not_computed(answers: Answers) -> None:
    backend = HeldBackend()
    model = cached_model(answers, backend)
    both = answers.request(4), answers.request(4)
    for request in both:
        model.scheduler.submit(request)
    for request in both:
        model.scheduler.cancel(request)
        model.scheduler.cancel(request)
    model.scheduler.submit(answers.request(5))
    await answers.all(1)
    assert (backend.batches, counts(model)) == ([[5.0]], (0, 1, 1, 2))


async def test_an_error_reaches_all_that_wait_and_is_not_kept(answers: Answers) -> None:
    backend = HeldBackend(held=True)
    model = cached_model(answers, backend)
    for _ in range(2):
        model.scheduler.submit(answers.request(-1))
    backend.release.set()
    await answers.all(2)
    model.scheduler.submit(answers.request(-1))
    await answers.all(3)
    assert [type(result) for result in answers.results[-1]] == [BackendError] * 3
    assert (backend.batches, counts(model)) == ([[-1.0], [-1.0]], (0, 0, 0, 3))


async def test_one_whose_time_is_up_fails_alone(answers: Answers) -> None:
    backend = HeldBackend(held=True)
    model = cached_model(answers, backend)
    model.scheduler.submit(answers.request(100))  # holds the worker
    assert await asyncio.to_thread(backend.entered.wait, 20)
    hurried = answers.request(4, leave_by=time.monotonic())
    model.scheduler.submit(hurried)
    model.scheduler.submit(answers.request(4, leave_by=time.monotonic()))
    model.scheduler.submit(answers.request(4))
    backend.release.set()
    await answers.all(4)
    kinds = [type(result) for result in answers.results[4]]
    assert kinds[:2] == [DeadlineExceededError] * 2
    last = answers.results[4][2]
    assert not isinstance(last, InferenceError)
    assert (float(last["y"][0, 0]), counts(model)) == (5.0, (0, 2, 2, 2))


async def test_one_with_a_shorter_timeout_does_not_wait_for_one_with_a_longer(answers: Answers) -> None:
    backend = HeldBackend(held=True)
    model = cached_model(answers, backend)
    model.scheduler.submit(answers.request(100))  # holds the worker
    assert await asyncio.to_thread(backend.entered.wait, 20)
    model.scheduler.submit(answers.request(4))
    model.scheduler.submit(answers.request(4, leave_by=time.monotonic() + 0.1))
    await answers.all(1)
    assert isinstance(answers.results[4][0], DeadlineExceededError)
    assert not backend.batches
    model.scheduler.submit(answers.request(100, leave_by=time.monotonic()))  # it is being computed
    backend.release.set()
    await answers.all(4)
    assert backend.batches == [[100.0], [4.0]]


async def test_a_more_urgent_request_does_not_wait_for_a_less_urgent_one(answers: Answers) -> None:
    backend = HeldBackend(held=True)
    model = cached_model(answers, backend, levels=2)
    model.scheduler.submit(answers.request(100))
    assert await asyncio.to_thread(backend.entered.wait, 20)
    for priority in (1, 0, 1):
        request = answers.request(4)
        request.priority = priority
        model.scheduler.submit(request)
    assert model.batcher.waiting == 2
    backend.release.set()
    await answers.all(4)
    assert counts(model)[:2] == (1, 3)


def request_of(
    inputs: Tensors, size: int = 0, outputs: tuple[str, ...] = ("y",), parameters: Mapping[str, Parameter] = NO_PARAMETERS
) -> InferRequest:
    return InferRequest(inputs, outputs, 1, (1,), None, lambda _: None, size=size, parameters=parameters)


def test_only_equal_requests_have_equal_keys() -> None:
    keys = RequestKeys()

    def of(array: object, name: str = "x", **how: object) -> tuple[bytes, bytes]:
        return keys.of(request_of({name: np.asarray(array)}, **how))  # type: ignore[arg-type]

    ones = np.ones((1, 4), np.float32)
    different = [
        of(ones),
        of(ones, name="z"),
        of(ones.view(np.int32)),
        of(ones.reshape(2, 2)),
        of(-ones),
        of(np.ones((1, WHOLE_BYTES), np.float32)),
        of(np.ones((1, WHOLE_BYTES), np.float32) * 2),
        of(ones, outputs=("y", "z")),
        of(ones, parameters={"temperature": 1}),
        of(ones, parameters={"temperature": "1"}),
        of(np.array([b"ab", b"c"], object)),
        of(np.array([b"a", b"bc"], object)),
    ]
    assert len(set(different)) == len(different)
    assert of(ones) == of(ones.copy(), parameters={"priority": 3, "timeout": 5})
    assert len(of(np.ones((1, 2**18), np.float32))[1]) == 32
    two = {"a": np.array([1, 2], np.int8), "b": np.array([3], np.int8)}
    assert keys.of(request_of(two)) != keys.of(request_of({"a": two["a"][:1], "b": np.array([2, 3], np.int8)}))


@pytest.mark.parametrize("name", ["text", "priority"])  # one that decides the answer, and one that does not
async def test_long_parameters_of_past_requests_are_not_held(answers: Answers, name: str) -> None:
    model = cached_model(answers, HeldBackend(), ResponseCache(2**23))
    gc.collect()
    gc.disable()  # in a server the garbage collector runs rarely
    tracemalloc.start()
    for count in range(64):
        layout = RawLayout((RawInput("x", np.dtype(np.float32), (1, 1), 1, 4),))  # as of a request that is not remembered
        request = answers.request(count)
        request.inputs = RawInputs(layout, np.float32(count).tobytes(), (0,))
        request.parameters = {name: f"{count:03}" + "x" * 100_000}
        model.scheduler.submit(request)
        await answers.all(count + 1)
    del request
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    gc.enable()
    assert held_bytes < 1_000_000
    assert counts(model)[:2] == (0, 64)


def test_long_parameters_tell_requests_apart() -> None:
    long, other = ({"text": "x" * WHOLE_BYTES + end} for end in "ab")
    ones, keys = {"x": np.ones(1)}, RequestKeys()
    assert keys.of(request_of(ones, parameters=long)) == keys.of(request_of(ones, parameters=dict(long)))
    assert keys.of(request_of(ones, parameters=long)) != keys.of(request_of(ones, parameters=other))


@pytest.mark.parametrize("late", [True, False])
async def test_large_inputs_and_those_to_be_parsed_are_read_once_on_a_thread(answers: Answers, late: bool) -> None:
    backend, reads = HeldBackend(), []
    model = cached_model(answers, backend)

    def read() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        reads.append(asyncio.events._get_running_loop())
        return np.full((1, 1), len(reads), np.float32)

    for count in (1, 2):
        request = answers.request(4)
        if late:
            request.inputs = LateInputs({"x": LateArray((1, 1), read)})
        request.size = APART_BYTES + 1
        model.scheduler.submit(request)
        await answers.all(count)
    assert backend.batches == ([[1.0], [2.0]] if late else [[4.0]])  # what was read is what was computed
    assert reads == ([None, None] if late else [])


async def test_inputs_that_cannot_be_read_are_the_requests_own_error(answers: Answers) -> None:
    model = cached_model(answers, HeldBackend())

    def refuse() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        raise BackendError("not there")

    def break_down() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        raise ZeroDivisionError

    for read in (refuse, break_down):
        request = answers.request(4)
        request.inputs = LateInputs({"x": LateArray((1, 1), read)})
        model.scheduler.submit(request)
    await answers.all(2)
    assert {str(error) for error in answers.results[4]} == {"not there", "the inputs of this request cannot be read"}
    assert counts(model) == (0, 0, 0, 2)


async def test_inputs_for_which_memory_runs_out_leave_no_stack_trace(
    answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    model = cached_model(answers, HeldBackend())

    def read() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        raise MemoryError

    request = answers.request(4)
    request.inputs = LateInputs({"x": LateArray((1, 1), read)})
    model.scheduler.submit(request)
    await answers.all(1)
    assert type(answers.error(4)) is OutOfMemoryError
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("the inputs of a request cannot be read: memory ran out", None)


async def test_a_draining_model_answers_what_it_took_and_forgets(answers: Answers) -> None:
    cache, backend = ResponseCache(2**20), HeldBackend()
    model = cached_model(answers, backend, cache)
    model.scheduler.submit(answers.request(4))
    await answers.all(1)
    model.scheduler.submit(answers.request(4))
    large = answers.request(6)
    large.size = APART_BYTES + 1
    model.scheduler.submit(large)
    await model.scheduler.drain()
    assert (len(answers.results[4]), answers.value(6), cache.size) == (2, 7.0, 0)
    with pytest.raises(UnavailableError, match="shutting down"):
        model.scheduler.submit(answers.request(4))
