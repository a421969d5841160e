"""What a client knows of one model: enough to find a wrong request before it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from protos.inference_pb2 import ModelMetadataResponse
from serve.client.checks import check_shape
from serve.client.errors import InvalidRequest
from serve.client.exchanges.calls import Exchange
from serve.client.exchanges.inquiries import model_config, model_metadata
from serve.client.values.tensors import datatype_named

if TYPE_CHECKING:
    from protos.model_config_pb2 import ModelConfig


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One input or output.

    Attributes:
        name: its name.
        datatype: on the wire, such as "FP16".
        dtype: of its arrays; object for BYTES, `ml_dtypes.bfloat16` for BF16.
        shape: with the batch dimension where the model has one; -1 for any size.
        optional: whether a request may leave it out.
    """

    name: str
    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What a model takes and gives.

    Attributes:
        name: the model's.
        version: that was asked for; empty for the server's choice.
        versions: that are served.
        max_batch_size: rows that one request may have; 0 for a model without a batch dimension.
        inputs: by name.
        outputs: by name.
    """

    name: str
    version: str
    versions: tuple[str, ...]
    max_batch_size: int
    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]

    def named(self, inputs: Any) -> Mapping[str, Any]:
        """The inputs by name; what is no mapping is the value of the only input.

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
        """Refuse what the server would refuse, as far as it can be seen from names and shapes.

        Raises:
            InvalidRequest: an input is missing or unknown, or has another shape, or more rows than others or than are allowed.
        """
        missing = [name for name, tensor in self.inputs.items() if name not in inputs and not tensor.optional]
        unknown = [name for name in inputs if name not in self.inputs]
        if missing or unknown:
            wrong = f"lacks the input {missing[0]!r}" if missing else f"has no input {unknown[0]!r}"
            wrong = f"the request to model {self.name!r} {wrong}" if missing else f"model {self.name!r} {wrong}"
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


def describe_model(name: str, version: str) -> Exchange[tuple[ModelDescription, ModelMetadataResponse]]:
    """Ask for what is known of a model, and its metadata as it came."""
    metadata = yield from model_metadata(name, version)
    config: ModelConfig = yield from model_config(name, version)
    optional = {tensor.name for tensor in config.input if tensor.optional}
    description = ModelDescription(
        name=name,
        version=version,
        versions=tuple(metadata.versions),
        max_batch_size=config.max_batch_size,
        inputs={tensor.name: _info(tensor, optional=tensor.name in optional) for tensor in metadata.inputs},
        outputs={tensor.name: _info(tensor) for tensor in metadata.outputs},
    )
    return description, metadata


def _info(tensor: ModelMetadataResponse.TensorMetadata, *, optional: bool = False) -> TensorInfo:
    return TensorInfo(
        name=tensor.name,
        datatype=tensor.datatype,
        dtype=datatype_named(tensor.datatype).array_dtype,
        shape=tuple(tensor.shape),
        optional=optional,
    )
