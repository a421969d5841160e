"""Server reflection, so that grpcurl and its like work without .proto files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from protos import inference_pb2, model_config_pb2

# Version 1 has the messages of v1alpha under another package name; newer tools ask for it first.
VERSIONS = ("v1", "v1alpha")
Answer = Callable[[AsyncIterator[Any]], AsyncIterator[Message]]


def reflection_methods(services: Iterable[str]) -> dict[str, tuple[type[Message], Answer]]:
    """Method path -> (request class, answering function) for every version of the reflection service."""
    pool = DescriptorPool()
    for file in (model_config_pb2, inference_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(file.DESCRIPTOR.serialized_pb)
    servicer = reflection.aio.ReflectionServicer([*services, reflection.SERVICE_NAME], pool=pool)
    answer = partial(servicer.ServerReflectionInfo, unused_context=None)
    paths = [f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in VERSIONS]
    return dict.fromkeys(paths, (reflection_pb2.ServerReflectionRequest, answer))
