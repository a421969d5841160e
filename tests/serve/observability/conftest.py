from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from halfserve.serve.observability.observe_options import ObserveOptions
from tests.serve.conftest import load_repository
from tests.serve.running_server import TRANSPORTS, MakeTransport, RunningServer, running_server

Serving = Callable[[ObserveOptions], AbstractContextManager[RunningServer]]
CLIENT_TIMEOUT_S = 60.0
SECRET = 471_147_114_711  # too many digits to be part of a time, an id or a port by chance


@pytest.fixture(scope="session", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> MakeTransport:
    return TRANSPORTS[request.param]


@pytest.fixture
def serving(repository: Path, transport: MakeTransport) -> Serving:
    """Starts a real server on `repository` that is observed as a test asks for."""

    @contextmanager
    def start(observe: ObserveOptions) -> Iterator[RunningServer]:
        with running_server(lambda: load_repository(repository), transport, observe=observe) as server:
            yield server

    return start


def row(rows: int = 1, name: str = "x", width: int = 64) -> list[Any]:
    """Inputs of the model "mlp"."""
    array = np.ones((rows, width), np.float16)
    return [triton.InferInput(name, list(array.shape), "FP16").set_data_from_numpy(array)]


def index(value: int) -> list[Any]:
    """Inputs of the model "picky", which fails inside the runtime above 1."""
    array = np.array([[value]], np.int64)
    return [triton.InferInput("i", [1, 1], "INT64").set_data_from_numpy(array)]
