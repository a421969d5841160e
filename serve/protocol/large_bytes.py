"""Joins large bytes and serializes large responses on threads, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Final

import numpy as np

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.execution.output_backlog import BACKLOG, LARGE_BYTES
from halfserve.serve.engine.tensors import Tensors

MANY_TEXTS: Final = 4096  # number of texts in a response from which a thread serializes it
WRITER_THREADS: Final = 2


# Not the event loop's own threads, which may be busy with answers that clients do not read.
WRITERS: Final = ThreadPoolExecutor(WRITER_THREADS, "responses")


def join_unlocked(parts: Sequence[bytes | memoryview]) -> bytes:
    """Return the joined bytes of all parts, without the interpreter lock if they are large; a view has one dimension of bytes.

    `bytes.join` holds the lock while it copies views: 2 ms for 4 MiB, most of it for page faults. numpy releases it.
    """
    size = sum([len(part) for part in parts])
    if size <= LARGE_BYTES:
        return b"".join(parts)
    joined = BytesIO(bytes(size))  # memory that is zero until it is written; `getvalue` does not copy it
    target, start = np.frombuffer(joined.getbuffer(), np.uint8), 0
    for part in parts:
        target[start : start + len(part)] = np.frombuffer(part, np.uint8)
        start += len(part)
    del target  # no view may be left
    return joined.getvalue()


class DeferredResponse:
    """A response that a thread serializes if it is large, to keep the event loop free. Lives on the event loop.

    Serializing a text takes 0.3 us, writing a megabyte to shared memory 0.2 to 1 ms.
    """

    __slots__ = ("_is_gone", "_keep", "_reply", "_write")

    def __init__(
        self,
        write: Callable[[Tensors | InferenceError], bytes | InferenceError],
        reply: Callable[[bytes | InferenceError], None],
        keep: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`write` serializes the response, on a thread if outputs are large; `keep` holds the task until it ends."""
        self._write = write
        self._reply = reply
        self._keep = keep
        self._is_gone = False

    def done(self, result: Tensors | InferenceError) -> None:
        """Take the outputs or the error."""
        if isinstance(result, InferenceError) or not _takes_long(result):
            self._reply(self._write(result))
        else:
            BACKLOG.add(size := sum([array.nbytes for array in result.values()]))
            self._keep(asyncio.get_running_loop().create_task(self._apart(result, size)))

    def gone(self) -> None:
        """Drop the response."""
        self._is_gone = True

    async def _apart(self, result: Tensors, size: int) -> None:
        try:
            if self._is_gone:
                return
            written = await asyncio.get_running_loop().run_in_executor(WRITERS, self._write, result)
        except RuntimeError:  # no thread can be started
            written = self._write(result)
        finally:
            BACKLOG.remove(size)
        if not self._is_gone:
            self._reply(written)


def _takes_long(outputs: Tensors) -> bool:
    texts = size = 0
    for array in outputs.values():
        if array.dtype.hasobject:
            texts += array.size
        else:
            size += array.nbytes
    return texts > MANY_TEXTS or size > LARGE_BYTES
