"""ONNX Runtime behind the engine's interface: arrays in, arrays out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serve.backends.onnx_interface import read_interface
from serve.backends.onnxruntime_session import OpenSession, open_session
from serve.engine.backend import ModelInterface, Placement
from serve.engine.errors import BackendError, InvalidArgumentError
from serve.engine.tensors import Array, Tensors

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float16)": np.dtype(np.float16),
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(bool)": np.dtype(np.bool_),
    "tensor(string)": np.dtype(object),
    **{f"tensor({sign}int{bits})": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


class OnnxRuntime:
    """Loads ONNX files into ONNX Runtime."""

    def describe(self, path: Path) -> ModelInterface:
        """Read a model file's interface without loading its weights.

        Raises:
            ModelLoadError: the file is missing, is not ONNX or has inputs that cannot travel on the wire.
        """
        return read_interface(path)

    def load(self, path: Path, interface: ModelInterface, placement: Placement) -> OnnxRuntimeBackend:
        """Load one copy, on the CUDA device where there is one and it may be used, and on the CPU otherwise.

        Raises:
            ModelLoadError: the runtime refuses the model, or a GPU is required and cannot be used.
        """
        opened = open_session(path, placement)
        return OnnxRuntimeBackend(
            opened,
            {value.name: NUMPY_DTYPES[value.type] for value in opened.session.get_inputs()},
            {spec.name: spec.datatype.numpy or np.dtype(object) for spec in interface.outputs},
        )


@dataclass(frozen=True)
class OnnxRuntimeBackend:
    """One session, and the dtypes on either side of it."""

    _opened: OpenSession
    _compute_dtypes: dict[str, np.dtype[Any]]
    _output_dtypes: dict[str, np.dtype[Any]]

    @property
    def provider(self) -> str:
        """Where it computes, as ONNX Runtime reports it."""
        return self._opened.provider

    @property
    def precision(self) -> str:
        """What it computes in, in words."""
        return self._opened.precision

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
            outputs = self._opened.session.run(None, feeds)
        except Exception as error:
            # The runtime's exceptions have no common class of their own.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BackendError(f"the model failed on this request: {reason}") from error
        # What fp32 holds and fp16 does not becomes an infinity, as it would have in fp16.
        with np.errstate(over="ignore"):
            return {
                name: array.astype(dtype, copy=False)
                for (name, dtype), array in zip(self._output_dtypes.items(), outputs, strict=True)
            }


def _as_text(name: str, array: Array) -> Array:
    text = np.empty(array.size, object)
    try:
        text[:] = [element.decode() if isinstance(element, bytes) else element for element in array.ravel()]
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"input {name!r} has a BYTES element that is not UTF-8, expected text") from None
    return text.reshape(array.shape)
