"""Answers of which outputs lie in shared memory, and what they have in common, learned from the first of them."""

from __future__ import annotations

from collections.abc import Mapping

from protos.inference_pb2 import ModelInferResponse
from serve.engine.model import Model
from serve.engine.tensors import Tensors
from serve.protocol.infer_wire import put_response
from serve.protocol.raw_tensors import raw_view, to_raw
from serve.protocol.response_parameters import parameters_of
from serve.protocol.shared_memory import Place, SharedMemory
from serve.protocol.shared_tensors import tell_place

MAX_ENTRIES = 1024  # a model's answers may have any number of shapes

# Name, shape, and bytes of each output.
Key = tuple[tuple[str, tuple[int, ...], int], ...]


class PlacedResponses:
    """Serializes the answers of one model to requests of one form, and puts outputs where the client wants them."""

    def __init__(self, model: Model, places: Mapping[str, Place]) -> None:
        """Nothing learned yet.

        Args:
            model: that answers.
            places: of outputs, by name; the others are sent.
        """
        self._model = model
        self._places = places
        self._head = ModelInferResponse(model_name=model.name, model_version=str(model.version)).SerializeToString()
        self._entries: dict[Key, bytes] = {}

    def response(self, request_id: bytes, outputs: Tensors, memory: SharedMemory, since: int) -> bytes:
        """The answer, serialized: an output in shared memory has an empty raw entry, and parameters that say where it is.

        `since`: see `SharedMemory.check`.

        Raises:
            InferenceError: an output does not fit its place, or its region is gone.
        """
        raw: list[bytes] = []
        key: list[tuple[str, tuple[int, ...], int]] = []
        for name, array in outputs.items():
            spec = self._model.outputs[name]
            tensor, place = spec.to_client(array), self._places.get(name)
            if place is None:
                data = to_raw(tensor, spec.datatype)
                size = len(data)
            else:
                view, data = raw_view(tensor, spec.datatype), b""
                size = len(view)
                memory.write(place, view, since=since)
            key.append((name, tensor.shape, size))
            raw.append(data)
        known = tuple(key)
        entries = self._entries.get(known)
        if entries is None:
            entries = self._learn(known)
        return put_response(self._head, request_id, entries, raw) + parameters_of(outputs)

    def _learn(self, key: Key) -> bytes:
        message = ModelInferResponse()
        for name, shape, size in key:
            entry = message.outputs.add(name=name, datatype=self._model.outputs[name].datatype.wire, shape=shape)
            place = self._places.get(name)
            if place is not None:
                tell_place(entry.parameters, place, size)
        entries = message.SerializeToString()
        if len(self._entries) < MAX_ENTRIES:
            self._entries[key] = entries
        return entries
