"""The fp32 twin of an fp16 model: it answers requests on which fp16 fails, and serves as the reference of shadow runs."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import TypeAlias

import numpy as np

from halfserve.serve.engine.backend import Backend
from halfserve.serve.engine.background_threads import Worker
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.precision_guard.non_finite import has_non_finite, non_finite_mask
from halfserve.serve.engine.precision_guard.tally import Tally, compare
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Array, Tensors

logger = logging.getLogger(__name__)


Part: TypeAlias = slice | EllipsisType
MAX_WAITING = 4
SHORT_S = 0.1  # shorter runs are timed by the clock alone


def parts(requests: Sequence[InferRequest], inputs: Tensors, *, batched: bool) -> Iterator[Part]:
    """Yield for each request the index of its rows in a batch's arrays, beyond which there may be padding.

    A request that was computed alone gets all of the model's output, which may have more rows than it sent; so does every
    request of a model without a batch dimension.
    """
    if not batched or (len(requests) == 1 and next(iter(inputs.values())).shape[0] == requests[0].rows):
        yield ...
        return
    start = 0
    for request in requests:
        yield slice(start, start + request.rows)
        start += request.rows


Load = Callable[[], Backend]


class Fp32Twin:
    """Computes in fp32, for one thread at a time. The twin is loaded by its first use."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._backend: Backend | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Load the twin, unless it is loaded.

        Raises:
            ModelLoadError: the twin cannot be loaded.
        """
        with self._lock:
            self._loaded()

    def answer(self, inputs: Tensors) -> Tensors:
        """Compute every output, in the twin's own dtypes; the inputs may have those of the fp16 model.

        Raises:
            ModelLoadError: the twin cannot be loaded.
            Exception: any error of the runtime.
        """
        with self._lock:
            backend = self._loaded()
            return backend.run({name: array.astype(backend.compute_dtype(name), copy=False) for name, array in inputs.items()})

    def _loaded(self) -> Backend:
        if self._backend is None:
            self._backend = self._load()
        return self._backend


@dataclass(frozen=True, kw_only=True)
class TwinAnswers:
    """A batch's outputs, with the twin's outputs in the rows of some requests.

    Attributes:
        outputs: outputs of the whole batch, in the interface's dtypes.
        beyond: number of values per output that are finite in fp32 but overflow the interface's dtype, for each request that
            the twin computed, by its place in the batch.
        failure: reason why the twin has no answer; None if it has one.
    """

    outputs: Tensors
    beyond: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    failure: str | None = None

    def trouble(self, index: int, wanted: Sequence[str]) -> str | None:
        """Return why the twin's answer to a request for some outputs is unusable; None if it is usable."""
        if self.failure is not None:
            return self.failure
        found = [(name, count) for name, count in self.beyond[index].items() if name in wanted]
        if not found:
            return None
        name, count = found[0]
        dtype = self.outputs[name].dtype
        return (
            f"in fp32 they are finite, but {count} of output {name!r} are beyond {dtype}'s range; "
            "the model has to be exported with float32 outputs to answer this"
        )


class Fallback:
    """Runs the twin on the rows of the requests on which fp16 failed."""

    def __init__(self, twin: Fp32Twin) -> None:
        self._twin = twin

    def answer(self, inputs: Tensors, outputs: Tensors, places: Mapping[int, Part]) -> TwinAnswers:
        """Compute the rows at `places`, by the requests' places in the batch, on the twin; `outputs` are not changed."""
        try:
            answers = self._twin.answer({name: _gather(array, places) for name, array in inputs.items()})
        except Exception as error:  # noqa: BLE001  (an error of the runtime must not fail the rest of the batch)
            logger.warning("the fp32 twin failed: %s", error)
            return TwinAnswers(outputs=outputs, failure="the fp32 twin failed on it too")
        replaced = {name: array.copy() for name, array in outputs.items()}
        beyond: dict[int, dict[str, int]] = {index: {} for index in places}
        for name, array in replaced.items():
            for index, exact in _dealt_out(answers[name], places):
                part = places[index]
                if exact.shape != array[part].shape:
                    failure = f"the fp32 twin answers with output {name!r} of another shape, {list(exact.shape)}"
                    return TwinAnswers(outputs=outputs, failure=failure)
                with np.errstate(over="ignore", invalid="ignore"):
                    array[part] = exact
                lost = int(np.count_nonzero(non_finite_mask(array[part]) & ~non_finite_mask(exact)))
                if lost:
                    beyond[index][name] = lost
        return TwinAnswers(outputs=replaced, beyond=beyond)


def _gather(array: Array, places: Mapping[int, Part]) -> Array:
    rows = [array[part] for part in places.values()]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _dealt_out(answer: Array, places: Mapping[int, Part]) -> Iterator[tuple[int, Array]]:
    start = 0
    for index, part in places.items():
        if isinstance(part, slice):
            end = start + part.stop - part.start
            yield index, answer[start:end]
            start = end
        else:
            yield index, answer


class Shadow:
    """Runs sampled requests on the fp32 twin, on a thread of its own, to measure the drift of the fp16 answers.

    The thread has no lower priority than others: a low-priority thread would keep Python's lock while it waits for a core.
    Instead it uses at most a share of one core's time, and further samples are dropped.

    Attributes:
        until: number of requests until the next sample; the callers count it down.
    """

    def __init__(self, twin: Fp32Twin, tally: Tally, *, rate: float, share: float, batched: bool) -> None:
        """`rate`: share of requests to sample; `share`: share of one thread's time for runs. Both are above 0 and at most 1."""
        self._twin = twin
        self._tally = tally
        self._rate = rate
        self._rest_factor = 1 / share - 1
        self._batched = batched
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._waiting = 0
        self._resting_until = 0.0
        self._ended = False
        self.until = self._gap()

    def sample(self, requests: Sequence[InferRequest], inputs: Tensors, outputs: Tensors) -> None:
        """Copy one request of a batch for a run, or drop it if the shadow is busy."""
        self.until = self._gap()
        if self._ended:
            return
        worker = self._free_worker()
        if worker is None:
            self._tally.shadow_dropped()
            return
        part = random.choice(list(parts(requests, inputs, batched=self._batched)))  # noqa: S311  (a sample, no secret)
        worker.submit(self._run, _copy(inputs, part), _copy(outputs, part))

    def stop(self) -> None:
        """Take no more samples, and end the thread after the waiting ones."""
        self._ended = True
        with self._lock:
            worker, self._worker = self._worker, None
            self._waiting = MAX_WAITING
        if worker is not None:
            worker.stop()

    def _free_worker(self) -> Worker | None:
        with self._lock:
            if self._waiting >= MAX_WAITING or time.monotonic() < self._resting_until:
                return None
            if self._worker is None:
                try:
                    self._worker = Worker("shadow")
                except RuntimeError:  # the process may start no more threads, which must not fail the answers
                    return None
            self._waiting += 1
            return self._worker

    def _run(self, inputs: Tensors, outputs: Tensors) -> None:
        try:
            if time.monotonic() < self._resting_until:  # it was sampled while the previous one ran
                self._tally.shadow_dropped()
            elif not any(has_non_finite(array) for array in inputs.values()):
                self._twin.prepare()
                self._compare(inputs, outputs)
        except ModelLoadError as error:
            self._ended = True
            self._tally.shadow_failed(f"{error}; there are no more")
        except Exception as error:  # noqa: BLE001  (an error of the runtime must not end the thread)
            self._tally.shadow_failed(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._waiting -= 1

    def _compare(self, inputs: Tensors, outputs: Tensors) -> None:
        started, worked = time.monotonic(), time.process_time()
        try:
            reference = self._twin.answer(inputs)
            self._tally.shadow_run({name: compare(array, reference[name]) for name, array in outputs.items()})
        finally:
            finished = time.monotonic()
            # The clock goes on while the process is stopped or the machine sleeps; CPU time does not.
            took_s = min(finished - started, max(SHORT_S, time.process_time() - worked))
            self._resting_until = finished + took_s * self._rest_factor

    def _gap(self) -> int:
        """Return the number of requests until the next sample: random, so that it cannot align with a rhythm of the clients."""
        return max(1, round(random.expovariate(self._rate))) if self._rate < 1 else 1


def _copy(tensors: Tensors, part: Part) -> Tensors:
    # The arrays are copied because the next batch may reuse the buffers.
    return {name: array[part].copy() for name, array in tensors.items()}
