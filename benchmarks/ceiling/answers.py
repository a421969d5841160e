"""Answers of a running server, as files for `answer_at_once`."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.array_conversion import datatype_named
from halfserve.serve.client.infer_messages import infer_request
from halfserve.serve.transports.grpc_framing import frame

COUNT = (5 << 28) + (4 << 21) + (3 << 14) + (2 << 7) + 1  # as a varint: answer_at_once's MARK
WAIT_S = 10.0


def save_answers(channel: grpc.Channel, model: str, folder: Path) -> None:
    """Send all requests that a load generator sends, and save the answers.

    Args:
        channel: channel to the server.
        model: name of the model; variable sizes are 1 in the answers.
        folder: folder for one file per method: the answer with gRPC's length prefix.

    Raises:
        grpc.RpcError: the server does not answer.
    """

    def ask(method: str, request: bytes) -> bytes:
        answer: bytes = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(request, timeout=WAIT_S)
        (folder / method).write_bytes(frame(answer))
        return answer

    for method in ("ServerMetadata", "ServerLive", "ServerReady"):
        ask(method, b"")
    ask("ModelConfig", pb.ModelConfigRequest(name=model).SerializeToString())
    ask("ModelReady", pb.ModelReadyRequest(name=model).SerializeToString())
    metadata = pb.ModelMetadataResponse.FromString(
        ask("ModelMetadata", pb.ModelMetadataRequest(name=model).SerializeToString())
    )
    ones = {
        tensor.name: np.ones([max(size, 1) for size in tensor.shape], datatype_named(tensor.datatype).array_dtype)
        for tensor in metadata.inputs
    }
    ask("ModelInfer", infer_request(metadata, ones).SerializeToString())
    for method in ("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"):  # their answers are empty
        (folder / method).write_bytes(frame(b""))
    (folder / "ModelStatistics").write_bytes(frame(_statistics(metadata).SerializeToString()))


def _statistics(metadata: pb.ModelMetadataResponse) -> pb.ModelStatisticsResponse:
    duration = pb.StatisticDuration(count=COUNT, ns=COUNT)
    stages = pb.InferStatistics(
        success=duration, queue=duration, compute_input=duration, compute_infer=duration, compute_output=duration
    )
    statistics = pb.ModelStatistics(
        name=metadata.name,
        version=metadata.versions[-1],
        inference_count=COUNT,
        execution_count=COUNT,
        inference_stats=stages,
    )
    return pb.ModelStatisticsResponse(model_stats=[statistics])
