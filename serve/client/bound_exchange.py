"""What a handle on one model asks: as `infer`, but with a request that is checked against the model's description first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.client.errors import InvalidRequest
from serve.client.exchanges.calls import Exchange
from serve.client.exchanges.model_description import ModelDescription, TensorInfo, describe_model
from serve.client.infer_exchange import InferState, infer, remember
from serve.client.values.answer import InferAnswer


class BoundModel:
    """One model of a server and what is known of it.

    Attributes:
        description: as the server gave it last.
    """

    def __init__(self, description: ModelDescription) -> None:
        self.description = description

    @property
    def name(self) -> str:
        """The model's."""
        return self.description.name

    @property
    def version(self) -> str:
        """That was asked for; empty for the server's choice."""
        return self.description.version

    @property
    def inputs(self) -> Mapping[str, TensorInfo]:
        """By name."""
        return self.description.inputs

    @property
    def outputs(self) -> Mapping[str, TensorInfo]:
        """By name."""
        return self.description.outputs

    @property
    def max_batch_size(self) -> int:
        """Rows that one request may have; 0 for a model without a batch dimension."""
        return self.description.max_batch_size

    def __repr__(self) -> str:
        def listed(tensors: Mapping[str, TensorInfo]) -> str:
            return ", ".join(f"{t.name} {t.datatype}{list(t.shape)}" for t in tensors.values())

        return f"<model {self.name}: {listed(self.inputs)} -> {listed(self.outputs)}>"


def bind(state: InferState, name: str, version: str) -> Exchange[ModelDescription]:
    """Ask for a model's description."""
    description, metadata = yield from describe_model(name, version)
    remember(state, (name, version), metadata)
    return description


def bound_infer(state: InferState, model: BoundModel, inputs: Any, options: Mapping[str, Any]) -> Exchange[InferAnswer]:
    """Check, then ask; a model that does not take the request is looked at again, since it may have been replaced.

    Raises:
        InvalidRequest: the request does not fit the model as it is now.
    """
    try:
        named = model.description.named(inputs)
        model.description.check(named)
    except InvalidRequest:
        model.description = yield from bind(state, model.name, model.version)
        named = model.description.named(inputs)
        model.description.check(named)
    return (yield from infer(state, model.name, named, version=model.version, **options))
