"""Outputs that become 0 in float16 are refused, and taken again with what the message says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from halfserve.export.certificate.certificate import BudgetExceeded, read_certificate
from halfserve.export.cli.convert import convert
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.verification.verify import verify

WIDTH = 8


def network(*tail: onnx.NodeProto, **constants: object) -> onnx.ModelProto:
    """x [n, 8] -> relu(x w), called h -> y [n, 8], by the nodes of the tail."""
    tensors = {"w": np.random.default_rng(0).normal(size=(WIDTH, WIDTH)) / 2, **constants}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"], name="product"), helper.make_node("Tanh", ["a"], ["h"], name="tanh")]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in ("x", "y")]
    weights = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in tensors.items()]
    graph = helper.make_graph([*nodes, *tail], "network", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def twice_divided() -> onnx.ModelProto:
    nodes = [helper.make_node("Div", [x, "c"], [y], name=name) for x, y, name in (("h", "b", "one"), ("b", "y", "two"))]
    return network(*nodes, c=3e4)


def exponential() -> onnx.ModelProto:
    shift = helper.make_node("Sub", ["h", "c"], ["b"], name="shift")
    return network(shift, helper.make_node("Exp", ["b"], ["y"], name="power"), c=21.0)


def one_column() -> onnx.ModelProto:
    """Seven columns of h, and the exponential of the eighth less 21."""
    parts = numpy_helper.from_array(np.array([WIDTH - 1, 1]), "parts")
    nodes = [
        helper.make_node("Split", ["h", "parts"], ["good", "last"], name="split", axis=1),
        helper.make_node("Sub", ["last", "c"], ["b"], name="shift"),
        helper.make_node("Exp", ["b"], ["small"], name="power"),
        helper.make_node("Concat", ["good", "small"], ["y"], name="joined", axis=1),
    ]
    model = network(*nodes, c=21.0)
    model.graph.initializer.append(parts)
    return model


def tiny() -> onnx.ModelProto:
    return network(helper.make_node("Mul", ["h", "c"], ["y"], name="scaled"), c=1e-9)


def converted(*arguments: str) -> str:
    """What the command says; empty where the model passes."""
    app = typer.Typer()
    app.command()(convert)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, BudgetExceeded), result.exception
    return str(result.exception or "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    np.savez("in.npz", x=rng.normal(size=(32, WIDTH)).astype(np.float32))
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "samples"), [(twice_divided, ()), (exponential, ("--samples", "in.npz")), (one_column, ("--samples", "in.npz"))]
)
def test_what_vanishes_is_refused_and_passes_by_the_command_that_the_message_names(
    model: Callable[[], onnx.ModelProto], samples: tuple[str, ...], folder: Path
) -> None:
    onnx.save(model(), "in.onnx")
    message = converted("in.onnx", "out.onnx", "--no-search", *samples)
    assert "0 throughout and up to" in message
    assert not (folder / "out.onnx").exists()
    named = re.search(r"halfserve convert (\S*in\.onnx TARGET\.onnx [^,]*), where --search", message)
    assert named is not None
    assert converted(*shlex.split(named[1].replace("TARGET", "out")), "--no-search", *samples) == ""
    assert open_model(Path("out.onnx")).proto.graph.node


@pytest.mark.long
def test_the_search_keeps_what_vanishes_in_float32(folder: Path) -> None:
    onnx.save(one_column(), "in.onnx")
    assert converted("in.onnx", "out.onnx", "--samples", "in.npz", "--certificate", "out.json") == ""
    certificate = read_certificate((folder / "out.json").read_bytes())
    assert certificate.passed
    assert certificate.conversion is not None
    kept = {node["name"] for node in certificate.conversion["kept"]}
    assert {"power", "joined"} <= kept <= {"shift", "power", "joined"}


@pytest.mark.long
def test_a_float16_output_that_vanishes_passes_as_a_float32_one(folder: Path) -> None:
    onnx.save(tiny(), "in.onnx")
    message = converted("in.onnx", "out.onnx", "--samples", "in.npz", "--float16-io")
    assert re.search(r"halfserve convert \S*in\.onnx TARGET\.onnx --keep-io-types --block-node scaled", message)
    assert converted("in.onnx", "out.onnx", "--samples", "in.npz", "--keep-io-types", "--block-node", "scaled") == ""
    half = network(helper.make_node("Cast", ["h"], ["y"], name="end", to=TensorProto.FLOAT16))
    half.graph.node[-1].input[0] = "s"
    half.graph.node.insert(2, tiny().graph.node[-1])
    half.graph.node[2].output[0] = "s"
    half.graph.initializer.append(tiny().graph.initializer[-1])
    half.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    with pytest.raises(BudgetExceeded, match=r"halfserve convert .*in.onnx TARGET.onnx --keep-io-types"):
        verify(folder / "in.onnx", half, np.load("in.npz")["x"], cuda=False)
