"""The clients against the server's other transport: what a call, a stream, shared memory and an error are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from serve.client import InvalidRequest, ModelNotFound
from serve.transports.grpcio_server import GrpcioServer
from tests.serve.client.conftest import Connect
from tests.serve.conftest import load_repository
from tests.serve.running_server import RunningServer, running_server

X = np.random.default_rng(4).standard_normal((3, 64)).astype(np.float16)


@pytest.fixture(scope="module")
def reference(repository: Path) -> Iterator[RunningServer]:
    """The server on grpcio, with shared memory."""
    with running_server(lambda: load_repository(repository), GrpcioServer, shared_memory=True) as running:
        yield running


def test_both_transports_answer_alike(reference: RunningServer, server: RunningServer, connect: Connect) -> None:
    ours, theirs = (connect(one.address).infer("mlp", {"x": X})["y"] for one in (server, reference))
    np.testing.assert_array_equal(ours, theirs)


def test_a_stream_with_an_error_in_it(reference: RunningServer, connect: Connect) -> None:
    requests = [{"x": X}, {"x": np.zeros((99, 64), np.float16)}, {"x": X[:1]}]
    first, second, third = connect(reference.address).stream_infer("mlp", requests, in_flight=2)
    assert (first.outputs["y"].shape, third.outputs["y"].shape) == ((3, 10), (1, 10))
    with pytest.raises(InvalidRequest, match="batch size is 99"):
        _ = second.outputs


def test_shared_memory(reference: RunningServer, connect: Connect) -> None:
    client = connect(reference.address)
    expected = client.infer("mlp", {"x": X})["y"]
    with client.shared_region(X.nbytes + 60) as region:
        x, y = region.array(X.shape, X.dtype), region.array((3, 10), np.float16)
        x[:] = X
        client.infer("mlp", {"x": x}, into={"y": y})
    np.testing.assert_array_equal(y, expected)


def test_errors_keep_their_kind(reference: RunningServer, connect: Connect) -> None:
    client = connect(reference.address)
    with pytest.raises(ModelNotFound, match="nope"):
        client.infer("nope", {"x": X})
    with pytest.raises(InvalidRequest, match="batch size is 99"):
        client.infer("mlp", {"x": np.zeros((99, 64), np.float16)})
