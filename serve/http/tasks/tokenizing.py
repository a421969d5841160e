"""The threads that tokenize: the texts of all clients in turn, in pieces of a bounded number of characters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request

from halfserve.serve.engine.queueing.client_queue import ClientQueue
from halfserve.serve.http.guards import client_of
from halfserve.serve.http.request_body import memory_held

INLINE_CHARACTERS: Final = 2000  # tokenized on the event loop, which takes up to 1 ms
PIECE_CHARACTERS: Final = 4096  # tokenized at once, which takes 1 to 6 ms; at least one text
LONG_CHARACTERS: Final = 16_384  # a text of so many takes 3 to 25 ms, longer than others may wait
CHARACTERS_PER_TEXT: Final = 64  # a text costs as much as so many characters, besides its own
BYTES_PER_CHARACTER: Final = 640  # most memory while a text is tokenized; 50 to 600 were measured
TOKENIZING_THREADS: Final = 2  # so that tokenizing leaves the other cores to the models


class Tokenized(Protocol):
    """The tokens of one text."""

    @property
    def nbytes(self) -> int: ...


R = TypeVar("R", bound=Tokenized)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerWork(Generic[R]):
    """Texts to tokenize.

    Attributes:
        characters: cost of each text, as the number of characters that take as much time.
        tokens_of: the tokens of the texts with these indices; called on any thread, for one piece after the other.
    """

    characters: Sequence[int]
    tokens_of: Callable[[range], list[R]]


class TokenizerThreads:
    """Parses and tokenizes the texts of all clients. Lives on the event loop."""

    def __init__(self) -> None:
        self._turns = ClientTurns(TOKENIZING_THREADS)
        # One text is never cut into pieces. While a long one is tokenized, another thread is free for shorter ones.
        self._long = ClientTurns(TOKENIZING_THREADS - 1)

    async def tokens(self, request: Request, work: TokenizerWork[R]) -> list[R]:
        """Return the tokens of a request's texts, which are counted as its memory where it has many characters.

        Raises:
            UnavailableError: the memory budget is spent.
            ClientDisconnect: the client has gone; the rest of its texts is not tokenized.
        """
        if sum(work.characters) <= INLINE_CHARACTERS:
            return work.tokens_of(range(len(work.characters)))
        tokens: list[R] = []
        for piece in pieces(work.characters):
            characters = sum(work.characters[piece.start : piece.stop])
            is_long = characters > LONG_CHARACTERS
            some = await self.done(request, BYTES_PER_CHARACTER * characters, partial(work.tokens_of, piece), is_long=is_long)
            memory_held(request).grow(sum(one.nbytes for one in some))
            tokens += some
        return tokens

    async def done(self, request: Request, size: int, work: Callable[[], T], *, is_long: bool = False) -> T:
        """Return the result of one piece of work, which is done on a thread when it is the client's turn.

        Args:
            request: request that the work belongs to.
            size: bytes of memory that the work takes meanwhile.
            work: releases the interpreter lock most of the time.
            is_long: whether it takes longer than LONG_CHARACTERS do.

        Raises:
            UnavailableError: the memory budget is spent.
            ClientDisconnect: the client has gone.
        """
        memory = memory_held(request)
        async with self._turn(client_of(request.scope), is_long=is_long):
            if await request.is_disconnected():
                raise ClientDisconnect
            memory.grow(size)
            result = await asyncio.to_thread(work)
        memory.shrink(size)
        return result

    @asynccontextmanager
    async def _turn(self, client: str, *, is_long: bool) -> AsyncIterator[None]:
        async with self._long.turn(client) if is_long else nullcontext(), self._turns.turn(client):
            yield


class ClientTurns:
    """A bounded number of turns at a time. Waiting clients get their turns one after the other."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: ClientQueue[asyncio.Future[None]] = ClientQueue()

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Provide a turn of a client; its requests have theirs in the order in which they ask."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._next()

    async def _wait(self, client: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(client, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had been given
                self._next()
            raise

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.take()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def pieces(characters: Sequence[int]) -> Iterator[range]:
    """Yield the indices of texts that are tokenized at once: as many as have PIECE_CHARACTERS together, at least one."""
    start, together = 0, 0
    for index, count in enumerate(characters):
        if index > start and together + count > PIECE_CHARACTERS:
            yield range(start, index)
            start, together = index, 0
        together += count
    yield range(start, len(characters))
