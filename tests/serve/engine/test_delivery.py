from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from serve.engine.batches.batch import Answered, Failed
from serve.engine.delivery import Delivery
from serve.engine.errors import BackendError, InferenceError, UnavailableError
from serve.engine.figures.statistics import BatchTimes, Statistics
from serve.engine.instances.supervision import Lost
from serve.engine.queueing.batch_limits import BatchLimits
from serve.engine.queueing.batch_queue import BatchQueue
from serve.engine.requests import InferRequest
from serve.engine.tensors import Tensors

TIMES = BatchTimes(started=1, assembled=2, computed=3, split=4)
SORRY = UnavailableError("send it again")


class Scene:
    """A delivery, and what it has given to whom."""

    def __init__(self, max_waiting: int = 10) -> None:
        self.queue: BatchQueue[InferRequest] = BatchQueue(BatchLimits(max_rows=8, max_waiting=max_waiting))
        self.statistics = Statistics()
        self.delivery = Delivery(self.queue, self.statistics)
        self.given: list[tuple[str, str]] = []

    def request(self, name: str) -> InferRequest:
        def done(result: Tensors | InferenceError) -> None:
            self.given.append((name, str(result) if isinstance(result, InferenceError) else str(result["y"][0])))

        return InferRequest({"x": np.zeros((1, 1))}, ("y",), 1, (1,), None, done)


def answered(*requests: InferRequest) -> Answered:
    return Answered(list(requests), [{"y": np.array([number])} for number in range(len(requests))], TIMES)


def test_batches_are_answered_in_order_each_request_with_its_own() -> None:
    scene = Scene()
    a, b, c, d = map(scene.request, "abcd")
    scene.delivery.add([answered(a, b)], 2)
    scene.delivery.add([answered(c), Failed(d, BackendError("no such row"))], 2)
    assert not scene.delivery.deliver()
    assert scene.given == [("a", "0"), ("b", "1"), ("c", "0"), ("d", "no such row")]
    assert (scene.statistics.totals.success.count, scene.statistics.totals.fail.count) == (3, 1)
    assert not scene.delivery.deliver(), "once"
    assert len(scene.given) == 4


def test_what_was_lost_with_its_copy_is_tried_once_more_and_no_third_time() -> None:
    scene = Scene()
    a, b = map(scene.request, "ab")
    scene.delivery.add([Lost([a, b], SORRY)], 2)
    assert scene.delivery.deliver()
    for alone in (a, b):  # it may be one of them that breaks copies
        again = scene.queue.take(0.0)
        assert again is not None
        assert (again.requests, scene.given) == ([alone], [])
    scene.delivery.add([answered(a)], 1)
    scene.delivery.add([Lost([b], SORRY)], 1)
    assert not scene.delivery.deliver()
    assert scene.given == [("a", "0"), ("b", "send it again")]


def test_what_was_lost_untouched_is_tried_together() -> None:
    scene = Scene()
    a, b = map(scene.request, "ab")
    scene.delivery.add([Lost([a, b], SORRY, untouched=True)], 2)
    assert scene.delivery.deliver()
    again = scene.queue.take(0.0)
    assert again is not None
    assert again.requests == [a, b]


def test_what_is_cancelled_while_it_waits_for_its_second_try_is_forgotten() -> None:
    scene = Scene()
    request = scene.request("a")
    scene.delivery.add([Lost([request], SORRY)], 1)
    assert scene.delivery.deliver()
    request.cancelled = True
    assert scene.queue.remove(request)
    alive = weakref.ref(request.inputs["x"])
    del request
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("why", ["cancelled", "full"])
def test_what_nobody_waits_for_or_the_queue_has_no_place_for_is_not_tried_again(why: str) -> None:
    scene = Scene(max_waiting=1)
    request = scene.request("a")
    if why == "cancelled":
        request.cancelled = True
    else:
        scene.queue.offer(scene.request("b"))
    scene.delivery.add([Lost([request], SORRY)], 1)
    assert not scene.delivery.deliver()
    assert scene.statistics.totals.fail.count == 1
    assert scene.given == ([] if why == "cancelled" else [("a", "send it again")])
