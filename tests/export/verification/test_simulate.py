from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from onnx import parser
from torch import nn

from export.halving.to_half import to_half
from export.to_onnx.export_onnx import export_onnx, serialize
from export.verification.metrics import Array
from export.verification.sessions import open_session, run_session
from export.verification.simulate import round_every_node
from tests.export import models
from tests.export.chain import chain


def run(model: onnx.ModelProto, x: Array, level: str = "ORT_ENABLE_BASIC") -> Array:
    (output,) = run_session(open_session(serialize(model), level), {model.graph.input[0].name: x}).values()
    return output


def stepwise(operations: list[str], constant: float, x: Array) -> Array:
    """numpy's float16, which rounds after every operation."""
    functions = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
    with np.errstate(over="ignore", invalid="ignore"):
        for operation in operations:
            x = functions[operation](x, np.float16(constant))
    return x


CASES = [(["Add", "Sub"], 2048.0), (["Mul", "Mul", "Div", "Div"], 300.0), (["Div", "Div", "Mul", "Mul"], 700.0)]
X = np.linspace(-2, 2, 21).astype(np.float16)[:, None]


@pytest.mark.parametrize(("operations", "constant"), CASES)
@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
def test_it_rounds_like_numpy_at_every_level(operations: list[str], constant: float, level: str) -> None:
    output = run(round_every_node(chain(operations, constant)), X, level)
    assert np.array_equal(output, stepwise(operations, constant, X), equal_nan=True)


def test_the_runtime_alone_hides_an_overflow() -> None:
    model = chain(["Mul", "Mul", "Div", "Div"], 300.0)
    assert np.isfinite(run(model, X, "ORT_DISABLE_ALL")).all()
    assert not np.isfinite(run(round_every_node(model), X)).all()


def test_the_given_model_stays_as_it_is() -> None:
    model = chain(["Add"], 1.0)
    before = serialize(model)
    assert len(round_every_node(model).graph.node) > 1
    assert serialize(model) == before


def test_torch_computing_in_half_gives_the_same() -> None:
    half = to_half(models.mlp()).module
    x = torch.rand(16, 8).half()
    output = run(round_every_node(export_onnx(half, x)), x.numpy())
    assert np.abs(output.astype(float) - half(x).detach().double().numpy()).max() <= 2.0**-10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to compare with")
@pytest.mark.parametrize("factory", [models.mlp, models.cnn, models.transformer])
def test_a_gpu_computes_the_same(factory: Callable[[], nn.Module]) -> None:
    half = to_half(factory()).module
    x = torch.randn({models.mlp: (16, 8), models.cnn: (16, 1, 8, 8), models.transformer: (16, 5, 16)}[factory]).half()
    on_gpu = half.cuda()(x.cuda()).detach().cpu().double().numpy()
    output = run(round_every_node(export_onnx(half.cpu(), x)), x.numpy())
    assert np.abs(output.astype(float) - on_gpu).max() <= 4 * 2.0**-11 * np.abs(on_gpu).max()


BRANCHES = """
<ir_version: 10, opset_import: ["":20]>
g (float16[N] x, bool flag) => (float16[N] y) {
    big = Mul(x, x)
    y = If (flag) <
        then_branch = a () => (float16[N] t) { s = Mul(big, x)  t = Sub(s, x) },
        else_branch = b () => (float16[N] e) { e = Add(big, x) }
    >
}
"""


def test_bodies_of_branches_round_too() -> None:
    model = parser.parse_model(BRANCHES)
    session = open_session(serialize(round_every_node(model)), "ORT_ENABLE_BASIC")
    x = np.array([50.0, 3.3], np.float16)
    with np.errstate(over="ignore"):
        expected = {True: x * x * x - x, False: x * x + x}
    for flag, wanted in expected.items():
        (y,) = run_session(session, {"x": x, "flag": np.array(flag)}).values()
        assert np.array_equal(y, wanted)
    assert np.isinf(expected[True][0])
