"""The interface between the engine and a runtime, and the kinds of model file; serve/backends/ has the implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.requests import CallingExecution, InferRequest
from halfserve.serve.engine.results import BegunBatch, LaterAnswer
from halfserve.serve.engine.tensors import ANY_SIZE, Tensors, TensorSpec

OPENVINO_BACKEND = "openvino"
OPENVINO_PROVIDER = "OpenVINO on cpu"
# `Backend.provider` of backends on the CPU, and of the ones that compute on the calling thread with helpers of their own.
CPU_PROVIDERS = frozenset({"CPUExecutionProvider", OPENVINO_PROVIDER, "torch on cpu"})
CALLING_PROVIDERS = frozenset({"CPUExecutionProvider", OPENVINO_PROVIDER})


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """One kind of model file.

    Attributes:
        platform: Triton's platform name in metadata and completed configurations.
        backend: Triton's backend name in metadata and completed configurations.
        file_name: name of the model file in a version folder, unless the configuration names another.
        also: further names under which a configuration may ask for this kind.
    """

    platform: str
    backend: str
    file_name: str
    also: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Every platform and backend name that a configuration may use."""
        return self.also | {self.platform, self.backend}


# Triton's OpenVINO backend reads ONNX files too; a configuration asks for that by this name.
ONNX = ModelKind(platform="onnxruntime_onnx", backend="onnxruntime", file_name="model.onnx", also=frozenset({OPENVINO_BACKEND}))


# OpenVINO's own files: the graph, and model.bin with its weights beside it.
OPENVINO = ModelKind(platform="openvino", backend=OPENVINO_BACKEND, file_name="model.xml")


# Files that torch.export.save writes. Triton's "pytorch" backend is the nearest equivalent.
TORCH_EXPORT = ModelKind(
    platform="torch_export",
    backend="halfserve_torch",
    file_name="model.pt2",
    also=frozenset({"pytorch", "pytorch_torchexport"}),
)


# Programs that AOTInductor compiled, by Triton's name for them. Only a configuration with this platform, or none, serves them.
TORCH_COMPILED = ModelKind(platform="torch_aoti", backend="pytorch", file_name="model.pt2")
COMPILED_FOLDER = "/data/aotinductor/"  # part of the names of such a program's files in its archive


# A model made of other models (serve/engine/ensembles/), without a file.
ENSEMBLE = ModelKind(platform="ensemble", backend="", file_name="")

# Triton's models in Python.
PYTHON = ModelKind(platform="python", backend="python", file_name="model.py")


# If a version folder holds files of several kinds and its configuration names none, the first kind is used.
KINDS = (ONNX, OPENVINO, TORCH_EXPORT, TORCH_COMPILED, PYTHON)


def asked_kinds(config: ModelConfig) -> tuple[ModelKind, ...]:
    """Return the kinds that a configuration allows: all if it names no platform and no backend, none if it names unknown ones.

    Kinds whose own names it uses come first.
    """
    asked = {name for name in (config.platform, config.backend) if name}
    return tuple(sorted((kind for kind in KINDS if asked <= kind.names), key=lambda kind: not asked.isdisjoint(kind.also)))


@dataclass(frozen=True, kw_only=True)
class ModelInterface:
    """The inputs and outputs of a model file, as its clients see them.

    Attributes:
        inputs: inputs that a request has to bring.
        outputs: outputs that a request can ask for.
        batched: whether all of them begin with a dimension of any size, the batch.
        kind: kind of the model file.
        most_rows: the largest batch that the model was exported for; None for any.
        row_names: names of the first dimensions in the model file. Several names may mean that they are not one batch.
        data_files: paths of its weight files, relative to the model file's folder.
        open_ended: whether the duration of a batch depends on its values, and not only on its shape.
        unranked: names of tensors whose rank the model file does not state; a configuration has to declare them, as numbers.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool
    kind: ModelKind = ONNX
    most_rows: int | None = None
    row_names: frozenset[str] = frozenset()
    data_files: frozenset[str] = frozenset()
    open_ended: bool = False
    unranked: frozenset[str] = frozenset()

    def is_steady(self, *, batched: bool) -> bool:
        """Return whether batches of equal rows take about equally long: neither their shapes nor their values make a
        difference.
        """
        own = 1 if batched else 0
        return not self.open_ended and not any(ANY_SIZE in spec.shape[own:] for spec in self.inputs)


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Permission for code of a model repository to run as the server's user.

    Attributes:
        torch_archives: permits torch programs, whose pickles can call anything.
        python_models: permits model.py files.
        custom_operators: permits the libraries that `model_operations` names.
    """

    torch_archives: bool = False
    python_models: bool = False
    custom_operators: bool = False


NO_TRUST = Trust()


class CpuPrecision(StrEnum):
    """Precision in which the CPU computes a model whose file is in half precision."""

    AUTO = "auto"  # the fastest precision with a passed verdict
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


# What to do where a model or the server requires a GPU that is not there.
ALLOW_CPU: Final = "allow the CPU (kind: KIND_CPU in config.pbtxt's instance_group, and no --require-gpu)"


@dataclass(frozen=True, kw_only=True)
class DevicePlacement:
    """Device and CPU settings to load a model with.

    Attributes:
        use_gpu: whether to use a CUDA device if there is one; False keeps the model on the CPU.
        require_gpu: whether to fail rather than run on the CPU.
        device_id: number of the CUDA device.
        threads: number of threads for one operator on the CPU; 0 lets the runtime choose.
        cpu_precision: precision on the CPU of ONNX models whose configuration names none.
    """

    use_gpu: bool = True
    require_gpu: bool = False
    device_id: int = 0
    threads: int = 0
    cpu_precision: CpuPrecision = CpuPrecision.AUTO


class Backend(Protocol):
    """One loaded copy of a model. It is used by one thread at a time."""

    @property
    def provider(self) -> str:
        """The execution provider in use, such as "CUDAExecutionProvider"."""
        ...

    @property
    def precision(self) -> str:
        """The compute precision in words: "fp16", or "fp32 (the fp16 model, upcast)"."""
        ...

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype in which `run` takes the input `name`; it may be wider than on the wire."""
        ...

    def run(self, inputs: Tensors) -> Tensors:
        """Compute every output, in the dtypes of the model's interface.

        Args:
            inputs: arrays by name, in `compute_dtype`, batch dimension first if the model has one. Their memory is reused for
                the next batch, so no output may share it.

        Raises:
            Exception: any error of the runtime; the engine turns it into the request's error.
        """
        ...

    def give_up(self) -> None:
        """End a computation that runs on another thread, if the runtime can. This copy is not used again."""


@dataclass(frozen=True)
class BackendView:
    """A backend that changes what goes into another or comes out of it; `run` is left to subclasses."""

    _backend: Backend

    @property
    def provider(self) -> str:
        return self._backend.provider

    @property
    def precision(self) -> str:
        return self._backend.precision

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        return self._backend.compute_dtype(name)

    def run(self, inputs: Tensors) -> Tensors:
        raise NotImplementedError

    def give_up(self) -> None:
        self._backend.give_up()


class Reschedule:
    """Outcome in place of an answer: the model wants the request to be queued and executed once more."""


RESCHEDULE: Final = Reschedule()
# A backend's outcome for one request; None if its responses come later, through `respond` and `done`.
Outcome: TypeAlias = Tensors | InferenceError | LaterAnswer | Reschedule | None


class RequestBackend:
    """A loaded copy that takes whole requests instead of one batch of inputs. Also a `Backend`, for one thread at a time."""

    provider: str
    precision: str

    @property
    def caller(self) -> CallingExecution | None:
        """The execution in progress, for a model that may call other models; None between executions."""
        return None

    async def is_ready(self) -> bool:
        """Return whether the model itself says that it is ready for requests. On the event loop."""
        return True

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        raise NotImplementedError(name)

    def begin(self, requests: Sequence[InferRequest], batch: BegunBatch) -> bool:  # noqa: ARG002  (of subclasses)
        """Begin to answer requests without a thread that waits for the answers; `compute` returns them afterwards.

        Args:
            requests: the requests.
            batch: gets the call of `ready`.

        Returns:
            Whether `batch.ready` is called. A thread is to call `compute` otherwise.
        """
        return False

    def let_go(self) -> None:
        """Call no `ready` any more: a thread calls `compute`, which waits for the answers to begun requests."""

    def compute(self, requests: Sequence[InferRequest]) -> list[Outcome]:
        """Answer requests, which may have been begun: one outcome per request, in their order.

        Raises:
            InstanceLostError: this copy is broken.
        """
        raise NotImplementedError(len(requests))

    def run(self, inputs: Tensors) -> Tensors:
        """See `Backend.run`: the inputs are those of one request."""
        raise NotImplementedError(len(inputs))

    def give_up(self) -> None:
        """See `Backend`."""

    def close(self) -> None:
        """Clean up, because the copy is not used again. May take long."""


class Runtime(Protocol):
    """Reads model files of one kind and loads them."""

    def describe(self, path: Path) -> ModelInterface:
        """Read a model file's interface without loading its weights.

        Raises:
            ModelLoadError: the file is missing, is not a model of this kind or has inputs that cannot travel on the wire.
        """
        ...

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> Backend:
        """Load one copy, ready to run.

        Args:
            path: the model file.
            interface: the interface from `describe`.
            placement: device and CPU settings.
            config: the completed configuration. The runtime reads its own settings there, and writes its decisions into
                `parameters`.

        Raises:
            ModelLoadError: a setting is invalid, the runtime refuses the model, or there is no GPU and one is required.
        """
        ...
