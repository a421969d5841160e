"""What requests of one form have in common, learned from the first of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protos.inference_pb2 import ModelInferResponse
from serve.engine.model import Model
from serve.engine.queue_policy import Turn
from serve.engine.tensors import Array, Tensors, TensorSpec
from serve.protocol.infer_wire import CutRequest, put_response
from serve.protocol.raw_tensors import to_raw

# Of all forms together; a client that varies its form endlessly costs no more than this, and falls back to parsing.
MAX_FORMS = 1024
MAX_FORM_BYTES = 4096


@dataclass(frozen=True, slots=True)
class InputForm:
    """One input, at its place in raw_input_contents.

    Attributes:
        spec: of the model.
        dtype: of its elements.
        shape: that clients use.
        elements: of that shape.
        size: in bytes.
    """

    spec: TensorSpec
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    elements: int
    size: int


@dataclass(frozen=True, slots=True)
class RequestForm:
    """A request that has been checked, but for its id and its bytes.

    Attributes:
        model: that it asks.
        inputs: in the order of raw_input_contents.
        outputs: names, in the order of the answer.
        rows: of its batch dimension.
        bucket: what it can share a batch with; None runs alone.
        turn: how it waits.
    """

    model: Model
    inputs: tuple[InputForm, ...]
    outputs: tuple[str, ...]
    rows: int
    bucket: Hashable | None
    turn: Turn
    _responses: dict[tuple[tuple[int, ...], ...], tuple[bytes, bytes]] = field(default_factory=dict)

    def arrays(self, data: bytes, raw: list[tuple[int, int]]) -> dict[str, Array] | None:
        """Views on the request's bytes; None where their number or sizes are not this form's."""
        if len(raw) != len(self.inputs):
            return None
        arrays = {}
        for form, (offset, size) in zip(self.inputs, raw, strict=True):
            if size != form.size:
                return None
            array = np.frombuffer(data, form.dtype, form.elements, offset).reshape(form.shape)
            arrays[form.spec.name] = form.spec.to_model(array)
        return arrays

    def response(self, request_id: bytes, outputs: Tensors) -> bytes:
        """The answer, serialized."""
        model = self.model
        shaped = [(model.outputs[name], array) for name, array in outputs.items()]
        arrays = [spec.to_client(array) for spec, array in shaped]
        shapes = tuple(array.shape for array in arrays)
        known = self._responses.get(shapes)
        if known is None:
            known = self._learn(shaped, shapes)
        raw = [to_raw(array, spec.datatype) for (spec, _), array in zip(shaped, arrays, strict=True)]
        return put_response(known[0], request_id, known[1], raw)

    def _learn(self, shaped: list[tuple[TensorSpec, Array]], shapes: tuple[tuple[int, ...], ...]) -> tuple[bytes, bytes]:
        head = ModelInferResponse(model_name=self.model.name, model_version=str(self.model.version))
        entries = ModelInferResponse()
        for (spec, _), shape in zip(shaped, shapes, strict=True):
            entries.outputs.add(name=spec.name, datatype=spec.datatype.wire, shape=shape)
        known = (head.SerializeToString(), entries.SerializeToString())
        if len(self._responses) < MAX_FORMS:  # a model's answers may have any number of shapes
            self._responses[shapes] = known
        return known


class RequestForms:
    """The forms that were met, by the bytes that they are."""

    def __init__(self) -> None:
        self._forms: dict[bytes, RequestForm] = {}

    def find(self, cut: CutRequest | None) -> RequestForm | None:
        """The form of a request that has been met before."""
        return None if cut is None else self._forms.get(cut.form)

    def keep(self, cut: CutRequest | None, form: RequestForm | None) -> None:
        """Remember a form, if there is one, and it is small."""
        if cut is None or form is None or len(cut.form) > MAX_FORM_BYTES:
            return
        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()
        self._forms[cut.form] = form

    def forget(self) -> None:
        """Forget all: the models have changed."""
        self._forms.clear()
