"""Models of which a configuration lists some outputs: as in Triton, the others are not there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from protos.model_config_pb2 import ModelConfig
from serve.engine.backend import Backend, ModelInterface, Placement, Runtime
from serve.engine.model_kinds import ONNX
from serve.engine.tensors import ANY_SIZE, Tensors


def declared_outputs(runtime: Runtime, config: ModelConfig) -> Runtime:
    """A runtime for models of this configuration, as it was declared. Where it lists no outputs, all are there."""
    names = frozenset(entry.name for entry in config.output)
    return DeclaredOutputs(runtime, names, says_batch_size=config.max_batch_size > 0) if names else runtime


class DeclaredOutputs:
    """A runtime that leaves out outputs."""

    def __init__(self, runtime: Runtime, names: frozenset[str], *, says_batch_size: bool) -> None:
        """A runtime.

        Args:
            runtime: loads the models.
            names: of the outputs that are there.
            says_batch_size: what is left may be a batch, though the model as a whole is none: somebody has said so.
        """
        self._runtime = runtime
        self._names = names
        self._says_batch_size = says_batch_size
        self._whole: dict[Path, ModelInterface] = {}

    def describe(self, path: Path) -> ModelInterface:
        """What is left of a model file's interface; all of it where an output is not in the file, which is then refused."""
        whole = self._whole[path] = self._runtime.describe(path)
        left = tuple(spec for spec in whole.outputs if spec.name in self._names)
        if len(left) < len(self._names):
            return whole
        firsts = [spec.shape[:1] for spec in (*whole.inputs, *left)]
        # A torch program knows more of its rows than their shapes tell.
        is_batch = self._says_batch_size and whole.kind is ONNX and all(first == (ANY_SIZE,) for first in firsts)
        return replace(whole, outputs=left, batched=whole.batched or is_batch)

    def load(self, path: Path, interface: ModelInterface, placement: Placement, config: ModelConfig) -> Backend:
        """Load one copy; see Runtime."""
        whole = self._whole[path]
        backend = self._runtime.load(path, whole, placement, config)
        if len(interface.outputs) == len(whole.outputs):
            return backend
        return _SomeOutputs(backend, tuple(spec.name for spec in interface.outputs))


@dataclass(frozen=True, slots=True)
class _SomeOutputs:
    """A backend that gives some of its outputs."""

    _backend: Backend
    _names: tuple[str, ...]

    @property
    def provider(self) -> str:
        return self._backend.provider

    @property
    def precision(self) -> str:
        return self._backend.precision

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        return self._backend.compute_dtype(name)

    def run(self, inputs: Tensors) -> Tensors:
        outputs = self._backend.run(inputs)
        return {name: outputs[name] for name in self._names}

    def give_up(self) -> None:
        self._backend.give_up()
