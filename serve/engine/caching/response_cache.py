"""The response cache: its memory, shared by all models of a server, and the keys of its answers.

The least recently used answers are dropped first. Keys are equal for requests to one model that must get equal answers.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import numpy as np

from halfserve.protos.request_parameters import REQUEST_PARAMETERS
from halfserve.serve.engine.requests import Answer, BatchOutputs, InferRequest, Parameter, RemarkedAnswer
from halfserve.serve.engine.tensors import Array, LateInputs, RawInputs, RawLayout, Tensors, memory_of

# The form of a request (names, shapes and parameters) and its content (values), each whole or as a digest.
RequestKey = tuple[bytes, bytes]
DEFAULT_MIB: Final = 64
# Memory of an answer without its values, and of each of its outputs, by tracemalloc over 10,000 answers with one and three
# outputs.
ENTRY_BYTES: Final = 850
OUTPUT_BYTES: Final = 290
MOST_OF_CACHE: Final = 8  # an answer of more than 1/8 of the cache is not kept, because it would drop many others
SMALL_BYTES: Final = 4096  # an answer of at most this size is kept in a small cache too
WHOLE_BYTES: Final = 4096
# From this size on, reading and hashing takes longer than 0.2 ms, and is left to a thread.
APART_BYTES: Final = 2**18
MAX_FORMS: Final = 1024
# Parameters that do not change the answer.
WITHOUT_EFFECT: Final = frozenset(name for name, parameter in REQUEST_PARAMETERS.items() if not parameter.changes_answer)


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


class _Form:
    """The first part of a key, and the objects from which it was made."""

    __slots__ = ("layout", "outputs", "parameters", "text")

    def __init__(self, layout: RawLayout, outputs: tuple[str, ...], parameters: Mapping[str, Parameter], text: bytes) -> None:
        self.layout = layout  # kept because its id() is a key
        self.outputs = outputs
        self.parameters = parameters
        self.text = text


class RequestKeys:
    """Makes the keys of one model's requests. Lives on the event loop; this module's functions may be called on any thread.

    A key has two parts. The first is the form: names, datatypes and shapes of the inputs, the wanted outputs and the request's
    parameters; requests of one form share it. The second is the inputs' bytes. Both have the inputs in the order of their
    names, because clients may send them in any order. A part of up to WHOLE_BYTES is kept as it is: the cache compares its
    bytes, and Python's hash of bytes has a secret key, so that clients cannot send many that collide. A longer part is replaced
    by its SHA-256 digest: no two contents with equal digests are known, so that comparing digests is safe, and the cache need
    not hold the data of clients. SHA-256 has processor instructions (1.4 GB/s on a machine where BLAKE2b reaches 0.55).
    """

    __slots__ = ("_forms",)

    def __init__(self) -> None:
        self._forms: dict[int, _Form] = {}  # keys: id() of the layout, which requests of one form share

    def of(self, request: InferRequest) -> RequestKey:
        """Return the key of a request whose inputs are arrays, or bytes in the request.

        Raises:
            InferenceError: an input cannot be read.
        """
        inputs = request.inputs
        if isinstance(inputs, RawInputs) and inputs.all_sent:
            layout = inputs.layout
            form = self._forms.get(id(layout))
            if form is None or form.outputs is not request.outputs or form.parameters is not request.parameters:
                form = self._new_form(layout, request)
            return form.text, _content(inputs)
        return key_of(request, inputs)

    def _new_form(self, layout: RawLayout, request: InferRequest) -> _Form:
        form = _Form(layout, request.outputs, request.parameters, _form_of(request, request.inputs))
        # A form also holds parameters without effect, so that none is kept for a client that sends long ones.
        if len(form.text) + len(repr(request.parameters)) <= WHOLE_BYTES:
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            self._forms[id(layout)] = form
        return form


def takes_long(request: InferRequest) -> bool:
    """Return whether the request's inputs are large, or have not been read or parsed yet."""
    inputs = request.inputs
    if request.size > APART_BYTES or isinstance(inputs, LateInputs):
        return True
    return isinstance(inputs, RawInputs) and not inputs.all_sent


def settled(inputs: Tensors) -> Tensors:
    """Return inputs that no longer change: shared memory is read once, because a client may change it after the key is made."""
    if isinstance(inputs, LateInputs) or (isinstance(inputs, RawInputs) and not inputs.all_sent):
        return {name: inputs[name].copy() for name in inputs}  # the array may be the shared memory itself
    return inputs


def key_of(request: InferRequest, inputs: Tensors) -> RequestKey:
    """Return the key of a request with these settled inputs."""
    if isinstance(inputs, RawInputs):
        content = _content(inputs)
    else:
        # The bytes equal those of RawInputs, because a client's first request is parsed and the next one is not. The sizes of
        # number tensors are in the form; each text is preceded by its length.
        content = _short(b"".join([_bytes_of(inputs[name]) for name in sorted(inputs)]))
    return _form_of(request, inputs), content


def _form_of(request: InferRequest, inputs: Tensors) -> bytes:
    if isinstance(inputs, RawInputs):
        tensors = sorted([(entry.name, entry.dtype.str, entry.shape) for entry in inputs.layout.inputs])
    else:
        tensors = sorted([(name, array.dtype.str, array.shape) for name, array in inputs.items()])
    parameters = sorted((name, value) for name, value in request.parameters.items() if name not in WITHOUT_EFFECT)
    return _short(repr((tensors, request.outputs, parameters)).encode())


def _content(inputs: RawInputs) -> bytes:
    names = inputs.layout.places
    if len(names) == 1:
        for name in names:
            return _short(inputs.piece(name))
    return _short(b"".join([inputs.piece(name) for name in sorted(names)]))  # their sizes are in the form


def _short(content: bytes | memoryview) -> bytes:
    return bytes(content) if len(content) <= WHOLE_BYTES else hashlib.sha256(content).digest()


def _bytes_of(array: Array) -> bytes:
    if not array.dtype.hasobject:
        return np.ascontiguousarray(array).tobytes()
    return b"".join([_with_length(e if isinstance(e, bytes) else str(e).encode()) for e in array.ravel()])


def _with_length(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content
