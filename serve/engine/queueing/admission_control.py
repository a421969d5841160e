"""Admission control: refuses a request that could not be answered in time, because computing it would delay the others. Pure.

A request's end is predicted from the running batches, the rows that wait before it and the latency model (`pace`). No request
is refused until the model is confident, nor while no other request waits or runs: an idle model always computes, and so
learns when batches have become faster again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.errors import DeadlineExceededError, InferenceError, OverloadedError, QueueFullError
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.queueing.batch_queue import BatchQueue
from halfserve.serve.engine.queueing.pace import OFF, Pace
from halfserve.serve.engine.queueing.waiting_requests import FullError
from halfserve.serve.engine.requests import InferRequest

# Fractions of a request's time. CARE is the largest margin for batches that take longer than expected. SPARE is the margin for
# the network, which the server does not see, unless the request is in the very next batch. A longer queue would not answer more
# requests, but would answer all of them at the last moment, and so too late.
CARE: Final = 0.25
SPARE: Final = 0.2
SHORT_S: Final = 0.001  # shorter batches are learned from once in SAMPLE, because learning takes time too
SAMPLE: Final = 4
PLENTY: Final = 4.0  # factor of safety, see `_plenty_s`
# After this time without a request, the whole process may have been stopped (SIGSTOP, a sleeping machine).
STOOD_STILL_S: Final = 1.0


@dataclass(eq=False)
class RunningBatch:
    """A batch that is being computed.

    Attributes:
        bucket: bucket of its requests.
        rows: number of rows.
        started_s: time at which it was handed to its instance.
        likely_end_s: expected end; `started_s` until the latency model is confident.
    """

    bucket: Hashable
    rows: int
    started_s: float
    likely_end_s: float

    def free_s(self, now: float) -> float:
        """Return when its instance should be free. An overdue batch is expected to take as long again as it is overdue."""
        return now + abs(self.likely_end_s - now)


class AdmissionControl:
    """Predicts when requests of one model would be answered, and refuses the late ones.

    Attributes:
        running: the batches that are being computed.
    """

    def __init__(self, queue: BatchQueue, pace: Pace, instances: int) -> None:
        self._queue = queue
        self._pace = pace
        self._instances = instances
        self._target_s = pace.limits.latency_target_s
        self.running: set[RunningBatch] = set()
        # A request with more time than this, while fewer than `_plenty_waiting` requests wait, is admitted without a
        # prediction. Set after each batch to PLENTY times the time of all waiting requests if each were computed alone.
        self._longest_s = self._plenty_s = 0.0
        self._batches = 0
        self._asked_s = 0.0  # time of the latest request
        self._strayed_s = 0.0  # end of the latest batch that took far too long
        self._has_refused = (
            False  # since the last batch ended; if so, the next one is learned from, because refusing may no longer be needed
        )
        self._plenty_waiting = 0

    def free_s(self, now: float) -> float:
        """Return when an instance should be free."""
        behind = len(self.running) - self._instances  # batches that wait behind another one
        return now if behind < 0 else sorted([batch.free_s(now) for batch in self.running])[behind]

    def started(self, bucket: Hashable, rows: int, now: float) -> RunningBatch:
        batch = RunningBatch(bucket, rows, now, now + self._pace.likely_s(bucket, rows))
        self.running.add(batch)
        return batch

    def finished(self, batch: RunningBatch, now: float, took_s: float | None) -> None:
        """Record the end of a batch.

        `took_s`: seconds of computation; None for a batch that did not run as a whole, from which nothing is learned.
        """
        self.running.discard(batch)
        self._batches += 1
        if took_s is not None and (took_s > SHORT_S or self._has_refused or self._batches % SAMPLE == 0):
            self._learn(batch, now, took_s)
        self._has_refused = False
        self._longest_s = max(now - batch.started_s, 0.95 * self._longest_s)
        self._plenty_waiting = 2 * len(self._queue) + self._pace.limits.max_rows
        self._plenty_s = PLENTY * self._longest_s * (1 + self._plenty_waiting)

    def admit(self, request: InferRequest, now: float) -> InferenceError | None:
        """Record an arriving request, and tighten its deadline to the model's latency target.

        Returns:
            The reason to refuse it; None if it is admitted.
        """
        is_confident = self._pace.arrive(request.bucket, now)
        if now - self._asked_s > STOOD_STILL_S:
            self._postpone_overdue(now)
        self._asked_s = now
        target = self._target_s
        if target is not None:
            within = request.arrived_ns / 1e9 + target
            request.deadline = within if request.deadline is None else min(request.deadline, within)
        deadline = request.deadline
        if deadline is None or not is_confident or not (self.running or self._queue):
            return None
        if deadline - now > self._plenty_s and len(self._queue) < self._plenty_waiting:
            return None
        end = self.end_s(request, now)
        if end <= deadline:
            return None
        self._has_refused = True
        return self.refusal(request, end)

    def end_s(self, request: InferRequest, now: float) -> float:
        """Return when a request that arrives at `now` can expect its answer.

        This is the 99th percentile, as long as its margin costs at most a part (CARE) of the time that the request has: if some
        batches take many times as long as the others, the full margin would refuse nearly all requests.
        """
        pace, bucket = self._pace, request.bucket
        start = self.free_s(now)
        most = pace.most_rows(bucket)
        full, before = divmod(self._queue.waiting.rows_of(bucket), most)
        before_s = full * pace.likely_s(bucket, most) + self._others_s(bucket)
        if before_s:
            start += before_s * self._share_before(request.priority) / self._instances
        rows = min(most, before + request.rows + pace.expected(bucket, start - now))
        has_s = (request.deadline or start) - now
        likely_s = pace.likely_s(bucket, rows)
        takes_s = min(pace.at_most_s(bucket, rows), max(pace.mostly_s(bucket, rows), likely_s + CARE * has_s))
        return start + (max(takes_s, likely_s + SPARE * has_s) if full else takes_s)

    def _postpone_overdue(self, now: float) -> None:
        """Postpone the expected ends of overdue batches to `now`, because the process may have been stopped."""
        for batch in self.running:
            batch.likely_end_s = max(batch.likely_end_s, now)

    def _learn(self, batch: RunningBatch, now: float, took_s: float) -> None:
        likely_s = self._pace.likely_s(batch.bucket, batch.rows)
        strays = took_s > OFF * likely_s > 0
        # One cause delays all batches that run at the time, and is counted once.
        self._pace.observe(batch.bucket, batch.rows, took_s, happened_before=strays and batch.started_s < self._strayed_s)
        if strays:
            self._strayed_s = now

    def refusal(self, request: InferRequest, end_s: float) -> InferenceError:
        """Return the error for a request that would be answered at `end_s`.

        If the model's target is the bound, a retry helps, because it gets the same time again. If the client's deadline is the
        bound, a retry does not help: the queue shortens no faster than the deadline approaches.
        """
        deadline = request.deadline or 0.0
        given_s = deadline - request.arrived_ns / 1e9
        if self._is_target(request):
            return OverloadedError(
                f"the model's queue is too long to answer within its target of {given_s * 1e3:.0f} ms; retry with back-off",
                retry_after_s=max(0.001, end_s - deadline),
            )
        if given_s < self._pace.likely_s(request.bucket, request.rows):
            return DeadlineExceededError(
                f"the deadline leaves {max(0.0, given_s) * 1e3:.1f} ms, less than the model takes for this request alone; "
                "it was not computed: give it more time"
            )
        return DeadlineExceededError(
            f"the model's queue is too long to answer before the deadline, {given_s * 1e3:.0f} ms away; the request was not "
            "computed: give it more time, or send it when less waits"
        )

    def too_late(self, request: InferRequest, now: float) -> InferenceError:
        """Return the error for an admitted request that can no longer be answered in time."""
        if self._is_target(request) and not _has_waited_out(request, now):
            return OverloadedError(
                "the model fell behind and cannot answer within its latency target; the request was not computed: retry with "
                "back-off",
                retry_after_s=max(0.001, self._pace.likely_s(request.bucket, self._pace.most_rows(request.bucket))),
            )
        return late_error(request, now)

    def _is_target(self, request: InferRequest) -> bool:
        """Return whether the model's target, not the client, set the deadline."""
        target = self._target_s
        return target is not None and request.deadline == request.arrived_ns / 1e9 + target

    def _others_s(self, bucket: Hashable) -> float:
        pace, seconds = self._pace, 0.0
        for line in self._queue.waiting.filled():
            if line.bucket != bucket:
                most = pace.most_rows(line.bucket)
                full, rest = divmod(line.rows, most)
                seconds += full * pace.likely_s(line.bucket, most) + (pace.likely_s(line.bucket, rest) if rest else 0.0)
        return seconds

    def _share_before(self, level: int) -> float:
        return self._queue.waiting.count_before(level) / max(1, len(self._queue))


def late_error(request: InferRequest, now: float) -> DeadlineExceededError:
    """Return the error for a request past its timeout or deadline, or whose deadline will pass before its answer."""
    if _has_waited_out(request, now):
        waited_s = now - request.arrived_ns / 1e9
        error = DeadlineExceededError(
            f"the request waited {waited_s * 1e3:.1f} ms in the queue, longer than its timeout allows; it was not computed: "
            "send it again later, or with a longer timeout"
        )
        return error.like(TritonPhrase.QUEUE_TIMEOUT)
    when = "passed" if request.deadline is None or request.deadline <= now else "would pass"
    while_ = "while the request waited in the queue" if when == "passed" else "before the model could answer"
    return DeadlineExceededError(f"the deadline {when} {while_}; it was not computed")


def _has_waited_out(request: InferRequest, now: float) -> bool:
    return request.leave_by is not None and request.leave_by <= now


def full_error(full: FullError, waiting: int, statistics: Statistics) -> QueueFullError:
    """Return the error for a refused request; the retry delay is the time to empty the queue at the average pace so far."""
    computing_ns = sum(size.compute_infer.ns for size in statistics.totals.by_batch_size.values())
    error = QueueFullError(
        f"the model's queue is full ({full}); retry with back-off",
        retry_after_s=max(0.001, computing_ns / 1e9 / max(1, statistics.totals.rows) * waiting),
    )
    return error.like(TritonPhrase.QUEUE_FULL)
