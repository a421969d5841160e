"""The module that a model.py imports as `triton_python_backend_utils`."""

from __future__ import annotations

from typing import Any

from halfserve.serve.backends.python_child.log_and_metrics import Logger, Metric, MetricFamily, MetricKind
from halfserve.serve.backends.python_child.server_access import is_model_ready, load_model, unload_model
from halfserve.serve.backends.python_child.triton_errors import TritonError, TritonModelException
from halfserve.serve.backends.python_child.triton_model_config import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)
from halfserve.serve.backends.python_child.triton_requests import (
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
)
from halfserve.serve.backends.python_child.triton_responses import COMPLETE_FINAL, InferenceResponse, ResponseIterator
from halfserve.serve.backends.python_child.triton_responses import ResponseSender as InferenceResponseSender
from halfserve.serve.backends.python_child.triton_tensors import (
    CONFIG_NAMES as TRITON_STRING_TO_NUMPY,
)
from halfserve.serve.backends.python_child.triton_tensors import (
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = COMPLETE_FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RELEASE_RESCHEDULE
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]


class _Directory:
    path = ""


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Any:
    """Return an input of a request; None where it has none of this name."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Any:
    """Return an output of a response; None where it has none of this name."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_model_dir() -> str:
    """Return the folder of the model's version, with its model.py."""
    return _Directory.path


def set_model_dir(path: str) -> None:
    """Set the folder that `get_model_dir` returns."""
    _Directory.path = path
