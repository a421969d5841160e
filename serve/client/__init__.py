"""Ask a running server: numpy arrays in, numpy arrays out, synchronously or with asyncio."""

from serve.client.async_client import AsyncInferenceClient
from serve.client.errors import (
    DeadlineExceeded,
    InferenceClientError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServerUnavailable,
)
from serve.client.inference_client import InferenceClient

__all__ = [
    "AsyncInferenceClient",
    "DeadlineExceeded",
    "InferenceClient",
    "InferenceClientError",
    "InvalidRequest",
    "ModelNotFound",
    "Overloaded",
    "ServerUnavailable",
]
