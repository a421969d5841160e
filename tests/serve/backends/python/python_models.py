"""Python models in a repository, and a real server on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import DevicePlacement, Trust
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_calls import ModelCalls
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.protocol.forwarded_headers import ForwardedHeaders
from halfserve.serve.transports.nghttp2.server import Nghttp2Server
from tests.serve.running_server import MakeTransport, RunningServer, running_server

ON_CPU = DevicePlacement(use_gpu=False, threads=1)
HEAD = "import json, os, sys, threading, time\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n\n"
# Answers each request with twice its input.
TWICE = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2)]))
        return answers
"""
X_TO_Y = """
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""


def save_python_model(root: Path, name: str, code: str = TWICE, config: str | None = X_TO_Y, version: int = 1) -> Path:
    """Write a model folder; returns its model.py. No configuration is written where `config` is None."""
    path = root / name / str(version) / "model.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + dedent(code))
    if config is not None:
        (root / name / "config.pbtxt").write_text(f'backend: "python"\n{dedent(config)}')
    return path


def load(root: Path, runtimes: Runtimes, placement: DevicePlacement = ON_CPU) -> list[Model]:
    return [load_model(files, runtimes, placement, Defaults()) for files in find_models(root)]


@contextmanager
def serving(
    root: Path,
    make_transport: MakeTransport = Nghttp2Server,
    *,
    forwarded: ForwardedHeaders | None = None,
    placement: DevicePlacement = ON_CPU,
) -> Iterator[RunningServer]:
    """A server on the models in `root`, which may call each other."""
    runtimes = Runtimes(trust=Trust(python_models=True))
    with running_server(lambda: load(root, runtimes, placement), make_transport, forwarded=forwarded) as running:
        running.call(lambda: runtimes.connect(ModelCalls(running.core)))
        yield running
