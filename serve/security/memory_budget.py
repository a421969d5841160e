"""The memory budget of all clients together, which counts unanswered requests and unread answers.

A server has one budget, and each connection counts the bytes that it holds in a share of it. While all shares together hold
less than three quarters of the budget, no share waits. Beyond that the shares are levelled: shares below the level grow, shares
above it wait. One waiting share at a time has priority at any size, so that one message of the allowed size always fits. Once
the budget is spent, new messages for a share above the level are refused.

Connections without an accepted token share a sixteenth of the budget and cannot use the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

DEFAULT_BYTES: Final = 256 * 2**20
STRANGERS_PART: Final = 16  # 1/16 of the budget is for connections without an accepted token
FREE_PART: Final = 4  # 1/4 of the budget is kept for the bytes that flow control already allows clients to send
MIN_WINDOW_BYTES: Final = 65_535  # the initial window of HTTP/2
MIN_PROGRESS_BYTES: Final = 2**18  # bytes that the share with priority must grow by in each `patience_s`
PRESS_STEPS: Final = 64  # shares are pressed again when the excess has grown by 1/64 of the budget
LAST_RESORT_PART: Final = 8  # when the budget is exceeded by 1/8, clients have only LAST_RESORT_S to read
LAST_RESORT_S: Final = 0.5
BUCKETS: Final = 64  # number of classes of share sizes, by powers of two

Soon = Callable[[Callable[[], None]], object]


def _call_soon(then: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(then)


def _nothing() -> None:
    """Do nothing: the default callback of a share that cannot free or continue anything."""


class MemoryBudget:
    """The memory budget of one server. Lives on the event loop."""

    def __init__(self, limit_bytes: int, *, patience_s: float = 2.0, soon: Soon = _call_soon) -> None:
        """Make an unused budget.

        `patience_s`: seconds in which the share with priority must make progress while others wait. `soon` calls a function at
        the end of this turn of the event loop.
        """
        strangers = limit_bytes // STRANGERS_PART
        self._known = _Pool(limit_bytes - strangers, patience_s, soon)
        self._strangers = _Pool(strangers, patience_s, soon)

    @property
    def limit_bytes(self) -> int:
        """Bytes that all shares together may hold."""
        return self._known.limit + self._strangers.limit

    @property
    def held_bytes(self) -> int:
        """Bytes that all shares hold."""
        return self._known.total + self._strangers.total

    def share(
        self, *, is_known: bool, press: Callable[[], None] = _nothing, go_on: Callable[[], None] = _nothing
    ) -> MemoryShare:
        """Make an empty share; `is_known`: no token is required, or one was accepted.

        `press` is called while memory is short and the share is above the level; it frees what it can. `go_on` is called once,
        when a waiting share may continue.
        """
        return MemoryShare(self._known if is_known else self._strangers, self._known, press, go_on)

    def look_after(self, now_s: float) -> None:
        """Press shares that hold too much while memory is short; to be called about once a second."""
        self._known.look_after(now_s)
        self._strangers.look_after(now_s)


class MemoryShare:
    """The part of the budget that one connection, or one HTTP request, holds.

    Attributes:
        size: bytes that the share holds.
        turns_lost: number of times that it lost priority for lack of progress.
    """

    __slots__ = ("_go_on", "_is_open", "_known", "_pool", "_press", "size", "turns_lost")

    def __init__(self, pool: _Pool, known: _Pool, press: Callable[[], None], go_on: Callable[[], None]) -> None:
        self._pool, self._known = pool, known
        self._press, self._go_on = press, go_on
        self._is_open = True
        self.size = self.turns_lost = 0
        pool.members += 1

    @property
    def is_known(self) -> bool:
        """Whether the share may use the whole budget."""
        return self._pool is self._known

    @property
    def is_short(self) -> bool:
        """Whether the share is above the level while memory is short; then it must not grow unless `goes_on` allows it."""
        pool = self._pool
        return pool.total > pool.narrow and self.size > pool.level(pool.narrow)

    @property
    def is_held_up(self) -> bool:
        """Whether the share `is_short`, and another share has priority."""
        return self.is_short and self is not self._pool.first

    @property
    def is_too_much(self) -> bool:
        """Whether the budget is spent and this share is above the level.

        New messages for it are refused then, except the one for which `goes_on` returns True.
        """
        pool = self._pool
        return pool.total > pool.limit and self.size > pool.level(pool.limit)

    @property
    def excess(self) -> int:
        """Bytes by which the share exceeds the level, once the budget is exceeded; otherwise 0."""
        pool = self._pool
        return max(0, self.size - pool.level(pool.limit)) if pool.total > pool.limit else 0

    def patience_s(self, usual_s: float) -> float:
        """Return the seconds in which a client above the level must read some bytes; few if the budget is exceeded by far."""
        pool = self._pool
        return min(usual_s, LAST_RESORT_S) if pool.total > pool.limit + pool.limit // LAST_RESORT_PART else usual_s

    @property
    def is_crowded_out(self) -> bool:
        """Whether the budget is spent, this share is above the level, and the other shares alone fill three quarters of it."""
        pool = self._pool
        return self.is_too_much and pool.total - self.size > pool.narrow

    @property
    def window_bytes(self) -> int:
        """Bytes that a connection may send at once: with all connections at this limit, the part kept free for them is full."""
        pool = self._pool
        return max(MIN_WINDOW_BYTES, (pool.limit - pool.narrow) // max(1, pool.members))

    def add(self, size: int) -> None:
        self.resize(self.size + size)

    def resize(self, size: int) -> None:
        """Set the size; a closed share stays empty."""
        if self._is_open and size != self.size:
            self._pool.resize(self, size)

    def goes_on(self) -> bool:
        """Return whether the share may grow. If not, it waits until `go_on` is called or this is called again."""
        return not self.is_short or self._pool.is_first(self)

    def step_back(self) -> None:
        """Give up priority after a whole message."""
        self._pool.step_back(self)

    def trust(self) -> None:
        """Let the share use the whole budget from now on, because a token was accepted."""
        if self._is_open and not self.is_known:
            size = self.size
            self._pool.leave(self)
            self._pool = self._known
            self._pool.members += 1
            self.resize(size)

    def close(self) -> None:
        """Release everything, and stop waiting."""
        if self._is_open:
            self._pool.leave(self)
            self._is_open = False
            self._press = self._go_on = _nothing  # breaks reference cycles through the callbacks

    def let_go_on(self) -> None:
        self._go_on()

    def press(self) -> None:
        self._press()


class _Pool:
    """A part of the budget and its shares.

    Attributes:
        limit: size of this part of the budget, in bytes.
        narrow: number of bytes from which on the shares are levelled.
        total: bytes that all shares hold.
        members: number of open shares.
        first: the share with priority at any size; None if no share needs it.
    """

    def __init__(self, limit: int, patience_s: float, soon: Soon) -> None:
        self.limit, self.narrow = limit, limit - limit // FREE_PART
        self.total = self.members = 0
        self.first: MemoryShare | None = None
        self._patience_s = patience_s
        self._soon = soon
        self._holders: set[MemoryShare] = set()
        self._waiting: set[MemoryShare] = set()
        self._counts, self._sums = [0] * BUCKETS, [0] * BUCKETS  # number and bytes of the holders, by the bits of their sizes
        self._press_at = limit  # bytes beyond which shares are pressed
        self._looks_soon = False
        self._seen: tuple[MemoryShare, int, float] | None = None  # the share with priority, its size, and since when

    def resize(self, share: MemoryShare, size: int) -> None:
        before, share.size = share.size, size
        if before:
            bits = before.bit_length()
            self._counts[bits] -= 1
            self._sums[bits] -= before
        if size:
            bits = size.bit_length()
            self._counts[bits] += 1
            self._sums[bits] += size
            self._holders.add(share)
        else:
            self._holders.discard(share)
        self.total += size - before
        if size < before:
            if share is self.first and not share.is_short:
                self.first = None
            if self._waiting:
                self._look_soon()
        elif self.total > self.limit:
            self._look_soon()

    def leave(self, share: MemoryShare) -> None:
        self.members -= 1
        self._waiting.discard(share)
        self.resize(share, 0)
        self.step_back(share)

    def step_back(self, share: MemoryShare) -> None:
        if share is self.first:
            self.first = None
            if self._waiting:
                self._look_soon()

    def level(self, bound: int) -> int:
        """Return the size above which shares must be cut so that all together hold no more than `bound` bytes."""
        left, count = bound, len(self._holders)
        for bits, (number, held) in enumerate(zip(self._counts, self._sums, strict=True)):
            if number:
                if left < count << bits:
                    return left // count
                left -= held
                count -= number
        return bound

    def is_first(self, share: MemoryShare) -> bool:
        """Give a share above the level priority if no other has it, and return whether it has; otherwise it waits."""
        if self.first is None:
            self.first = share
        if self.first is share:
            self._waiting.discard(share)
            return True
        self._waiting.add(share)
        return False

    def look_after(self, now_s: float) -> None:
        """Press shares above the level, and the share with priority if it makes no progress while others wait."""
        self._press_at = self.limit
        if self.total > self.narrow:
            level = self.level(self.narrow)
            for share in [one for one in self._holders if one.size > level and one is not self.first]:
                share.press()
        first, seen = self.first, self._seen
        if first is None:
            self._seen = None
        elif seen is None or seen[0] is not first or first.size >= seen[1] + MIN_PROGRESS_BYTES:
            self._seen = first, first.size, now_s
        elif now_s - seen[2] > self._patience_s:
            self.first = None
            if self._waiting:
                first.turns_lost += 1
                first.press()
                self._look_soon()

    def _look_soon(self) -> None:
        if not self._looks_soon:
            self._looks_soon = True
            self._soon(self._look)

    def _look(self) -> None:
        """Free memory if there is too little, and let waiting shares continue if there is enough."""
        self._looks_soon = False
        if self._beside_first > self._press_at:
            self._relieve()
        if self.total <= self.narrow:
            waiting, self._waiting = self._waiting, set()
            for share in waiting:
                share.let_go_on()
        elif self.first is None and self._waiting:
            self.first = min(self._waiting, key=lambda share: (share.turns_lost, share.size))
            self._waiting.discard(self.first)
            self.first.let_go_on()

    @property
    def _beside_first(self) -> int:
        """Bytes of all shares but the one with priority, whose size the others need not make up for."""
        return self.total - (0 if self.first is None else self.first.size)

    def _relieve(self) -> None:
        """Press shares above the level, the largest first, until the rest fits."""
        level = self.level(self.limit)
        above = [share for share in self._holders if share.size > level and share is not self.first]
        for share in sorted(above, key=lambda share: share.size, reverse=True):
            share.press()
            if self._beside_first <= self.limit:
                break
        # If pressing did not free enough, the next attempt waits until the budget has grown by a step.
        rest = self._beside_first
        self._press_at = self.limit if rest <= self.limit else rest + self.limit // PRESS_STEPS
