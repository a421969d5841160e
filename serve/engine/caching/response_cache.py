"""The memory of the response cache, shared by all models of a server; the least recently used answers go first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

from halfserve.serve.engine.requests import Answer, BatchOutputs, RemarkedAnswer
from halfserve.serve.engine.tensors import Array, Tensors, memory_of

# Of the names, shapes, parameters and values that decide an answer: the form and the content, each whole or as a digest.
RequestKey = tuple[bytes, bytes]
DEFAULT_MIB: Final = 64
# Of an answer without its values, and of each of its outputs, by tracemalloc over 10,000 answers with one and three outputs.
ENTRY_BYTES: Final = 850
OUTPUT_BYTES: Final = 290
MOST_OF_CACHE: Final = 8  # an answer of more than this part is not kept, as it would drop many others
SMALL_BYTES: Final = 4096  # up to this size it is kept in a small cache too


class CachedAnswer:
    """One answer.

    Attributes:
        answer: read-only arrays.
        size: bytes that it holds.
        home: the answers of its model.
        key: its place among them.
    """

    __slots__ = ("answer", "home", "key", "size")

    def __init__(self, answer: Tensors, size: int, home: dict[RequestKey, CachedAnswer], key: RequestKey) -> None:
        self.answer = answer
        self.size = size
        self.home = home
        self.key = key


class ResponseCache:
    """Keeps answers of all models within a bound. Used on the event loop only.

    Attributes:
        size: bytes that the answers hold now.
        evictions: answers that were dropped to make room.
    """

    __slots__ = ("_by_use", "_limit", "_most", "evictions", "size")

    def __init__(self, limit_bytes: int) -> None:
        self.size = 0
        self.evictions = 0
        self._limit = limit_bytes
        self._most = max(limit_bytes // MOST_OF_CACHE, min(limit_bytes, SMALL_BYTES))
        self._by_use: OrderedDict[CachedAnswer, None] = OrderedDict()  # the latest used last

    def use(self, cached: CachedAnswer) -> None:
        """An answer is given to a request: it is dropped after those that are not."""
        self._by_use.move_to_end(cached)

    def keep(self, home: dict[RequestKey, CachedAnswer], key: RequestKey, outputs: Tensors) -> bool:
        """Copy an answer into the model's answers; False if it may not or cannot be kept.

        Args:
            home: the answers of the model.
            key: of the request.
            outputs: for the request. One with response parameters is not kept: they say how this one was computed.
        """
        if isinstance(outputs, RemarkedAnswer):
            return False
        size = ENTRY_BYTES + len(key[0]) + len(key[1]) + sum([OUTPUT_BYTES + memory_of(array) for array in outputs.values()])
        if size > self._most:
            return False
        known = home.get(key)
        if known is not None:
            self._drop(known)
        while self.size + size > self._limit:
            self._drop(next(iter(self._by_use)))
            self.evictions += 1
        cached = home[key] = CachedAnswer(_copy(outputs), size, home, key)
        self._by_use[cached] = None
        self.size += size
        return True

    def forget(self, home: dict[RequestKey, CachedAnswer]) -> None:
        """Drop all answers of a model, which is no longer served."""
        for cached in list(home.values()):
            self._drop(cached)

    def _drop(self, cached: CachedAnswer) -> None:
        del self._by_use[cached]
        del cached.home[cached.key]
        self.size -= cached.size


def _copy(outputs: Tensors) -> Tensors:
    """A copy that nobody can change, and that does not keep the batch of its request.

    The arrays are views of bytes, so that a response is written from these without a copy in between.
    """
    arrays: dict[str, Array] = {}
    raw: dict[str, bytes | None] = {}
    for name, array in outputs.items():
        if array.dtype.hasobject:
            arrays[name] = array.copy()
            arrays[name].flags.writeable = False
        else:
            content = array.tobytes()
            raw[name] = content
            arrays[name] = np.ndarray(array.shape, array.dtype, content)
    if not isinstance(outputs, Answer):
        return arrays
    rows = len(next(iter(arrays.values()))) if arrays else 0
    return Answer(BatchOutputs(arrays, raw), tuple(arrays), 0, rows)
