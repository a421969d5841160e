"""The memory of the response cache, shared by all models of a server; the least recently used answers are dropped first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

from halfserve.serve.engine.requests import Answer, BatchOutputs, RemarkedAnswer
from halfserve.serve.engine.tensors import Array, Tensors, memory_of

# The form of a request (names, shapes and parameters) and its content (values), each whole or as a digest.
RequestKey = tuple[bytes, bytes]
DEFAULT_MIB: Final = 64
# Memory of an answer without its values, and of each of its outputs, by tracemalloc over 10,000 answers with one and three
# outputs.
ENTRY_BYTES: Final = 850
OUTPUT_BYTES: Final = 290
MOST_OF_CACHE: Final = 8  # an answer of more than 1/8 of the cache is not kept, because it would drop many others
SMALL_BYTES: Final = 4096  # an answer of at most this size is kept in a small cache too


class CachedAnswer:
    """One answer.

    Attributes:
        answer: outputs as read-only arrays.
        size: bytes that it holds.
        home: all answers of its model.
        key: its key in `home`.
    """

    __slots__ = ("answer", "home", "key", "size")

    def __init__(self, answer: Tensors, size: int, home: dict[RequestKey, CachedAnswer], key: RequestKey) -> None:
        self.answer = answer
        self.size = size
        self.home = home
        self.key = key


class ResponseCache:
    """Keeps the answers of all models within a limit. Used on the event loop only.

    Attributes:
        size: bytes that the answers hold now.
        evictions: number of answers that were dropped to make room.
    """

    __slots__ = ("_by_use", "_limit", "_most", "evictions", "size")

    def __init__(self, limit_bytes: int) -> None:
        self.size = 0
        self.evictions = 0
        self._limit = limit_bytes
        self._most = max(limit_bytes // MOST_OF_CACHE, min(limit_bytes, SMALL_BYTES))
        self._by_use: OrderedDict[CachedAnswer, None] = OrderedDict()  # the most recently used answer is last

    def use(self, cached: CachedAnswer) -> None:
        """Mark an answer as the most recently used, so that it is dropped last."""
        self._by_use.move_to_end(cached)

    def keep(self, home: dict[RequestKey, CachedAnswer], key: RequestKey, outputs: Tensors) -> bool:
        """Copy an answer into the model's answers; returns False if it cannot be kept.

        Args:
            home: all answers of the model.
            key: cache key of the request.
            outputs: the request's outputs. Outputs with response parameters are not kept, because these describe one
                computation.
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
    """Copy an answer so that it is read-only, and does not keep the batch of its request in memory.

    The arrays are views of bytes, from which a response is written without a further copy.
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
