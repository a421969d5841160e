"""grpc.health.v1 follows what is loaded and unloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serve.control.options import ControlMode
from tests.models import save_mlp
from tests.serve.control.controlled import controlled_server
from tests.serve.running_server import RunningServer

SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    with controlled_server(tmp_path, ControlMode.EXPLICIT) as running:
        yield running


@pytest.fixture
def health(server: RunningServer) -> Iterator[health_pb2_grpc.HealthStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def asked(name: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=name)


def test_a_model_is_checked_by_name(server: RunningServer, health: health_pb2_grpc.HealthStub) -> None:
    statuses = [health.Check(asked("mlp"), timeout=20).status]
    server.run(server.core.load("mlp"))
    statuses.append(health.Check(asked("mlp"), timeout=20).status)
    server.run(server.core.unload("mlp"))
    statuses.append(health.Check(asked("mlp"), timeout=20).status)
    assert statuses == [NOT_SERVING, SERVING, NOT_SERVING]
    assert health.Check(asked(""), timeout=20).status == SERVING
    with pytest.raises(grpc.RpcError, match="'nope' is neither a service nor a model here"):
        health.Check(asked("nope"), timeout=20)


def test_who_watches_is_told_of_changes_and_of_nothing_else(
    server: RunningServer, health: health_pb2_grpc.HealthStub, tmp_path: Path
) -> None:
    watched = {name: health.Watch(asked(name), timeout=20) for name in ("mlp", "late", "")}
    assert {name: next(watch).status for name, watch in watched.items()} == {
        "mlp": NOT_SERVING,
        "late": UNKNOWN,
        "": SERVING,
    }
    server.run(server.core.load("mlp"))
    assert next(watched["mlp"]).status == SERVING
    server.run(server.core.load("mlp", '{"max_batch_size": 2}'))  # serves all the while
    server.run(server.core.unload("mlp"))
    assert next(watched["mlp"]).status == NOT_SERVING
    save_mlp(tmp_path / "late" / "1" / "model.onnx")
    server.run(server.core.load("late"))
    statuses = [next(watched["late"]).status]
    while statuses[-1] != SERVING:  # it may have been seen while it was loaded
        statuses.append(next(watched["late"]).status)
    assert statuses in ([SERVING], [NOT_SERVING, SERVING])
    server.call(server.core.retire)
    assert [next(watched[name]).status for name in ("late", "")] == [NOT_SERVING, NOT_SERVING]
    assert health.Check(asked(""), timeout=20).status == NOT_SERVING
    assert health.Check(asked("late"), timeout=20).status == NOT_SERVING
