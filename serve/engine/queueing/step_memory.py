"""The memory for tensors between the steps of ensembles, which limits how many requests are in progress there.

The size of such tensors is known only once a step has computed them, when it is too late to wait. So a run claims the amount
that the latest runs of its ensemble have held, and waits before its first step while its claim does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from halfserve.serve.engine.errors import QueueFullError, UnavailableError
from halfserve.serve.engine.queueing.deadline_timer import DeadlineTimer
from halfserve.serve.engine.queueing.waiting_requests import is_late
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.resource_limits import BudgetShare
from halfserve.serve.engine.tensors import Tensors, memory_of

MOST_WAITING: Final = 8192  # most waiting runs, over all ensembles
UNKNOWN_PART: Final = 8  # part (1/8) of the limit that a run claims if no step of its ensemble has answered yet
EXCESS_PART: Final = 2  # part (1/2) of the limit by which larger tensors than expected may exceed it
FORGET_PART: Final = 8  # part (1/8) of the difference by which a smaller run lowers the expectation
COUNTED_BYTES: Final = 16_384  # least bytes of a run that is counted; the queues limit smaller ones
UNKNOWN: Final = -1
REPORTED_BYTES: Final = 2**18  # smaller changes of all claims are not reported to the server's memory budget
RETRY_S: Final = 1.0
FULL: Final = (
    "the server holds as many tensors between the steps of ensembles as it may (--max-buffered-mib); retry with back-off"
)


class StepMemory:
    """The claims of all runs, and the runs that wait for room. On the event loop only.

    Attributes:
        claimed: bytes that the runs hold or are expected to hold.
    """

    def __init__(self) -> None:
        """Begin without a bound; see `bound`."""
        self.claimed = 0
        self._limit: int | None = None
        self._share: BudgetShare | None = None
        self._reported = 0
        # The runs that wait, with their requests and the functions that begin them.
        self._line: dict[RunMemory, tuple[InferRequest, Callable[[], None]]] = {}
        self._timer = DeadlineTimer(self._drop_late)
        self._is_filling = False

    def bound(self, limit_bytes: int, share: BudgetShare) -> None:
        """Bound the claims, and count them in a share of the server's memory. To be called before the first request."""
        self._limit = limit_bytes
        self._share = share

    @property
    def unknown_claim(self) -> int:
        """Bytes that a run claims if nothing is known of its ensemble."""
        return 0 if self._limit is None else self._limit // UNKNOWN_PART

    def has_room(self, claim: int) -> bool:
        """Return whether a run may begin: its claim fits, or it is the only one."""
        if self._limit is None or not self.claimed:
            return True
        if self._line and not self._is_filling:
            return False
        return self.claimed + claim <= self._limit and (self._share is None or not self._share.is_short)

    def wait(self, run: RunMemory, request: InferRequest, begin: Callable[[], None]) -> None:
        """Call `begin`, which must not raise, once there is room for the run of a request, or once the request is late.

        Raises:
            QueueFullError: too many runs wait.
        """
        if len(self._line) >= MOST_WAITING:
            raise QueueFullError(f"{MOST_WAITING} requests wait for memory: {FULL}", retry_after_s=RETRY_S)
        self._line[run] = request, begin
        self._timer.watch(request.deadline, request.leave_by)

    def leave(self, run: RunMemory, claim: int) -> None:
        """Remove a run with this claim, which has ended: it neither waits nor holds anything."""
        self._line.pop(run, None)
        self.change(-claim)

    def change(self, more: int) -> None:
        """Add `more` bytes, which may be negative, to the claims of all runs."""
        self.claimed += more
        if self._share is not None and abs(self.claimed - self._reported) >= REPORTED_BYTES:
            self._reported = self.claimed
            self._share.resize(self.claimed)
        if more < 0 and self._line:
            self._fill()

    def require_within(self, claim: int) -> None:
        """Check the bytes that a run with this claim has added.

        Raises:
            UnavailableError: all runs together hold too much, and this is not the only one.
        """
        limit = self._limit
        if limit is not None and self.claimed > limit + limit // EXCESS_PART and claim < self.claimed:
            raise UnavailableError(FULL, retry_after_s=RETRY_S)

    def _fill(self) -> None:
        if self._is_filling:  # a run that begins here may end at once
            return
        self._is_filling = True
        try:
            while self._line:
                run, (_, begin) = next(iter(self._line.items()))
                if not self.has_room(run.expected_bytes):
                    break
                del self._line[run]
                begin()
        finally:
            self._is_filling = False

    def _drop_late(self, now: float) -> None:
        for run, (request, begin) in list(self._line.items()):
            if not is_late(request, now, now):
                self._timer.watch(request.deadline, request.leave_by)
            elif self._line.pop(run, None):  # an answer may have cancelled this run
                begin()


class RunSizes:
    """The bytes that runs of one ensemble hold between its steps, learned from earlier runs.

    Attributes:
        memory: memory for all ensembles.
        expected: expected bytes of the next run; 0 for fewer than COUNTED_BYTES, UNKNOWN before the first answer of a step.
    """

    __slots__ = ("expected", "memory")

    def __init__(self, memory: StepMemory) -> None:
        self.memory = memory
        self.expected = UNKNOWN

    @property
    def claim(self) -> int:
        """Bytes that a run claims."""
        return self.memory.unknown_claim if self.expected == UNKNOWN else self.expected

    def grown(self, held: int) -> None:
        """Record that a run holds `held` bytes now."""
        self.expected = max(self.expected, held)

    def ended(self, held: int) -> None:
        """Record the most bytes that an ended run has held."""
        rest = held if self.expected == UNKNOWN else self.expected - (self.expected - held) // FORGET_PART
        self.expected = rest if rest >= COUNTED_BYTES else 0


class RunMemory:
    """The tensors that one run holds between its steps, and its claim of memory for them."""

    __slots__ = ("_claim", "_held", "_is_within", "_most", "_sizes")

    def __init__(self, sizes: RunSizes, *, is_within: bool) -> None:
        """`is_within`: whether the run belongs to another one, so that it neither waits nor fails for want of memory."""
        self._sizes = sizes
        self._is_within = is_within
        self._claim = self._held = self._most = 0  # bytes

    @property
    def expected_bytes(self) -> int:
        """Bytes that the run will claim when it begins."""
        return self._sizes.claim

    def has_room(self) -> bool:
        """Return whether the run may begin now."""
        sizes = self._sizes
        return not sizes.expected or sizes.memory.has_room(sizes.claim) or self._is_within

    def wait(self, request: InferRequest, begin: Callable[[], None]) -> None:
        """See `StepMemory.wait`."""
        self._sizes.memory.wait(self, request, begin)

    def claim_expected(self) -> None:
        """Claim the bytes that the run is expected to hold."""
        if self._sizes.expected:
            self._change_claim()

    def hold(self, size: int) -> None:
        """Count `size` more bytes that the run holds.

        Raises:
            UnavailableError: all runs together hold too much.
        """
        self._held += size
        if self._held >= COUNTED_BYTES:
            self._sizes.grown(self._held)
            self._change_claim()
            if not self._is_within:
                self._sizes.memory.require_within(self._claim)

    def release(self, size: int) -> None:
        """Count `size` bytes as no longer held."""
        self._most = max(self._most, self._held)
        self._held -= size

    def record(self) -> None:
        """Learn from the run, which has succeeded."""
        most = max(self._most, self._held)
        if self._sizes.expected or most >= COUNTED_BYTES:
            self._sizes.ended(most)

    def leave(self) -> None:
        """Give up the claim of the run, which has ended, or its place in the line."""
        if self._sizes.expected or self._claim:
            self._sizes.memory.leave(self, self._claim)
            self._claim = 0

    def _change_claim(self) -> None:
        before, self._claim = self._claim, self._sizes.claim
        if self._claim != before:
            self._sizes.memory.change(self._claim - before)


def bytes_of(answer: Tensors) -> int:
    """Return the memory of a step's answer, in bytes."""
    return sum([memory_of(answer[name]) for name in answer])
