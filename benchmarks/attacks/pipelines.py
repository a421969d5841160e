"""Clients of pipelines: tensors that grow between the steps of an ensemble, and models that call themselves by a detour."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from halfserve import Client, ClientError

REQUESTS = 350  # at the same time
SLOW_NODES = 16  # nodes of the second step, some 5 ms each
COLUMNS = 2**20  # between the steps, of 4 bytes each
TIMEOUT_S = 60.0
CALLERS = 32
ENDS_FROM = 10.0  # an input from which on the models call nothing
# Calls the model NAME with a request like its own.
CALLS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0]
        if x.as_numpy().flat[0] < ENDS_FROM:
            called = pb_utils.InferenceRequest(model_name="NAME", requested_output_names=["y"], inputs=[x]).exec()
            if called.has_error():
                return [pb_utils.InferenceResponse(error=called.error())]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())])]
"""
X_TO_Y = """
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
"""


def save_ensemble(repository: Path) -> None:
    """Write an ensemble x FP32 [1] -> y FP32 [1] whose first step makes 4 MiB of it, with which the second takes its time."""
    grow = helper.make_node("Expand", ["x", "constant"], ["y"])
    _save(repository, "grow", [grow], 1, COLUMNS, np.array([COLUMNS]))
    names = ["x", *(f"x{number}" for number in range(SLOW_NODES))]
    waves = [helper.make_node("Sin", [before], [after]) for before, after in pairwise(names)]
    shrink = helper.make_node("ReduceMean", [names[-1], "constant"], ["y"])
    _save(repository, "shrink", [*waves, shrink], COLUMNS, 1, np.array([0]))
    steps = [
        'step { model_name: "grow" input_map { key: "x" value: "x" } output_map { key: "y" value: "wide" } }',
        'step { model_name: "shrink" input_map { key: "x" value: "wide" } output_map { key: "y" value: "y" } }',
    ]
    _save_ensemble(repository, "between", steps)


def save_cycles(repository: Path) -> None:
    """Write a model that calls an ensemble of which it is a step, and one with two copies that calls itself by the cache."""
    _save_python(repository, "around", "circle")
    _save_ensemble(
        repository,
        "circle",
        ['step { model_name: "around" input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }'],
    )
    _save_python(repository, "echo", "echo", "response_cache { enable: true }\ninstance_group { count: 2 kind: KIND_CPU }\n")


def between_steps(grpc_address: str, http_address: str, seconds: float) -> str:
    """Keep many small requests in flight whose tensors are large between the steps."""
    del http_address
    answered, refused, first = _ask_at_once(grpc_address, ["between"], REQUESTS, seconds)
    error = f", first: {first}" if first else ""
    return f"{answered} requests of 4 bytes answered, {refused} refused, {REQUESTS} at a time{error}"


def cycles(grpc_address: str, http_address: str, seconds: float) -> str:
    """Have models wait for themselves, and ask them something else at the end."""
    del http_address
    answered, refused, first = _ask_at_once(grpc_address, ["around", "circle", "echo"], CALLERS, seconds)
    alive = []
    with Client(grpc_address, timeout_s=TIMEOUT_S) as client:
        for model in ("around", "echo"):
            try:
                client.infer(model, {"x": np.full(1, ENDS_FROM, np.float32)})
                alive.append(model)
            except ClientError:
                continue
    return f"{answered} calls answered, {refused} refused ({first}), alive afterwards: {', '.join(alive) or 'none'} of 2 models"


def _ask_at_once(address: str, models: list[str], count: int, seconds: float) -> tuple[int, int, str]:
    """Ask the models in turn from `count` threads, each at least once; how many requests were answered and refused, and why."""
    end_s, answers, errors = time.monotonic() + seconds, [0] * count, [0] * count
    texts: list[str] = []
    ready = threading.Barrier(count)

    def ask(number: int) -> None:
        with Client(address, timeout_s=TIMEOUT_S) as client:
            ready.wait()
            turn = number
            while turn == number or time.monotonic() < end_s:
                try:
                    client.infer(models[turn % len(models)], {"x": np.full(1, number % ENDS_FROM, np.float32)})
                    answers[number] += 1
                except ClientError as error:
                    errors[number] += 1
                    texts.append(f"{error.code}: {error}"[:100])
                turn += 1

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(ask, number) for number in range(count)]:
            done.result()
    return sum(answers), sum(errors), texts[0] if texts else ""


def _save(
    repository: Path, name: str, nodes: list[onnx.NodeProto], before: int, after: int, constant: np.ndarray[Any, Any]
) -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [size]) for n, size in (("x", before), ("y", after)))
    graph = helper.make_graph(nodes, name, [x], [y], [numpy_helper.from_array(constant, "constant")])
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), folder / "model.onnx")


def _save_python(repository: Path, name: str, called: str, more: str = "") -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    code = CALLS.replace("NAME", called).replace("ENDS_FROM", str(ENDS_FROM))
    (folder / "model.py").write_text(code)
    (folder.parent / "config.pbtxt").write_text(f'backend: "python"\n{X_TO_Y}{more}')


def _save_ensemble(repository: Path, name: str, steps: list[str]) -> None:
    (repository / name / "1").mkdir(parents=True)
    text = f'platform: "ensemble"\n{X_TO_Y}ensemble_scheduling {{ {" ".join(steps)} }}\n'
    (repository / name / "config.pbtxt").write_text(text)
