"""Ask a running server: numpy arrays in, numpy arrays out, synchronously or with asyncio."""

from serve.client.async_client import AsyncInferenceClient
from serve.client.bound_exchange import BoundModel
from serve.client.connection.tls import Tls
from serve.client.errors import (
    AccessDenied,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InferenceClientError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServerUnavailable,
    Unsupported,
)
from serve.client.exchanges.model_description import TensorInfo
from serve.client.exchanges.retry import RetryPolicy
from serve.client.inference_client import InferenceClient
from serve.client.model_handles import AsyncModel, Model
from serve.client.sharing.shared_region import SharedRegion
from serve.client.streaming.stream_order import StreamAnswer
from serve.client.values.answer import InferAnswer
from serve.client.values.classes import Class, classes_of

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "AsyncInferenceClient",
    "AsyncModel",
    "BoundModel",
    "Cancelled",
    "Class",
    "DeadlineExceeded",
    "InferAnswer",
    "InferenceClient",
    "InferenceClientError",
    "InvalidRequest",
    "Model",
    "ModelNotFound",
    "Overloaded",
    "RetryPolicy",
    "ServerUnavailable",
    "SharedRegion",
    "StreamAnswer",
    "TensorInfo",
    "Tls",
    "Unsupported",
    "classes_of",
]
