"""Loading models as the engine does, and models that crash ONNX Runtime by an integer division that it does not guard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import NodeProto, TensorProto, helper

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime, OnnxRuntimeBackend
from halfserve.serve.backends.onnx_runtime.session import OpenSession, SessionOpener
from halfserve.serve.engine.backend import DevicePlacement
from tests.models import save_model

INT64, BOOL = TensorProto.INT64, TensorProto.BOOL
WEIGHTS = {"lowest": np.array([np.iinfo(np.int64).min]), "minus_one": np.array([-1])}


def save_crashing_when_folded(path: Path) -> Path:
    """x INT64 [batch], c BOOL [] -> y: the fatal division is in a branch that `c` = True passes by, until it is folded."""
    quotient = [helper.make_node("Div", ["lowest", "minus_one"], ["q"])]
    harmless = [helper.make_node("Identity", ["minus_one"], ["m"])]
    branches = {
        "then_branch": helper.make_graph(harmless, "then", [], [helper.make_tensor_value_info("m", INT64, [1])]),
        "else_branch": helper.make_graph(quotient, "else", [], [helper.make_tensor_value_info("q", INT64, [1])]),
    }
    choice = helper.make_node("If", ["c"], ["d"], None, None, None, None, **branches)
    return _save(path, choice, [("x", INT64, ["batch"]), ("c", BOOL, [])])


def save_crashing_always(path: Path) -> Path:
    """x INT64 [batch] -> y, at no optimization level."""
    return _save(path, helper.make_node("Div", ["lowest", "minus_one"], ["d"]), [("x", INT64, ["batch"])])


def _save(path: Path, first: NodeProto, inputs: list[tuple[str, int, list[int | str]]]) -> Path:
    nodes = [first, helper.make_node("Add", ["x", "d"], ["y"])]
    return save_model(path, nodes, inputs, [("y", INT64, ["batch"])], WEIGHTS)


def load_backend(path: Path, placement: DevicePlacement, config: ModelConfig | None = None) -> OnnxRuntimeBackend:
    runtime = OnnxRuntime()
    return runtime.load(path, runtime.describe(path), placement, config or ModelConfig())


def open_session(path: Path, placement: DevicePlacement) -> OpenSession:
    return SessionOpener(path=path, placement=placement).open()
