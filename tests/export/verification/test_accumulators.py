from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from export.certificate.certificate import BudgetExceeded
from export.certificate.risk import Risk
from export.files.model_file import serialize
from export.verification.accumulators import Checks, with_checks
from export.verification.metrics import Array
from export.verification.simulate import round_every_node
from export.verification.verify import verify
from tests.export.sessions import open_session, run_session

X = np.random.default_rng(1).uniform(-100, 100, (2, 6, 8)).astype(np.float16)
WIDE = X.astype(np.float64)
W = np.random.default_rng(2).uniform(-100, 100, (8, 3)).astype(np.float16)
KERNEL = np.random.default_rng(3).uniform(-100, 100, (4, 6, 3)).astype(np.float16)
SQUARES = WIDE**2

# Each node, what is summed in it, and how large that can get on X.
CASES = {
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


def checked(text: str, *, products: bool = False) -> Checks:
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g (float16[N,6,8] x) => (r) {{ {text} }}'.replace(
            "(r)", "(float16[] r)"
        )
    )
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    constants: dict[str, Array] = {"w": W, "kernel": KERNEL, "scale": np.ones(8, np.float16), "six": np.ones(6, np.float16)}
    constants |= {"bias": np.ones(4, np.float16), "last": np.array([-1])}
    used = [numpy_helper.from_array(array, name) for name, array in constants.items() if name in model.graph.node[0].input]
    model.graph.initializer.extend(used)
    model.graph.node[0].name = "summing"
    model.graph.node[0].metadata_props.add(key="halfserve.module", value="encoder.0")
    if "axis" in model.graph.node[0].input:  # one that is computed: with a constant one, CumSum is no single node
        model.graph.initializer.append(numpy_helper.from_array(np.array(1), "one"))
        model.graph.node.insert(0, onnx.helper.make_node("Identity", ["one"], ["axis"]))
    return with_checks(round_every_node(model), products=products)


def reaches(checks: Checks) -> list[float]:
    values = list(run_session(open_session(serialize(checks.model), "ORT_ENABLE_BASIC"), {"x": X}).values())
    return [float(value) for value in values[1:]]


@pytest.mark.parametrize(("text", "expected"), CASES.items())
def test_the_reach_of_a_sum_bounds_every_order_of_adding(text: str, expected: float) -> None:
    checks = checked(text)
    assert reaches(checks) == pytest.approx([expected], rel=2e-3)
    onnx.checker.check_model(checks.model)


@pytest.mark.parametrize(("text", "expected"), PRODUCTS.items())
def test_products_are_looked_into_on_request(text: str, expected: float) -> None:
    assert checked(text).risks == ()
    assert reaches(checked(text, products=True)) == pytest.approx([expected], rel=2e-3)


@pytest.mark.parametrize("opset", [7, 9, 11])
def test_a_gemm_that_must_add_something_is_looked_into_too(opset: int) -> None:
    text = f'<ir_version: 8, opset_import: ["": {opset}]> g (float16[N, 8] x) => (float16[N, 3] y) {{ y = Gemm(x, w, b) }}'
    model = parser.parse_model(text)
    model.graph.initializer.extend([numpy_helper.from_array(W, "w"), numpy_helper.from_array(np.ones(3, np.float16), "b")])
    checks = with_checks(round_every_node(model), products=True)
    values = run_session(open_session(serialize(checks.model), "ORT_ENABLE_BASIC"), {"x": X[0]})
    reach = float(list(values.values())[1])
    assert reach == pytest.approx((np.abs(WIDE[0]) @ np.abs(W.astype(float))).max(), rel=2e-3)


def test_a_risk_names_node_module_and_reach() -> None:
    (risk,) = checked("r = ReduceMean<axes=[0, 2]>(x)").over([1.3e6])
    assert str(risk) == ("ReduceMean 'summing' (encoder.0): its sum of magnitudes reaches 1.3e+06 inside, over float16's 65504")
    assert checked("r = ReduceMean<axes=[0, 2]>(x)").over([65504.0]) == []


def test_float32_nodes_are_not_asked() -> None:
    text = "w32 = Cast<to=1>(x)  m = ReduceMean(w32)  r = Cast<to=10>(m)"
    assert checked(text).risks == ()


MEANS = '<ir_version: 8, opset_import: ["": 17]> g (T[N,64] x) => (T[N] y) { y = ReduceMean<axes=[-1], keepdims=0>(x) }'


def test_sums_that_outgrow_float16_are_told_and_over_budget_where_the_runtime_sums_in_it() -> None:
    reference, candidate = (parser.parse_model(MEANS.replace("T[", f"{kind}[")) for kind in ("float", "float16"))
    x = np.linspace(2000, 3000, 256, dtype=np.float32).reshape(4, 64)
    certificate = verify(reference, candidate, x, adversarial=False, cuda=False)
    assert certificate.passed
    (risk,) = certificate.risks
    assert risk.reach == pytest.approx(x.sum(-1).max(), rel=1e-3)
    with pytest.raises(BudgetExceeded, match=r"ReduceMean 'y': its sum of magnitudes reaches 1.84e\+05 inside"):
        verify(reference, candidate, x, adversarial=False, cuda=False, accumulators="float16")


RECURRENT = """<ir_version: 8, opset_import: ["": 17]> g (T[1, N, 2] x, bool f) => (T[1, 1, N, 1] y, T[1, N, 1] z) {
    w = Constant <value = float[1, 1, 2] {0.1, 0.2}> ()  r = Constant <value = float[1, 1, 1] {0.1}> ()
    wt = Cast <to = NUMBER> (w)  rt = Cast <to = NUMBER> (r)
    y = RNN <hidden_size = 1> (x, wt, rt)
    z = If (f) <
        then_branch = a () => (T[1, N, 1] t) { t = ReduceSum <keepdims = 1> (x, last) },
        else_branch = b () => (T[1, N, 1] e) { e = ReduceMean <axes = [-1]> (x) }
    >
}"""


def test_nodes_whose_sums_have_no_bound_are_named() -> None:
    reference, candidate = (
        parser.parse_model(RECURRENT.replace("T[", f"{kind}[").replace("NUMBER", str(number)))
        for kind, number in (("float", 1), ("float16", 10))
    )
    for model in (reference, candidate):
        model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last"))
    inputs = {"x": np.ones((1, 3, 2), np.float32), "f": np.array(True)}
    certificate = verify(reference, candidate, [inputs], adversarial=False, cuda=False, accumulators="float16")
    assert certificate.notes == ("no bound is known for the sums inside RNN 'y', ReduceSum 't', ReduceMean 'e'",)
    assert verify(reference, candidate, [inputs], adversarial=False, cuda=False).notes == ()


def test_where_a_check_fails_no_node_is_said_to_be_asked() -> None:
    checks, plain = checked("r = ReduceMean(x)"), onnx.ModelProto()
    assert checks.unasked == ()
    given_up = checks.given_up(plain)
    assert (given_up.model, given_up.risks, given_up.unasked) == (plain, (), ("ReduceMean 'summing'",))


def test_risks_come_largest_first() -> None:
    risks = tuple(Risk(node=name, op_type="ReduceSum", what="sum", reach=0.0) for name in "abc")
    model = onnx.ModelProto()
    assert [risk.node for risk in Checks(model=model, risks=risks).over([7e4, 1.0, 9e9])] == ["c", "a"]


@pytest.mark.parametrize(
    ("opset", "text", "weights", "expected"),
    [
        (21, "r = GroupNormalization<num_groups=3>(x, six, six)", {"six": 6}, SQUARES.reshape(2, 3, -1).sum(-1).max()),
        (11, "r = LpNormalization(x)", {}, SQUARES.sum(-1).max()),
    ],
)
def test_sums_of_other_opsets_are_bounded_too(opset: int, text: str, weights: dict[str, int], expected: float) -> None:
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g (float16[N,6,8] x) => (float16[A,B,C] r) {{ {text} }}'
    )
    model.graph.initializer.extend(numpy_helper.from_array(np.ones(size, np.float16), name) for name, size in weights.items())
    assert reaches(with_checks(round_every_node(model), products=False)) == pytest.approx([expected], rel=2e-3)
