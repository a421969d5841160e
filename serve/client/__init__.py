"""Clients of a running server, synchronous and asyncio: numpy arrays in, numpy arrays out."""

from serve.client.async_client import AsyncClient, AsyncModelHandle
from serve.client.client import Client, ModelHandle
from serve.client.connection import ClientTls
from serve.client.errors import (
    AccessDenied,
    AlreadyExists,
    Cancelled,
    ClientError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServerUnavailable,
    Unsupported,
)
from serve.client.exchange import RetryPolicy
from serve.client.messages import InferAnswer
from serve.client.model_handles import BoundModel, TensorInfo
from serve.client.shared_regions import SharedRegion
from serve.client.streaming import StreamAnswer
from serve.client.tensors import Class, classes_of

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "AsyncClient",
    "AsyncModelHandle",
    "BoundModel",
    "Cancelled",
    "Class",
    "Client",
    "ClientError",
    "ClientTls",
    "DeadlineExceeded",
    "InferAnswer",
    "InvalidRequest",
    "ModelHandle",
    "ModelNotFound",
    "Overloaded",
    "RetryPolicy",
    "ServerUnavailable",
    "SharedRegion",
    "StreamAnswer",
    "TensorInfo",
    "Unsupported",
    "classes_of",
]
