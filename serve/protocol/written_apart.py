"""Answers that take long to write, which a thread does, as the event loop has others to answer.

A text takes 0.3 us, and a megabyte that goes to shared memory 0.2 to 1 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serve.engine.errors import InferenceError
from serve.engine.tensors import Tensors

Written = bytes | InferenceError
MANY = 4096  # texts
LARGE_BYTES = 2**20


class WrittenApart:
    """One answer on its way. To be used on the event loop."""

    __slots__ = ("_is_gone", "_keep", "_reply", "_write")

    def __init__(
        self,
        write: Callable[[Tensors | InferenceError], Written],
        reply: Callable[[Written], None],
        keep: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """Nothing yet.

        Args:
            write: makes the response of the outputs; on a thread, where these are many.
            reply: gets it.
            keep: gets the task in which that is waited for, and keeps it to its end.
        """
        self._write = write
        self._reply = reply
        self._keep = keep
        self._is_gone = False

    def done(self, result: Tensors | InferenceError) -> None:
        """The outputs are there, or the error."""
        if isinstance(result, InferenceError) or not _takes_long(result):
            self._reply(self._write(result))
        else:
            self._keep(asyncio.get_running_loop().create_task(self._apart(result)))

    def gone(self) -> None:
        """Nobody waits for it any more."""
        self._is_gone = True

    async def _apart(self, result: Tensors) -> None:
        if self._is_gone:
            return
        try:
            written = await asyncio.to_thread(self._write, result)
        except RuntimeError:  # there are as many threads as may be
            written = self._write(result)
        if not self._is_gone:
            self._reply(written)


def _takes_long(outputs: Tensors) -> bool:
    texts = size = 0
    for array in outputs.values():
        if array.dtype.hasobject:
            texts += array.size
        else:
            size += array.nbytes
    return texts > MANY or size > LARGE_BYTES
