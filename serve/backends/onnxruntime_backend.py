"""ONNX Runtime: fp16 on CUDA, the same file upcast to fp32 on the CPU."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from serve.backends.cuda import device_count
from serve.backends.onnx_interface import load_onnx, read_interface
from serve.backends.upcast import computes_in_fp16, upcast_to_fp32
from serve.engine.backend import ModelInterface, Placement
from serve.engine.errors import BackendError, InvalidArgumentError, ModelLoadError
from serve.engine.tensors import Array, Tensors

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
# A new input shape costs milliseconds instead of an exhaustive search's hundreds.
CUDA_OPTIONS = {"cudnn_conv_algo_search": "HEURISTIC"}
# protobuf serializes at most 2 GiB; a larger model goes to the runtime through a file.
MAX_SERIALIZED_BYTES = 2**31 - 1
LOG_ERRORS_ONLY = 3


@dataclass(frozen=True)
class OnnxRuntimeBackend:
    """One session.

    Attributes:
        provider: of the session, as ONNX Runtime reports it.
        precision: what it computes in, in words.
    """

    provider: str
    precision: str
    _session: ort.InferenceSession
    _compute_dtypes: dict[str, np.dtype[Any]]
    _output_dtypes: dict[str, np.dtype[Any]]

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of the session's input."""
        return self._compute_dtypes[name]

    def run(self, inputs: Tensors) -> Tensors:
        """Compute every output, in the dtypes of the model's interface.

        Raises:
            InvalidArgumentError: a BYTES element is not UTF-8, which is what ONNX Runtime's strings are.
            BackendError: the runtime refused these inputs.
        """
        feeds = {name: _as_text(name, array) if array.dtype.hasobject else array for name, array in inputs.items()}
        try:
            outputs = self._session.run(None, feeds)
        except Exception as error:
            # The runtime's exceptions have no common class of their own.
            raise BackendError(f"the model failed on this request: {_first_line(error)}") from error
        # What fp32 holds and fp16 does not becomes an infinity, as it would have in fp16.
        with np.errstate(over="ignore"):
            return {
                name: array.astype(dtype, copy=False)
                for (name, dtype), array in zip(self._output_dtypes.items(), outputs, strict=True)
            }


class OnnxRuntime:
    """Loads ONNX files into ONNX Runtime."""

    def describe(self, path: Path) -> ModelInterface:
        """Read a model file's interface without loading its weights.

        Raises:
            ModelLoadError: the file is missing, is not ONNX or has inputs that cannot travel on the wire.
        """
        return read_interface(path)

    def load(self, path: Path, placement: Placement) -> OnnxRuntimeBackend:
        """Load one copy on the CUDA device where there is one and it may be used, and on the CPU otherwise.

        Raises:
            ModelLoadError: the runtime refuses the model, or a GPU is required and there is none.
        """
        on_gpu = placement.use_gpu and _gpu_is_there(placement)
        interface = read_interface(path)
        session, precision = _gpu_session(path, placement) if on_gpu else _cpu_session(path, placement)
        provider = session.get_providers()[0]
        if placement.require_gpu and provider != CUDA:
            raise ModelLoadError(f"{path}: runs on {provider}, but a GPU is required; check the CUDA and cuDNN libraries")
        return OnnxRuntimeBackend(
            provider,
            precision,
            session,
            {value.name: NUMPY_DTYPES[value.type] for value in session.get_inputs()},
            {spec.name: spec.datatype.numpy or np.dtype(object) for spec in interface.outputs},
        )


NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float16)": np.dtype(np.float16),
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(bool)": np.dtype(np.bool_),
    "tensor(string)": np.dtype(object),
    **{f"tensor({sign}int{bits})": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


def _gpu_is_there(placement: Placement) -> bool:
    devices = device_count() if CUDA in ort.get_available_providers() else 0
    if placement.require_gpu and placement.device_id >= devices:
        wanted = f"CUDA device {placement.device_id}"
        raise ModelLoadError(f"{wanted} is required, but {devices} are usable; install the NVIDIA driver or allow the CPU")
    return placement.device_id < devices


def _gpu_session(path: Path, placement: Placement) -> tuple[ort.InferenceSession, str]:
    ort.preload_dlls()  # finds CUDA and cuDNN where pip installed them
    providers = [(CUDA, {**CUDA_OPTIONS, "device_id": str(placement.device_id)}), CPU]
    precision = "fp16" if computes_in_fp16(load_onnx(path, weights=False)) else "fp32"
    return _session(path, str(path), _options(placement), providers), precision


def _cpu_session(path: Path, placement: Placement) -> tuple[ort.InferenceSession, str]:
    options = _options(placement)
    model = load_onnx(path, weights=False)
    if not computes_in_fp16(model):
        return _session(path, str(path), options, [CPU]), "fp32"
    model = load_onnx(path, weights=True)
    upcast_to_fp32(model)
    precision = "fp32 (the fp16 model, upcast)"
    if model.ByteSize() <= MAX_SERIALIZED_BYTES:
        return _session(path, model.SerializeToString(), options, [CPU]), precision
    with tempfile.TemporaryDirectory(prefix="halfserve-") as folder:
        copy = Path(folder) / "model.onnx"
        onnx.save(model, copy, save_as_external_data=True, location="weights.bin")
        return _session(path, str(copy), options, [CPU]), precision


def _options(placement: Placement) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = LOG_ERRORS_ONLY
    options.intra_op_num_threads = placement.threads
    # Threads that spin while they wait take the core from the event loop.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _session(path: Path, model: str | bytes, options: ort.SessionOptions, providers: list[Any]) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(model, options, providers=providers)
    except Exception as error:
        # The runtime's exceptions have no common class of their own.
        raise ModelLoadError(f"{path}: ONNX Runtime refuses the model: {_first_line(error)}") from error


def _as_text(name: str, array: Array) -> Array:
    text = np.empty(array.size, object)
    try:
        text[:] = [element.decode() if isinstance(element, bytes) else element for element in array.ravel()]
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"input {name!r} has a BYTES element that is not UTF-8, expected text") from None
    return text.reshape(array.shape)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
