from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

from halfserve.export.certificate.certificate import BudgetExceeded
from halfserve.export.certificate.verdicts import Risk
from halfserve.export.half_module.to_half import to_half
from halfserve.export.half_types import BF16, FP16, HalfType
from halfserve.export.onnx_files.model_file import open_model, serialize
from halfserve.export.to_onnx.export_onnx import export_onnx
from halfserve.export.verification.executions import run_simulated
from halfserve.export.verification.samples import Array, as_array
from halfserve.export.verification.sandbox import Sandbox
from halfserve.export.verification.simulation import MOVERS, SumChecks, round_every_node, with_sum_checks
from halfserve.export.verification.verify import verify
from tests.export import models
from tests.export.stored_models import answers, both, chain, parse

MICROSOFT = ', "com.microsoft": 1'
CASES = [(["Add", "Sub"], 2048.0), (["Mul", "Mul", "Div", "Div"], 300.0), (["Div", "Div", "Mul", "Mul"], 700.0)]
X = np.linspace(-2, 2, 21).astype(np.float16)[:, None]
BRANCHES = """
g (float16[N] x, bool flag) => (float16[N] y) {
    big = Mul(x, x)
    y = If (flag) <
        then_branch = a () => (float16[N] t) { s = Mul(big, x)  t = Sub(s, x) },
        else_branch = b () => (float16[N] e) { e = Add(big, x) }
    >
}
"""
LOOP = """
g (float16[N] x, int64 turns, bool go) => (float16[N] y, float16[K,N] seen) {
    y, seen = Loop (turns, go, x) <body = b (int64 i, bool c, float16[N] h) => (bool d, float16[N] k, float16[N] out) {
        d = Identity(c)  k = Mul(h, x)  out = Sub(k, x)
    }>
}
"""
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
CONTRIB = """
<ir_version: 8, opset_import: ["":17, "com.microsoft":1]>
g (float16[N,4] x) => (float16[N,4] y) { a = com.microsoft.Gelu(x)  b = Mul(a, a)  y = Sqrt(b) }
"""
REDUCTIONS = {
    "ReduceSumSquare<axes=[1], keepdims=0>(x)": lambda x: np.square(x).sum(1, dtype=np.float32),
    "ReduceSumSquare(x)": lambda x: np.square(x).sum(dtype=np.float32, keepdims=True),
    "ReduceLogSum<axes=[1]>(x)": lambda x: np.log(x.sum(1, dtype=np.float32, keepdims=True).astype(np.float16)),
    "ReduceLogSumExp<axes=[1], keepdims=0>(x)": lambda x: np.log(np.exp(x.astype(np.float32)).sum(1)),
}
SUMMED = np.random.default_rng(1).uniform(-100, 100, (2, 6, 8)).astype(np.float16)
WIDE = SUMMED.astype(np.float64)
W = np.random.default_rng(2).uniform(-100, 100, (8, 3)).astype(np.float16)
KERNEL = np.random.default_rng(3).uniform(-100, 100, (4, 6, 3)).astype(np.float16)
SQUARES = WIDE**2
# Each node, what is summed in it, and how large that can get on X.
SUMS = {
    "r = ReduceSum<keepdims=0>(x, last)": np.abs(WIDE).sum(-1).max(),
    "r = ReduceL1<axes=[1]>(x)": np.abs(WIDE).sum(1).max(),
    "r = ReduceMean<axes=[0, 2]>(x)": np.abs(WIDE).sum((0, 2)).max(),
    "r = ReduceMean(x)": np.abs(WIDE).sum(),
    "r = ReduceSumSquare<axes=[-1]>(x)": SQUARES.sum(-1).max(),
    "r = ReduceL2<axes=[-1], keepdims=0>(x)": SQUARES.sum(-1).max(),
    "r = LayerNormalization(x, scale)": SQUARES.sum(-1).max(),
    "r = LayerNormalization<axis=2>(x, scale)": SQUARES.sum(-1).max(),
    "r = LayerNormalization<axis=1>(x, scale)": SQUARES.sum((1, 2)).max(),
    "r = LpNormalization<axis=1>(x)": SQUARES.sum(1).max(),
    "r = InstanceNormalization(x, six, six)": SQUARES.sum(-1).max(),
    "r = GlobalAveragePool(x)": np.abs(WIDE).sum(-1).max(),
    "r = AveragePool<kernel_shape=[8]>(x)": np.abs(WIDE).sum(-1).max(),
    "r = CumSum(x, axis)": np.abs(WIDE).sum(1).max(),
}
PRODUCTS = {
    "r = MatMul(x, w)": (np.abs(WIDE) @ np.abs(W.astype(float))).max(),
    'r = Einsum<equation="abc, cd -> abd">(x, w)': (np.abs(WIDE) @ np.abs(W.astype(float))).max(),
    "r = com.microsoft.FusedMatMul<alpha=-2.0>(x, w)": 2 * (np.abs(WIDE) @ np.abs(W.astype(float))).max(),
    "r = Conv<pads=[0,0]>(x, kernel, bias)": max(
        (np.abs(WIDE[:, None, :, i : i + 3]) * np.abs(KERNEL.astype(float))).sum((2, 3)).max() for i in range(6)
    ),
}
MEANS = "g (T[N,64] x) => (T[N] y) { y = ReduceMean<axes=[-1], keepdims=0>(x) }"
RECURRENT = """g (T[1, N, 2] x, bool f) => (T[1, 1, N, 1] y, T[1, N, 1] z) {
    w = Constant <value = float[1, 1, 2] {0.1, 0.2}> ()  r = Constant <value = float[1, 1, 1] {0.1}> ()
    wt = Cast <to = NUMBER> (w)  rt = Cast <to = NUMBER> (r)
    y = RNN <hidden_size = 1> (x, wt, rt)
    z = If (f) <
        then_branch = a () => (T[1, N, 1] t) { t = ReduceSum <keepdims = 1> (x, last) },
        else_branch = b () => (T[1, N, 1] e) { e = ReduceMean <axes = [-1]> (x) }
    >
}"""


def run(model: onnx.ModelProto, x: Array, level: str = "ORT_ENABLE_BASIC") -> Array:
    (output,) = answers(model, {model.graph.input[0].name: x}, level).values()
    return output


def stepwise(operations: list[str], constant: float, x: Array) -> Array:
    """numpy's float16, which rounds after every operation."""
    functions = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
    with np.errstate(over="ignore", invalid="ignore"):
        for operation in operations:
            x = functions[operation](x, np.float16(constant))
    return x


@pytest.mark.parametrize(("operations", "constant"), CASES)
@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
def test_it_rounds_like_numpy_at_every_level(operations: list[str], constant: float, level: str) -> None:
    output = run(round_every_node(chain(operations, constant)), X, level)
    assert np.array_equal(output, stepwise(operations, constant, X), equal_nan=True)


def test_the_number_that_an_old_pad_fills_with_is_rounded() -> None:
    text = """g (float16[N, 1] x) => (float16[N, 2] y) {
        p = Pad <pads = [0, 0, 0, 1], value: float = 1e6> (x)
        c = Constant <value = float {0.001}> ()  k = Cast <to = 10> (c)  y = Mul (p, k)
    }"""
    model = parse(text, opset=9, ir=4)
    assert np.isfinite(run(model, X)).all(), "or else the runtime has a float16 Pad, and this is no test any more"
    assert np.isposinf(run(round_every_node(model), X)[:, 1]).all()


OTHER = np.linspace(-2, 2, 40).astype(np.float16)
IN_A_BRANCH = """n = Size (h)  k = Cast <to = 9> (n)  y = If (k) <
    then_branch = t () => (int64[M] a) { a = ArgMax <axis = 1, keepdims = 0> (h) },
    else_branch = e () => (int64[M] b) { b = ArgMin <axis = 1, keepdims = 0> (h) }
>"""
CHOOSING: dict[str, Callable[[Array], Array]] = {
    "y = ArgMax <axis = -1, keepdims = 0> (h)": lambda h: h.argmax(-1),
    "y = ArgMin <axis = -1, keepdims = 0> (h)": lambda h: h.argmin(-1),
    "v, y = TopK (h, three)": lambda h: np.argsort(-h.astype(float), axis=-1, kind="stable")[:, :3],
    "y = Greater (h, other)": lambda h: h > OTHER,
    "y = LessOrEqual (h, other)": lambda h: h <= OTHER,
    "y = Equal (h, other)": lambda h: h == OTHER,
    "y = NonZero (h)": lambda h: np.stack(np.nonzero(h)),
    "c = Cast <to = 9> (h)  y = Not (c)": lambda h: h == 0,
    "y = IsInf (h)": np.isinf,
    "c = Greater (h, other)  w = Cast <to = 1> (h)  y = Where (c, w, zero)": lambda h: np.where(h > OTHER, h, 0).astype(
        np.float32
    ),
    "c = Tile (h, repeats)  y = Cast <to = 1> (c)": lambda h: np.tile(h, (1, 2)).astype(np.float32),
    "c = Pad (h, ends)  y = Cast <to = 1> (c)": lambda h: np.pad(h, ((0, 0), (1, 1))).astype(np.float32),
    "c = CumSum (h, one)  y = Cast <to = 1> (c)": lambda h: np.cumsum(h, 1, dtype=np.float16).astype(np.float32),
    "a = ArgMax <axis = 1, keepdims = 0> (h)  y = OneHot (a, forty, values)": lambda h: np.eye(40, dtype=np.float16)[
        h.argmax(1)
    ],
    IN_A_BRANCH: lambda h: h.argmax(-1),
}
# Neighbours that float16 does not distinguish, numbers that vanish in it, and some over its range.
CLOSE = (np.random.default_rng(4).integers(-8, 8, (12, 40)) / 4 + np.random.default_rng(5).normal(size=(12, 40)) * 1e-4).astype(
    np.float32
)
CLOSE[::3, ::5] = 1e-9
CLOSE[1::4, 7] = 1e6


@pytest.mark.parametrize("text", CHOOSING)
def test_a_cast_to_half_rounds_before_a_node_without_a_half_result(text: str) -> None:
    kind = "int64" if "Arg" in text or "TopK" in text or "NonZero" in text else "bool"
    kind = "float" if "<to = 1>" in text else "float16" if "OneHot" in text else kind
    weights: dict[str, Any] = {"other": OTHER, "zero": np.float32(0), "three": [3], "one": 1, "ends": [0, 1, 0, 1]}
    weights |= {"repeats": [1, 2], "rows": [0], "forty": 40, "values": np.array([0, 1], np.float16)}
    used = {name: array for name, array in weights.items() if re.search(rf"\b{name}\b", text)}
    model = parse(f"g (float[N, 40] x) => ({kind} y) {{ h = Cast <to = 10> (x)  {text} }}", opset=20, **used)
    with np.errstate(over="ignore"):
        expected = CHOOSING[text](CLOSE.astype(np.float16))
    with Sandbox() as sandbox:
        done = run_simulated(open_model(model), sandbox, sandbox.stage([{"x": CLOSE}]), user_batches=1, products=False)
    (answer,) = done.answer.batches
    assert not isinstance(answer, str), answer
    assert np.array_equal(as_array(answer[0]), expected, equal_nan=expected.dtype.kind == "f")


@pytest.mark.parametrize("mover", sorted(MOVERS))
def test_every_mover_on_half_inputs_is_rounded_before_it(mover: str) -> None:
    calls = {
        "Concat": "Concat <axis = 0> (h, h)", "Expand": "Expand (h, sizes)", "Gather": "Gather (h, rows)",
        "GatherElements": "GatherElements (h, table)", "GatherND": "GatherND (h, table)", "Pad": "Pad (h, ends)",
        "Reshape": "Reshape (h, flat)", "ReverseSequence": "ReverseSequence <batch_axis = 1, time_axis = 0> (h, counts)",
        "Slice": "Slice (h, first, last)", "Squeeze": "Squeeze (h)", "Tile": "Tile (h, repeats)",
        "Split": "Split <num_outputs = 1> (h)",
        "Unsqueeze": "Unsqueeze (h, rows)", "Compress": "Compress (h, chosen)", "CastLike": "CastLike (x, half)",
        "DepthToSpace": "DepthToSpace <blocksize = 1> (cube)", "SpaceToDepth": "SpaceToDepth <blocksize = 2> (cube)",
    }  # fmt: skip
    unary = ("Cast", "Flatten", "Identity", "Transpose")
    if mover not in calls and mover not in unary:
        return  # makes no number, or a sequence of unchanged ones
    step = "Cast <to = 10> (x)" if mover == "Cast" else calls.get(mover, f"{mover} (h)")
    weights: dict[str, Any] = {"sizes": [2, 12, 40], "rows": [0], "table": [[0] * 40], "ends": [0, 1, 0, 1], "flat": [-1]}
    weights |= {"counts": [12] * 40, "first": [0, 0], "last": [9, 9], "repeats": [1, 2], "half": np.float16(1)}
    weights |= {"chosen": np.arange(480) % 2 == 0, "four": [1, 12, 4, 10]}
    if mover == "GatherND":
        weights["table"] = [[0]]
    text = f"h = Cast <to = 10> (x)  cube = Reshape (h, four)  m = {step}  y = Cast <to = 1> (m)"
    used = {name: array for name, array in weights.items() if re.search(rf"\b{name}\b", text)}
    rounded = round_every_node(parse(f"g (float[12, 40] x) => (float y) {{ {text} }}", opset=20, **used))
    with np.errstate(over="ignore"):
        expected = CLOSE.astype(np.float16).astype(np.float32)
    assert np.array_equal(run(rounded, CLOSE), run(rounded, expected))


def test_an_activations_constants_are_rounded() -> None:
    model = parse("g (float16[N, 1] x) => (float16[N, 1] y) { y = Selu (x) }", opset=17, ir=8)
    alpha, gamma = (np.float16(value).astype(np.float32) for value in (1.67326319, 1.05070102))
    x = -np.abs(X)
    expected = (gamma * alpha * np.expm1(x.astype(np.float32))).astype(np.float16)
    assert np.array_equal(run(round_every_node(model), x), expected)


def test_a_model_of_another_domain_alone_gets_casts_and_checks() -> None:
    model = parser.parse_model("""<ir_version: 9, opset_import: ["com.microsoft": 1]> g (float16[N, 1] x) => (float16[N, 1] y) {
        y = com.microsoft.Gelu (x)
    }""")
    rounded = round_every_node(model)
    assert [node.op_type for node in rounded.graph.node] == ["Cast", "Gelu", "Cast"]
    assert with_sum_checks(rounded, products=True).risks == ()
    assert np.abs(run(rounded, X).astype(float) - run(model, X)).max() <= 2.0**-10


@pytest.mark.parametrize("zero", ["", ", z"])
def test_integers_of_another_domain_are_no_float16(zero: str) -> None:
    text = f"""g (float16[N, 1] x) => (float16[N, 1] y) {{
        c = Constant <value = float {{0.5}}> ()  s = Cast <to = 10> (c)  z = Constant <value = uint16 {{9}}> ()
        q = com.microsoft.QuantizeLinear (x, s{zero})  d = com.microsoft.DequantizeLinear (q, s{zero})  y = Mul (d, s)
    }}"""
    model = parse(text, opset=18, imports=MICROSOFT)
    rounded = round_every_node(model)
    casts = [
        node for node in rounded.graph.node if node.op_type == "Cast" and {*node.input, *node.output} & {"q", "q/as_float32_0"}
    ]
    assert casts == []
    assert np.array_equal(run(rounded, X), run(model, X))


def test_the_given_model_is_not_changed() -> None:
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


@pytest.mark.parametrize("half", [FP16, BF16], ids=str)
def test_bodies_of_loops_and_branches_round(half: HalfType) -> None:
    def ran(text: str, **feeds: Array) -> list[Array]:
        model = parse(text.replace("float16", half.name), opset=22, ir=10)
        return [np.asarray(answer, np.float32) for answer in answers(round_every_node(model, half), feeds).values()]

    kind = np.float16 if half is FP16 else ml_dtypes.bfloat16
    x = np.array([1.3, 7.7, 40.1], np.float16 if half is FP16 else np.float32)
    given = state = x.astype(kind)
    wanted = []
    with np.errstate(over="ignore"):
        for _ in range(3):
            state = state * given
            wanted.append((state - given).astype(np.float32))
        big = given * given
        expected = {True: big * given - given, False: big + given}
    y, seen = ran(LOOP, x=x, turns=np.array(3), go=np.array(True))
    assert np.array_equal(y, state.astype(np.float32))
    assert np.array_equal(seen, wanted)
    assert np.isinf(y[2]) == (half is FP16)
    for flag, answer in expected.items():
        assert np.array_equal(ran(BRANCHES, x=x, flag=np.array(flag))[0], answer.astype(np.float32))


def test_functions_round_and_sequences_and_doubles_do_not() -> None:
    x, d = np.array([45.0, 2.1], np.float16), np.array([1e-9, 1e-9])
    y, e, z = answers(round_every_node(parser.parse_model(MIXED)), {"x": x, "d": d}).values()
    with np.errstate(over="ignore"):
        cube = x * x * x
    assert np.array_equal(y, cube)
    assert np.array_equal(e, cube.astype(np.float64) * d)
    assert not z.any()


def test_rounding_continues_after_a_node_of_another_domain() -> None:
    x = np.full((1, 4), 300, np.float16)
    assert np.isfinite(run(parser.parse_model(CONTRIB), x)).all()
    assert np.isinf(run(round_every_node(parser.parse_model(CONTRIB)), x)).all()


@pytest.mark.parametrize("opset", [12, 17, 20])
@pytest.mark.parametrize("text", REDUCTIONS)
def test_reductions_that_round_inside_do_so_at_every_opset(text: str, opset: int) -> None:
    x = np.random.default_rng(0).uniform(0.5, 9, (3, 5)).astype(np.float16)
    model = parse(f"g (float16[N,5] x) => (float16[] y) {{ y = {text} }}", opset=opset, ir=8)
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
    rounded = round_every_node(parse(text, opset=17, ir=8))
    assert [node.op_type for node in rounded.graph.node] == [operator]
    assert run(rounded, np.ones((2, 5), {"int32": np.int32, "float": np.float32}[kind])).shape == (2, 1)


@pytest.mark.parametrize("operator", ["EyeLike", "RandomNormalLike", "RandomUniformLike"])
def test_a_node_that_states_its_results_type_is_simulated(operator: str) -> None:
    text = f"g (float16[3, 3] x) => (float16[3, 3] y) {{ y = {operator} <dtype = 10> (x) }}"
    y = run(round_every_node(parse(text, opset=17, ir=8)), np.ones((3, 3), np.float16))
    assert (y.dtype, y.shape) == (np.float16, (3, 3))
    assert operator != "EyeLike" or np.array_equal(y, np.eye(3))


def checked(text: str, *, products: bool = False) -> SumChecks:
    model = parse(f"g (float16[N,6,8] x) => (float16[] r) {{ {text} }}", opset=17, ir=8, imports=MICROSOFT)
    constants: dict[str, Array] = {"w": W, "kernel": KERNEL, "scale": np.ones(8, np.float16), "six": np.ones(6, np.float16)}
    constants |= {"bias": np.ones(4, np.float16), "last": np.array([-1])}
    used = [numpy_helper.from_array(array, name) for name, array in constants.items() if name in model.graph.node[0].input]
    model.graph.initializer.extend(used)
    model.graph.node[0].name = "summing"
    model.graph.node[0].metadata_props.add(key="halfserve.module", value="encoder.0")
    if "axis" in model.graph.node[0].input:  # one that is computed: with a constant one, CumSum is no single node
        model.graph.initializer.append(numpy_helper.from_array(np.array(1), "one"))
        model.graph.node.insert(0, onnx.helper.make_node("Identity", ["one"], ["axis"]))
    return with_sum_checks(round_every_node(model), products=products)


def reaches(checks: SumChecks) -> list[float]:
    values = list(answers(checks.model, {"x": SUMMED}).values())
    return [float(value) for value in values[1:]]


@pytest.mark.parametrize(("text", "expected"), SUMS.items())
def test_the_reach_of_a_sum_bounds_every_order_of_adding(text: str, expected: float) -> None:
    checks = checked(text)
    assert reaches(checks) == pytest.approx([expected], rel=2e-3)
    onnx.checker.check_model(checks.model)


@pytest.mark.parametrize(("text", "expected"), PRODUCTS.items())
def test_products_are_checked_on_request(text: str, expected: float) -> None:
    assert checked(text).risks == ()
    assert reaches(checked(text, products=True)) == pytest.approx([expected], rel=2e-3)


@pytest.mark.parametrize("opset", [7, 9, 11])
def test_a_gemm_with_a_mandatory_bias_is_checked(opset: int) -> None:
    text = "g (float16[N, 8] x) => (float16[N, 3] y) { y = Gemm(x, w, b) }"
    model = parse(text, opset=opset, ir=8, w=W, b=np.ones(3, np.float16))
    checks = with_sum_checks(round_every_node(model), products=True)
    values = answers(checks.model, {"x": SUMMED[0]})
    reach = float(list(values.values())[1])
    assert reach == pytest.approx((np.abs(WIDE[0]) @ np.abs(W.astype(float))).max(), rel=2e-3)


def test_a_risk_names_node_module_and_reach() -> None:
    (risk,) = checked("r = ReduceMean<axes=[0, 2]>(x)").over([1.3e6])
    assert str(risk) == ("ReduceMean 'summing' (encoder.0): its sum of magnitudes reaches 1.3e+06 inside, over float16's 65504")
    assert checked("r = ReduceMean<axes=[0, 2]>(x)").over([65504.0]) == []


def test_float32_nodes_are_not_checked() -> None:
    text = "w32 = Cast<to=1>(x)  m = ReduceMean(w32)  r = Cast<to=10>(m)"
    assert checked(text).risks == ()


def test_sums_beyond_float16_are_over_budget_with_float16_accumulators() -> None:
    reference, candidate = both(MEANS)
    x = np.linspace(2000, 3000, 256, dtype=np.float32).reshape(4, 64)
    certificate = verify(reference, candidate, x, adversarial=False, cuda=False)
    assert certificate.passed
    (risk,) = certificate.risks
    assert risk.reach == pytest.approx(x.sum(-1).max(), rel=1e-3)
    with pytest.raises(BudgetExceeded, match=r"ReduceMean 'y': its sum of magnitudes reaches 1.84e\+05 inside"):
        verify(reference, candidate, x, adversarial=False, cuda=False, accumulators="float16")


def test_nodes_whose_sums_have_no_bound_are_named() -> None:
    reference, candidate = both(RECURRENT, last=np.array([-1]))
    inputs = {"x": np.ones((1, 3, 2), np.float32), "f": np.array(True)}
    certificate = verify(reference, candidate, [inputs], adversarial=False, cuda=False, accumulators="float16")
    assert certificate.notes == ("no bound is known for the sums inside RNN 'y', ReduceSum 't', ReduceMean 'e'",)
    assert verify(reference, candidate, [inputs], adversarial=False, cuda=False).notes == ()


def test_without_checks_every_node_is_unchecked() -> None:
    checks, plain = checked("r = ReduceMean(x)"), onnx.ModelProto()
    assert checks.unchecked == ()
    without_checks = checks.without_checks(plain)
    assert (without_checks.model, without_checks.risks, without_checks.unchecked) == (plain, (), ("ReduceMean 'summing'",))


def test_risks_come_largest_first() -> None:
    risks = tuple(Risk(node=name, op_type="ReduceSum", what="sum", reach=0.0) for name in "abc")
    model = onnx.ModelProto()
    assert [risk.node for risk in SumChecks(model=model, risks=risks).over([7e4, 1.0, 9e9])] == ["c", "a"]


@pytest.mark.parametrize(
    ("opset", "text", "weights", "expected"),
    [
        (21, "r = GroupNormalization<num_groups=3>(x, six, six)", {"six": 6}, SQUARES.reshape(2, 3, -1).sum(-1).max()),
        (11, "r = LpNormalization(x)", {}, SQUARES.sum(-1).max()),
    ],
)
def test_sums_of_other_opsets_are_bounded_too(opset: int, text: str, weights: dict[str, int], expected: float) -> None:
    ones: dict[str, Any] = {name: np.ones(size, np.float16) for name, size in weights.items()}
    model = parse(f"g (float16[N,6,8] x) => (float16[A,B,C] r) {{ {text} }}", opset=opset, ir=8, **ones)
    assert reaches(with_sum_checks(round_every_node(model), products=False)) == pytest.approx([expected], rel=2e-3)
