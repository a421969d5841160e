"""What the engine asks of a runtime; serve/backends/ holds the implementations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from protos.model_config_pb2 import ModelConfig
from serve.engine.model_kinds import ONNX, ModelKind
from serve.engine.tensors import ANY_SIZE, Tensors, TensorSpec

CPU_PROVIDERS = frozenset({"CPUExecutionProvider", "torch on cpu"})  # as backends report it who compute on the CPU


@dataclass(frozen=True, kw_only=True)
class ModelInterface:
    """The inputs and outputs of a model file, as its clients see them.

    Attributes:
        inputs: what a request must bring.
        outputs: what it can ask for.
        batched: every one of them begins with a dimension of any size, the batch.
        kind: of the model file.
        most_rows: the largest batch that the model was exported for; None for any.
        row_names: that the first dimensions have in the model file. Where there are several, they may not be one batch.
        data_files: that its weights lie in, beside the model file, seen from its folder.
        open_ended: the values in a batch decide how long it takes: its shape does not tell.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool
    kind: ModelKind = ONNX
    most_rows: int | None = None
    row_names: frozenset[str] = frozenset()
    data_files: frozenset[str] = frozenset()
    open_ended: bool = False

    def is_steady(self, *, batched: bool) -> bool:
        """Whether batches of as many rows take about as long as each other: neither shapes nor values differ in that."""
        own = 1 if batched else 0
        return not self.open_ended and not any(ANY_SIZE in spec.shape[own:] for spec in self.inputs)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where to load a model.

    Attributes:
        use_gpu: on the CUDA device where there is one; False keeps it on the CPU.
        require_gpu: fail rather than run on the CPU.
        device_id: which CUDA device.
        threads: for one operator on the CPU; 0 lets the runtime choose.
    """

    use_gpu: bool = True
    require_gpu: bool = False
    device_id: int = 0
    threads: int = 0


class Backend(Protocol):
    """One loaded copy of a model. It is used by one thread at a time."""

    @property
    def provider(self) -> str:
        """Where it really computes, such as "CUDAExecutionProvider"."""

    @property
    def precision(self) -> str:
        """What it computes in, in words: "fp16", or "fp32 (the fp16 model, upcast)"."""

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        """The dtype in which `run` takes the input `name`; it may be wider than what the client sends."""

    def run(self, inputs: Tensors) -> Tensors:
        """Compute every output, in the dtypes of the model's interface.

        Args:
            inputs: by name, in `compute_dtype`, batch dimension first where the model has one. Their memory is used again for
                the next batch, so no output may share it.

        Raises:
            Exception: whatever the runtime raises; the engine turns it into the request's error.
        """

    def give_up(self) -> None:
        """End what another thread computes here, where the runtime can do that. Nothing more is asked of this copy."""


class Runtime(Protocol):
    """Reads model files of one kind and loads them."""

    def describe(self, path: Path) -> ModelInterface:
        """Read a model file's interface without loading its weights.

        Raises:
            ModelLoadError: the file is missing, is not a model of this kind or has inputs that cannot travel on the wire.
        """

    def load(self, path: Path, interface: ModelInterface, placement: Placement, config: ModelConfig) -> Backend:
        """Load one copy, ready to run.

        Args:
            path: the model file.
            interface: what `describe` said of it.
            placement: where it is to run.
            config: completed. The runtime reads its own settings there, and leaves in `parameters` what it had to decide.

        Raises:
            ModelLoadError: a setting cannot be read, the runtime refuses the model, or there is no GPU and one is required.
        """
