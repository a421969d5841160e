"""What the answers to one form of request have in common, learned from the first of them."""

from __future__ import annotations

from dataclasses import dataclass

from protos.inference_pb2 import ModelInferResponse
from serve.engine.model import Model
from serve.engine.requests import Answer
from serve.engine.tensors import Tensors
from serve.protocol.infer_wire import put_id, put_response, raw_tag
from serve.protocol.raw_tensors import to_raw
from serve.protocol.response_parameters import parameters_of

MAX_SHAPES = 1024  # a model's answers may have any number of them


@dataclass(frozen=True, slots=True)
class _RowsForm:
    """The fixed parts of an answer that is some rows of its batch.

    Attributes:
        head: a message with the model's name and version.
        outputs: for each: what stands before its bytes, its name, the bytes of one row.
    """

    head: bytes
    outputs: tuple[tuple[bytes, str, int], ...]


class ResponseForms:
    """Serializes the answers of one model to requests of one form."""

    def __init__(self, model: Model, rows: int) -> None:
        """Nothing learned yet.

        Args:
            model: that answers.
            rows: that each of these requests brings.
        """
        self._model = model
        self._rows = rows
        self._head = ModelInferResponse(model_name=model.name, model_version=str(model.version)).SerializeToString()
        self._entries: dict[tuple[tuple[int, ...], ...], bytes] = {}
        self._of_rows: dict[tuple[tuple[int, ...], ...], _RowsForm | None] = {}

    def response(self, request_id: bytes, outputs: Tensors) -> bytes:
        """The answer, serialized."""
        if isinstance(outputs, Answer):
            shapes = outputs.batch.row_shapes
            form = self._of_rows.get(shapes)
            if form is not None:
                parts = [form.head, put_id(request_id)] if request_id else [form.head]
                for tag, name, row_bytes in form.outputs:
                    parts.append(tag)
                    parts.append(outputs.raw(name, row_bytes))
                return b"".join(parts)
            if shapes not in self._of_rows and len(self._of_rows) < MAX_SHAPES:
                self._of_rows[shapes] = self._learn_rows(outputs)
        return self._put(request_id, outputs)

    def _put(self, request_id: bytes, outputs: Tensors) -> bytes:
        specs = [self._model.outputs[name] for name in outputs]
        arrays = [spec.to_client(outputs[spec.name]) for spec in specs]
        shapes = tuple(array.shape for array in arrays)
        entries = self._entries.get(shapes)
        if entries is None:
            entries = self._learn(tuple(outputs), shapes)
        raw = [to_raw(array, spec.datatype) for spec, array in zip(specs, arrays, strict=True)]
        return put_response(self._head, request_id, entries, raw) + parameters_of(outputs)

    def _learn(self, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> bytes:
        message = ModelInferResponse()
        for name, shape in zip(names, shapes, strict=True):
            message.outputs.add(name=name, datatype=self._model.outputs[name].datatype.wire, shape=shape)
        entries = message.SerializeToString()
        if len(self._entries) < MAX_SHAPES:
            self._entries[shapes] = entries
        return entries

    def _learn_rows(self, outputs: Answer) -> _RowsForm | None:
        """None where elements have no fixed size or the client's shape is not the model's."""
        names = tuple(outputs)
        arrays = [outputs[name] for name in names]
        for name, array in zip(names, arrays, strict=True):
            spec = self._model.outputs[name]
            if spec.datatype.itemsize is None or spec.model_shape is not None or array.dtype != spec.datatype.numpy:
                return None
        tags = [raw_tag(array.nbytes) for array in arrays]
        # A parser takes fields in any order: the outputs' entries go before the first of their bytes, the id before both.
        tags[0] = self._learn(names, tuple(array.shape for array in arrays)) + tags[0]
        rows = self._rows
        return _RowsForm(
            self._head, tuple((tag, name, array.nbytes // rows) for tag, name, array in zip(tags, names, arrays, strict=True))
        )
