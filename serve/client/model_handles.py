"""Description of a model, and a handle (`client.model`) that checks requests against it before sending them."""
# ruff: noqa: SLF001  (a handle is a part of its client)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from halfserve.protos.inference_pb2 import ModelMetadataResponse
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.client.array_conversion import Array, check_shape, datatype_named
from halfserve.serve.client.base import ClientBase
from halfserve.serve.client.client_connection import ClientMethod, ClientOperation
from halfserve.serve.client.errors import InvalidRequest
from halfserve.serve.client.exchange import Exchange
from halfserve.serve.client.infer_exchange import BoundInferOptions, InferState, infer, remember, without_sending
from halfserve.serve.client.management import model_config, model_metadata, ready


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One input or output.

    Attributes:
        name: name of the tensor.
        datatype: datatype in the protocol, such as "FP16".
        dtype: numpy dtype of its arrays; object for BYTES, `ml_dtypes.bfloat16` for BF16.
        shape: shape with the batch dimension, if the model has one; -1 for any size.
        optional: whether a request may leave it out.
    """

    name: str
    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The interface of a model.

    Attributes:
        name: name of the model.
        version: requested version; empty for the server's choice.
        versions: versions that are served.
        max_batch_size: most rows of one request; 0 for a model without a batch dimension.
        inputs: inputs by name.
        outputs: outputs by name.
    """

    name: str
    version: str
    versions: tuple[str, ...]
    max_batch_size: int
    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]

    def named(self, inputs: Any) -> Mapping[str, Any]:
        """Return the inputs by name; a value that is not a mapping is the value of the only input.

        Raises:
            InvalidRequest: the model has several inputs.
        """
        if isinstance(inputs, Mapping):
            return inputs
        if len(self.inputs) != 1:
            raise InvalidRequest(
                f"model {self.name!r} has {len(self.inputs)} inputs, expected a mapping with {', '.join(self.inputs)}, "
                f"not one {type(inputs).__name__}"
            )
        return {next(iter(self.inputs)): inputs}

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Refuse a request that the server would refuse, as far as names and shapes show it.

        Raises:
            InvalidRequest: an input is missing, unknown or of a wrong shape, or the numbers of rows differ or are too large.
        """
        missing = [name for name, tensor in self.inputs.items() if name not in inputs and not tensor.optional]
        unknown = [name for name in inputs if name not in self.inputs]
        if missing or unknown:
            wrong = f"the request to model {self.name!r} lacks the input {missing[0]!r}" if missing else ""
            wrong = wrong or f"model {self.name!r} has no input {unknown[0]!r}"
            raise InvalidRequest(f"{wrong}; its inputs are: {', '.join(self.inputs)}")
        rows: dict[int, str] = {}
        for name, value in inputs.items():
            shape = tuple(value.shape) if hasattr(value, "shape") else None
            if shape is not None:
                check_shape(shape, self.inputs[name].shape, f"input {name!r} of model {self.name!r}")
                if self.max_batch_size and shape:
                    rows.setdefault(shape[0], name)
        self._check_rows(rows)

    def _check_rows(self, rows: Mapping[int, str]) -> None:
        if len(rows) > 1:
            counts = " and ".join(f"{count} in {name!r}" for count, name in rows.items())
            raise InvalidRequest(f"the inputs to model {self.name!r} have different numbers of rows: {counts}; expected one")
        for count, name in rows.items():
            if not 0 < count <= self.max_batch_size:
                raise InvalidRequest(
                    f"input {name!r} of model {self.name!r} has {count} rows, expected 1 to {self.max_batch_size} in one "
                    "request; split it, or let stream_infer send the parts"
                )


class BoundModel:
    """One model of a server, its interface, and the operations on it.

    Attributes:
        description: latest description that the server gave.
    """

    def __init__(self, client: ClientBase, description: ModelDescription) -> None:
        self._client = client
        self.description = description

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.description.name

    @property
    def version(self) -> str:
        """Requested version; empty for the server's choice."""
        return self.description.version

    @property
    def inputs(self) -> Mapping[str, TensorInfo]:
        """Inputs by name."""
        return self.description.inputs

    @property
    def outputs(self) -> Mapping[str, TensorInfo]:
        """Outputs by name."""
        return self.description.outputs

    @property
    def max_batch_size(self) -> int:
        """Most rows of one request; 0 for a model without a batch dimension."""
        return self.description.max_batch_size

    @ClientMethod
    def infer(self, inputs: Any, **options: Unpack[BoundInferOptions]) -> ClientOperation[dict[str, Array]]:
        """Run the model; names, shapes and rows are checked before anything is sent. See `Client.infer`.

        Args:
            inputs: name -> array, or a single array if the model has one input.
            options: see `halfserve.serve.client.infer_exchange.BoundInferOptions`.
        """
        asked = bound_infer(self._client._state, self, inputs, without_sending(options))
        return self._client._inference(asked, options)

    @ClientMethod
    def is_ready(self) -> ClientOperation[bool]:
        """Return whether the model takes requests now."""
        return self._client._operation(ready(self.name, self.version), retry=False)

    def __repr__(self) -> str:
        def listed(tensors: Mapping[str, TensorInfo]) -> str:
            return ", ".join(f"{t.name} {t.datatype}{list(t.shape)}" for t in tensors.values())

        return f"<model {self.name}: {listed(self.inputs)} -> {listed(self.outputs)}>"


def bind(state: InferState, name: str, version: str) -> Exchange[ModelDescription]:
    """Read a model's description, and cache its metadata."""
    metadata = yield from model_metadata(name, version)
    config: ModelConfig = yield from model_config(name, version)
    optional = {tensor.name for tensor in config.input if tensor.optional}
    remember(state, (name, version), metadata)
    return ModelDescription(
        name=name,
        version=version,
        versions=tuple(metadata.versions),
        max_batch_size=config.max_batch_size,
        inputs={tensor.name: _info(tensor, optional=tensor.name in optional) for tensor in metadata.inputs},
        outputs={tensor.name: _info(tensor) for tensor in metadata.outputs},
    )


def _info(tensor: ModelMetadataResponse.TensorMetadata, *, optional: bool = False) -> TensorInfo:
    return TensorInfo(
        name=tensor.name,
        datatype=tensor.datatype,
        dtype=datatype_named(tensor.datatype).array_dtype,
        shape=tuple(tensor.shape),
        optional=optional,
    )


def bound_infer(state: InferState, model: BoundModel, inputs: Any, options: Mapping[str, Any]) -> Exchange[dict[str, Array]]:
    """Check a request, then send it; if it does not fit, the model may have been replaced, so its description is read again.
    Raises InvalidRequest: the request does not fit the model's current description.
    """
    try:
        named = model.description.named(inputs)
        model.description.check(named)
    except InvalidRequest:
        model.description = yield from bind(state, model.name, model.version)
        named = model.description.named(inputs)
        model.description.check(named)
    return (yield from infer(state, model.name, named, version=model.version, **options)).outputs
