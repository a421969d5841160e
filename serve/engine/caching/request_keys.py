"""The keys of the response cache: equal for requests to one model that must get equal answers.

A key has two parts. The first is the form: names, datatypes and shapes of the inputs, the wanted outputs and the request's
parameters; requests of one form share it. The second is the inputs' bytes. Both have the inputs in the order of their names,
as a client may send them in any. A part of up to WHOLE_BYTES is kept as it is: the cache compares them, and Python's hash of
bytes has a secret key, so that nobody can send many that collide. Of a longer one the SHA-256 digest is kept: no two contents
with one digest are known, so comparing digests is as good, and the cache need not hold what the client sent. SHA-256 has
processor instructions (1.4 GB/s on a machine where BLAKE2b reaches 0.55).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import numpy as np

from halfserve.serve.engine.caching.response_cache import RequestKey
from halfserve.serve.engine.requests import InferRequest, LateInputs, Parameter, RawInputs, RawLayout
from halfserve.serve.engine.tensors import Array, Tensors

WHOLE_BYTES: Final = 4096
# Reading and hashing takes longer than 0.2 ms from this size on, and is left to a thread.
APART_BYTES: Final = 2**18
MAX_FORMS: Final = 1024
# They say when an answer is wanted, not which.
WITHOUT_EFFECT: Final = frozenset({"priority", "timeout", "triton_enable_empty_final_response"})


class _Form:
    """The first part of a key, and what it was made from."""

    __slots__ = ("layout", "outputs", "parameters", "text")

    def __init__(self, layout: RawLayout, outputs: tuple[str, ...], parameters: Mapping[str, Parameter], text: bytes) -> None:
        self.layout = layout  # kept: its id() is a key
        self.outputs = outputs
        self.parameters = parameters
        self.text = text


class RequestKeys:
    """Makes the keys of one model's requests. Used on the event loop, but for the functions of this module."""

    __slots__ = ("_forms",)

    def __init__(self) -> None:
        self._forms: dict[int, _Form] = {}  # by id() of the layout: requests of one form share it

    def of(self, request: InferRequest) -> RequestKey:
        """The key of a request whose inputs are arrays, or bytes in the request.

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
        # A form holds the parameters too, also those without effect: of a client that sends long ones none is kept.
        if len(form.text) + len(repr(request.parameters)) <= WHOLE_BYTES:
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            self._forms[id(layout)] = form
        return form


def takes_long(request: InferRequest) -> bool:
    """Whether its inputs are large, or are still to be read or parsed."""
    inputs = request.inputs
    if request.size > APART_BYTES or isinstance(inputs, LateInputs):
        return True
    return isinstance(inputs, RawInputs) and not inputs.all_sent


def settled(inputs: Tensors) -> Tensors:
    """Inputs that do not change any more, read once: another content of a client's shared memory may not get this key."""
    if isinstance(inputs, LateInputs) or (isinstance(inputs, RawInputs) and not inputs.all_sent):
        return {name: inputs[name] for name in inputs}
    return inputs


def key_of(request: InferRequest, inputs: Tensors) -> RequestKey:
    """The key of a request with these settled inputs."""
    if isinstance(inputs, RawInputs):
        content = _content(inputs)
    else:
        # The same bytes as those of RawInputs: the first request of a client is parsed, and the next one is not. The sizes of
        # numbers are in the form; texts say theirs.
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
