"""Tensors without dimensions are served as Triton serves them: as tensors of one element."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from halfserve.serve.model_control.control_options import ControlMode
from tests.models import IR_VERSION, OPSET
from tests.serve.model_control.controlled import controlled_server, lines

ONE = '{{ name: "{0}" data_type: TYPE_FP32 dims: {1} }}'


def save_identity(folder: Path, shape: list[int] | None, dims: str | None) -> None:
    """x FP32 -> y FP32 of a shape, None for an unknown rank; and a configuration where `dims` are given."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [x], [y])
    (folder / "1").mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.save(model, folder / "1" / "model.onnx")
    if dims is not None:
        (folder / "config.pbtxt").write_text(f"input {ONE.format('x', dims)} output {ONE.format('y', dims)}")


@pytest.mark.parametrize(
    ("shape", "dims", "shown"),
    [
        ([], None, [1]),
        ([], "[ ]", [1]),
        ([], "[ 1, 1 ]", [1, 1]),
        (None, "[ 1 ]", [1]),
        (None, "[ 1, 1 ]", [1, 1]),
    ],
)
def test_a_tensor_without_dimensions_is_one_of_one_element(
    tmp_path: Path, shape: list[int] | None, dims: str | None, shown: list[int]
) -> None:
    save_identity(tmp_path / "identity", shape, dims)
    with controlled_server(tmp_path, ControlMode.NONE) as server, triton.InferenceServerClient(server.address) as client:
        metadata = client.get_model_metadata("identity")
        assert [list(tensor.shape) for tensor in (*metadata.inputs, *metadata.outputs)] == [shown, shown]
        config = client.get_model_config("identity").config
        assert [list(entry.dims) for entry in (*config.input, *config.output)] == [shown, shown]
        given = triton.InferInput("x", shown, "FP32").set_data_from_numpy(np.full(shown, 7, np.float32))
        answer = client.infer("identity", [given]).as_numpy("y")
        assert answer is not None
        assert (list(answer.shape), answer.item()) == (shown, 7)
        two = triton.InferInput("x", [2], "FP32").set_data_from_numpy(np.zeros(2, np.float32))
        with pytest.raises(InferenceServerException, match="input 'x' has shape"):
            client.infer("identity", [two])


@pytest.mark.parametrize(("dims", "says"), [("[ 2 ]", "dims [2], the model has []"), (None, "declare dims: [1] where")])
def test_an_unknown_rank_is_refused_unless_it_is_declared_as_a_number(tmp_path: Path, dims: str | None, says: str) -> None:
    save_identity(tmp_path / "identity", None, dims)
    with controlled_server(tmp_path, ControlMode.NONE, keep_going=True) as server:
        ((_, _, state, reason),) = lines(server)
    assert state == "UNAVAILABLE"
    assert says in reason
