"""The memory that all clients together may take: requests that are not answered yet, and answers that are not read yet.

A server has one budget. Each connection counts what it holds in its share of it. Up to three quarters of the budget, no share
waits. Beyond that the shares are levelled: those with less than the level grow, those with more wait. One of these at a time
goes on whatever it holds, so that one message of the allowed size always fits. Beyond the budget, what comes for a share with
more than the level is refused.

Connections that have shown no accepted token yet have a sixteenth of the budget between them, and cannot take of the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

DEFAULT_BYTES = 256 * 2**20
STRANGERS_PART = 16  # of the budget, for connections without a token that was accepted
FREE_PART = 4  # of the budget, that is kept for what clients have been allowed to send already
MIN_WINDOW_BYTES = 65_535  # which HTTP/2 begins with
MIN_PROGRESS_BYTES = 2**18  # of the one that goes on, in each `patience_s`
PRESS_STEPS = 64  # in which a budget that is exceeded grows until those who exceed it are pressed again
LAST_RESORT_PART, LAST_RESORT_S = 8, 0.5  # exceeded by so much of the budget, clients that do not read have no more time
BUCKETS = 64  # of sizes, by their powers of two

Soon = Callable[[Callable[[], None]], object]


def _call_soon(then: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(then)


def _nothing() -> None:
    """The share has nothing that it could do without."""


class MemoryBudget:
    """Of one server. Lives on the event loop."""

    def __init__(self, limit_bytes: int, *, patience_s: float = 2.0, soon: Soon = _call_soon) -> None:
        """A budget of which nothing is taken.

        Args:
            limit_bytes: for all clients together.
            patience_s: seconds in which the one that goes on while others wait must make progress.
            soon: calls a function at the end of this turn of the event loop.
        """
        strangers = limit_bytes // STRANGERS_PART
        self._known = _Pool(limit_bytes - strangers, patience_s, soon)
        self._strangers = _Pool(strangers, patience_s, soon)

    @property
    def held_bytes(self) -> int:
        """What all shares hold."""
        return self._known.total + self._strangers.total

    def share(self, *, is_known: bool, press: Callable[[], None] = _nothing, go_on: Callable[[], None] = _nothing) -> Share:
        """A share that holds nothing.

        Args:
            is_known: no token is asked for, or one was accepted.
            press: is called while memory is short and the share holds more than others; frees what it can do without.
            go_on: is called once, when a share that was told to wait need not wait any more.
        """
        return Share(self._known if is_known else self._strangers, self._known, press, go_on)

    def look_after(self, now_s: float) -> None:
        """Have those who hold memory up while it is short let go of it; to be called about once a second."""
        self._known.look_after(now_s)
        self._strangers.look_after(now_s)


class Share:
    """What one connection, or one HTTP request, holds.

    Attributes:
        size: in bytes.
        turns_lost: how often it has let others wait without making progress.
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
        """Whether it takes of the whole budget."""
        return self._pool is self._known

    @property
    def is_short(self) -> bool:
        """Whether it holds more than its part while memory is short; it is not to grow then, unless it `goes_on`."""
        pool = self._pool
        return pool.total > pool.narrow and self.size > pool.level(pool.narrow)

    @property
    def is_held_up(self) -> bool:
        """Whether it `is_short`, and it is another's turn to go on."""
        return self.is_short and self is not self._pool.first

    @property
    def is_too_much(self) -> bool:
        """Whether the budget is spent and this share holds more than its part.

        What comes for it is to be refused then, but for the one message with which it `goes_on`.
        """
        pool = self._pool
        return pool.total > pool.limit and self.size > pool.level(pool.limit)

    @property
    def excess(self) -> int:
        """Bytes beyond its part, by the whole budget."""
        pool = self._pool
        return max(0, self.size - pool.level(pool.limit)) if pool.total > pool.limit else 0

    def patience_s(self, usual_s: float) -> float:
        """Seconds in which a client that holds more than its part must read some; few where the budget is exceeded by far."""
        pool = self._pool
        return min(usual_s, LAST_RESORT_S) if pool.total > pool.limit + pool.limit // LAST_RESORT_PART else usual_s

    @property
    def is_crowded_out(self) -> bool:
        """Whether the budget is spent, with what this share holds beyond its part and others hold beside it."""
        pool = self._pool
        return self.is_too_much and pool.total - self.size > pool.narrow

    @property
    def window_bytes(self) -> int:
        """What a connection may be allowed to send at once: all of them together fill the part that is kept for that."""
        pool = self._pool
        return max(MIN_WINDOW_BYTES, (pool.limit - pool.narrow) // max(1, pool.members))

    def add(self, size: int) -> None:
        """Hold so many bytes more, or fewer."""
        self.resize(self.size + size)

    def resize(self, size: int) -> None:
        """Hold so many bytes; none once it is closed."""
        if self._is_open and size != self.size:
            self._pool.resize(self, size)

    def goes_on(self) -> bool:
        """Whether it may grow. Where it may not it waits, until `go_on` is called or it is asked again."""
        return not self.is_short or self._pool.is_first(self)

    def step_back(self) -> None:
        """A message is whole: where this share goes on whatever it holds, another may do so next."""
        self._pool.step_back(self)

    def trust(self) -> None:
        """A token was accepted: take of the whole budget from now on."""
        if self._is_open and not self.is_known:
            size = self.size
            self._pool.leave(self)
            self._pool = self._known
            self._pool.members += 1
            self.resize(size)

    def close(self) -> None:
        """Hold nothing any more, and want nothing."""
        if self._is_open:
            self._pool.leave(self)
            self._is_open = False
            self._press = self._go_on = _nothing  # they may lead back here: nothing is to wait for the garbage collector

    def let_go_on(self) -> None:
        """It need not wait any more."""
        self._go_on()

    def press(self) -> None:
        """Have it free what it can do without."""
        self._press()


class _Pool:
    """A part of the budget and its shares.

    Attributes:
        limit: bytes.
        narrow: bytes from which on the shares are levelled.
        total: bytes that all shares hold.
        members: shares.
        first: the share that goes on whatever it holds, if one needs to.
    """

    def __init__(self, limit: int, patience_s: float, soon: Soon) -> None:
        self.limit, self.narrow = limit, limit - limit // FREE_PART
        self.total = self.members = 0
        self.first: Share | None = None
        self._patience_s = patience_s
        self._soon = soon
        self._holders: set[Share] = set()
        self._waiting: set[Share] = set()
        self._counts, self._sums = [0] * BUCKETS, [0] * BUCKETS  # of the holders, by the bits of their sizes
        self._press_at = limit  # bytes beyond which shares are pressed
        self._looks_soon = False
        self._seen: tuple[Share, int, float] | None = None  # the first, what it held, and since when

    def resize(self, share: Share, size: int) -> None:
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

    def leave(self, share: Share) -> None:
        self.members -= 1
        self._waiting.discard(share)
        self.resize(share, 0)
        self.step_back(share)

    def step_back(self, share: Share) -> None:
        if share is self.first:
            self.first = None
            if self._waiting:
                self._look_soon()

    def level(self, bound: int) -> int:
        """What each share may hold so that all together, those with less included, hold no more than `bound`."""
        left, count = bound, len(self._holders)
        for bits, (number, held) in enumerate(zip(self._counts, self._sums, strict=True)):
            if number:
                if left < count << bits:
                    return left // count
                left -= held
                count -= number
        return bound

    def is_first(self, share: Share) -> bool:
        """Whether a share with more than the level may go on; it waits where it may not."""
        if self.first is None:
            self.first = share
        if self.first is share:
            self._waiting.discard(share)
            return True
        self._waiting.add(share)
        return False

    def look_after(self, now_s: float) -> None:
        """Press those who hold too much, and the first if it lets the others wait."""
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
        """Free memory where there is too little, and let those go on that need not wait any more."""
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
        """Bytes that all but the first hold: what it holds beyond the budget is not for others to make up for."""
        return self.total - (0 if self.first is None else self.first.size)

    def _relieve(self) -> None:
        """Press those with more than the level, the largest first, until the rest fits."""
        level = self.level(self.limit)
        above = [share for share in self._holders if share.size > level and share is not self.first]
        for share in sorted(above, key=lambda share: share.size, reverse=True):
            share.press()
            if self._beside_first <= self.limit:
                break
        # Where it did not help it is not tried again for each piece that comes.
        rest = self._beside_first
        self._press_at = self.limit if rest <= self.limit else rest + self.limit // PRESS_STEPS
