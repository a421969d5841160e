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
from export.verification.accumulators import with_checks
from export.verification.metrics import Array
from export.verification.simulate import round_every_node
from tests.export import models
from tests.export.chain import chain
from tests.export.sessions import open_session, run_session


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


def test_the_number_that_an_old_pad_fills_with_is_rounded() -> None:
    model = parser.parse_model("""<ir_version: 4, opset_import: ["": 9]> g (float16[N, 1] x) => (float16[N, 2] y) {
        p = Pad <pads = [0, 0, 0, 1], value: float = 1e6> (x)
        c = Constant <value = float {0.001}> ()  k = Cast <to = 10> (c)  y = Mul (p, k)
    }""")
    assert np.isfinite(run(model, X)).all(), "or else the runtime has a float16 Pad, and this is no test any more"
    assert np.isposinf(run(round_every_node(model), X)[:, 1]).all()


def test_a_model_of_another_domain_alone_gets_casts_and_checks() -> None:
    model = parser.parse_model("""<ir_version: 9, opset_import: ["com.microsoft": 1]> g (float16[N, 1] x) => (float16[N, 1] y) {
        y = com.microsoft.Gelu (x)
    }""")
    rounded = round_every_node(model)
    assert [node.op_type for node in rounded.graph.node] == ["Cast", "Gelu", "Cast"]
    assert with_checks(rounded, products=True).risks == ()
    assert np.abs(run(rounded, X).astype(float) - run(model, X)).max() <= 2.0**-10


@pytest.mark.parametrize("zero", ["", ", z"])
def test_integers_of_another_domain_are_no_float16(zero: str) -> None:
    model = parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]>
    g (float16[N, 1] x) => (float16[N, 1] y) {{
        c = Constant <value = float {{0.5}}> ()  s = Cast <to = 10> (c)  z = Constant <value = uint16 {{9}}> ()
        q = com.microsoft.QuantizeLinear (x, s{zero})  d = com.microsoft.DequantizeLinear (q, s{zero})  y = Mul (d, s)
    }}""")
    rounded = round_every_node(model)
    casts = [
        node for node in rounded.graph.node if node.op_type == "Cast" and {*node.input, *node.output} & {"q", "q/as_float32_0"}
    ]
    assert casts == []
    assert np.array_equal(run(rounded, X), run(model, X))


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


LOOP = """
<ir_version: 10, opset_import: ["":20]>
g (float16[N] x, int64 turns, bool go) => (float16[N] y, float16[K,N] seen) {
    y, seen = Loop (turns, go, x) <body = b (int64 i, bool c, float16[N] h) => (bool d, float16[N] k, float16[N] out) {
        d = Identity(c)  k = Mul(h, x)  out = Sub(k, x)
    }>
}
"""


def test_bodies_of_loops_round_in_every_turn() -> None:
    model = parser.parse_model(LOOP)
    x = np.array([1.3, 7.7, 40.1], np.float16)
    feeds = {"x": x, "turns": np.array(3), "go": np.array(True)}
    y, seen = run_session(open_session(serialize(round_every_node(model)), "ORT_ENABLE_BASIC"), feeds).values()
    state, wanted = x, []
    with np.errstate(over="ignore"):
        for _ in range(3):
            state = state * x
            wanted.append(state - x)
    assert np.array_equal(y, state)
    assert np.array_equal(seen, wanted)
    assert np.isinf(y[2])


MIXED = """
<ir_version: 8, opset_import: ["":17, "local":1]>
g (float16[N] x, double[N] d) => (float16[N] y, double[N] e, float16[N] z) {
    s = SequenceConstruct(x, x)
    c = Constant<value_int=1>()
    a = SequenceAt(s, c)
    y = local.cube(a)
    w = Cast<to=11>(y)
    e = Mul(w, d)
    i, f = local.pair(x)
    z = Add(i, f)
}
<domain: "local", opset_import: ["":17]> cube (x) => (y) { a = Mul(x, x)  y = Mul(a, x) }
<domain: "local", opset_import: ["":17]> pair (x) => (a, b) { a = Mul(x, x)  b = Neg(a) }
"""


def test_functions_round_inside_and_sequences_and_doubles_stay_what_they_are() -> None:
    x, d = np.array([45.0, 2.1], np.float16), np.array([1e-9, 1e-9])
    session = open_session(serialize(round_every_node(parser.parse_model(MIXED))), "ORT_ENABLE_BASIC")
    y, e, z = run_session(session, {"x": x, "d": d}).values()
    with np.errstate(over="ignore"):
        cube = x * x * x
    assert np.array_equal(y, cube)
    assert np.array_equal(e, cube.astype(np.float64) * d)
    assert not z.any()


CONTRIB = """
<ir_version: 8, opset_import: ["":17, "com.microsoft":1]>
g (float16[N,4] x) => (float16[N,4] y) { a = com.microsoft.Gelu(x)  b = Mul(a, a)  y = Sqrt(b) }
"""


def test_after_a_node_of_another_domain_rounding_goes_on() -> None:
    x = np.full((1, 4), 300, np.float16)
    assert np.isfinite(run(parser.parse_model(CONTRIB), x)).all()
    assert np.isinf(run(round_every_node(parser.parse_model(CONTRIB)), x)).all()


REDUCTIONS = {
    "ReduceSumSquare<axes=[1], keepdims=0>(x)": lambda x: np.square(x).sum(1, dtype=np.float32),
    "ReduceSumSquare(x)": lambda x: np.square(x).sum(dtype=np.float32, keepdims=True),
    "ReduceLogSum<axes=[1]>(x)": lambda x: np.log(x.sum(1, dtype=np.float32, keepdims=True).astype(np.float16)),
    "ReduceLogSumExp<axes=[1], keepdims=0>(x)": lambda x: np.log(np.exp(x.astype(np.float32)).sum(1)),
}


@pytest.mark.parametrize("opset", [12, 17, 20])
@pytest.mark.parametrize("text", REDUCTIONS)
def test_reductions_that_round_inside_do_so_at_every_opset(text: str, opset: int) -> None:
    x = np.random.default_rng(0).uniform(0.5, 9, (3, 5)).astype(np.float16)
    header = f'<ir_version: 8, opset_import: ["":{opset}]> g (float16[N,5] x) => (y) '
    model = parser.parse_model(header.replace("(y)", "(float16[] y)") + "{ y = " + text + " }")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    if opset >= 18:
        attribute = next((a for a in model.graph.node[0].attribute if a.name == "axes"), None)
        if attribute is not None:
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(attribute.ints), "axes"))
            model.graph.node[0].input.append("axes")
            model.graph.node[0].attribute.remove(attribute)
    answer = run(round_every_node(model), x)
    assert np.allclose(answer, REDUCTIONS[text](x), rtol=2e-3)


@pytest.mark.parametrize("operator", ["ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"])
@pytest.mark.parametrize("kind", ["int32", "float"])
def test_reductions_of_other_types_stay(operator: str, kind: str) -> None:
    text = f"g ({kind}[N, 5] x) => ({kind}[N, 1] y) {{ y = {operator} <axes = [1]> (x) }}"
    rounded = round_every_node(parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}'))
    assert [node.op_type for node in rounded.graph.node] == [operator]
    assert run(rounded, np.ones((2, 5), {"int32": np.int32, "float": np.float32}[kind])).shape == (2, 1)


@pytest.mark.parametrize("operator", ["EyeLike", "RandomNormalLike", "RandomUniformLike"])
def test_a_node_that_states_its_results_type_is_simulated(operator: str) -> None:
    text = f"g (float16[3, 3] x) => (float16[3, 3] y) {{ y = {operator} <dtype = 10> (x) }}"
    y = run(
        round_every_node(parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')), np.ones((3, 3), np.float16)
    )
    assert (y.dtype, y.shape) == (np.float16, (3, 3))
    assert operator != "EyeLike" or np.array_equal(y, np.eye(3))


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
