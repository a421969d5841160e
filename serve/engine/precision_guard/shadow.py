"""Sampled requests run on the fp32 twin too, beside the way of requests, to see how far the fp16 answers have drifted.

The thread has no lower priority than others, on purpose: an answer would wait while the scheduler lets it hold Python's lock
without a core to run on. Instead it may use a share of one core's time, and what is sampled beyond that is dropped.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from serve.engine.errors import ModelLoadError
from serve.engine.precision_guard.drift import compare
from serve.engine.precision_guard.non_finite import has_non_finite
from serve.engine.precision_guard.parts import Part, parts
from serve.engine.precision_guard.tally import Tally
from serve.engine.precision_guard.twin import Fp32Twin
from serve.engine.requests import InferRequest
from serve.engine.tensors import Tensors
from serve.engine.worker import Worker

MAX_WAITING = 4
SHORT_S = 0.1  # runs up to this are timed by the clock alone


class Shadow:
    """Takes samples from worker threads and compares them on a thread of its own.

    Attributes:
        until: requests that pass before the next one is taken; whoever has a batch counts it down.
    """

    def __init__(self, twin: Fp32Twin, tally: Tally, *, rate: float, share: float, batched: bool) -> None:
        """Nothing starts before the first sample.

        Args:
            twin: to compare with.
            tally: where results go.
            rate: the share of requests to take, above 0 and at most 1.
            share: of one thread's time that runs may use, above 0 and at most 1.
            batched: the model has a batch dimension.
        """
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
        """Take one request of a batch, or drop it when the shadow is busy. Copies what it takes.

        Args:
            requests: of the batch.
            inputs: the batch's, by name.
            outputs: as the fp16 model gave them.
        """
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
        """Take nothing more, and end the thread once what was taken is done."""
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
                except RuntimeError:  # there are as many threads as may be; the answers must not pay for that
                    return None
            self._waiting += 1
            return self._worker

    def _run(self, inputs: Tensors, outputs: Tensors) -> None:
        try:
            if time.monotonic() < self._resting_until:  # it came while the one before it ran
                self._tally.shadow_dropped()
            elif not any(has_non_finite(array) for array in inputs.values()):
                self._twin.prepare()
                self._compare(inputs, outputs)
        except ModelLoadError as error:
            self._ended = True
            self._tally.shadow_failed(f"{error}; there are no more")
        except Exception as error:  # noqa: BLE001  (whatever a runtime raises must not end the thread)
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
            # The clock goes on while the process is stopped, or while its machine sleeps; its work does not.
            took_s = min(finished - started, max(SHORT_S, time.process_time() - worked))
            self._resting_until = finished + took_s * self._rest_factor

    def _gap(self) -> int:
        """Requests until the next sample: random, so that no rhythm of the clients' can hide behind it."""
        return max(1, round(random.expovariate(self._rate))) if self._rate < 1 else 1


def _copy(tensors: Tensors, part: Part) -> Tensors:
    # The batch's arrays are buffers that the next batch may use.
    return {name: array[part].copy() for name, array in tensors.items()}
