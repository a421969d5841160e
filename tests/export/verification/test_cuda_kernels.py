from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.certificate import BudgetExceeded
from halfserve.export.half_types import HALF_TYPES, HalfName, HalfType, TargetDevice
from halfserve.export.onnx_files.model_file import serialize
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.search.smallest_fp32_set import find_fp32_nodes
from halfserve.export.verification.executions import gpu_is_there
from halfserve.export.verification.samples import Array
from halfserve.export.verification.simulation import has_cuda_steps, round_every_node
from halfserve.export.verification.verify import verify
from halfserve.nvidia_libraries import load_nvidia_libraries
from tests.export.onnx_fp16.models import normal
from tests.export.stored_models import answers, both, open_session, parse

ENTRIES = np.random.default_rng(0).uniform(-30, 900, (3, 200, 2)).astype(np.float16)
LARGE = np.linspace(4e4, 6e4, 32, dtype=np.float32).reshape(4, 8)


def cumsum_model(node: str = "CumSum (x, axis)", axis: int = 1, inputs: str = "", *, ir_version: int = 8) -> onnx.ModelProto:
    text = f"g (float16[N, M, K] x{inputs}) => (float16[N, M, K] y) {{ y = {node} }}"
    weights: dict[str, Any] = {} if inputs else {"axis": np.array(axis)}
    return parse(text, opset=17, ir=ir_version, **weights)


def run_rounded(onnx_model: onnx.ModelProto, x: Array = ENTRIES) -> Array:
    (y,) = answers(round_every_node(onnx_model), {"x": x}).values()
    return y


def one_by_one(x: Array, axis: int, *, exclusive: bool = False, reverse: bool = False) -> Array:
    """numpy's float16, entry after entry."""
    entries = np.moveaxis(x, axis, 0)[:: -1 if reverse else 1]
    total, sums = np.zeros_like(entries[0]), []
    with np.errstate(over="ignore"):
        for entry in entries:
            before, total = total, total + entry
            sums.append(before if exclusive else total)
    return np.moveaxis(np.array(sums)[:: -1 if reverse else 1], 0, axis)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_each_addition_is_rounded(axis: int, exclusive: bool, reverse: bool) -> None:
    node = f"CumSum <exclusive = {int(exclusive)}, reverse = {int(reverse)}> (x, axis)"
    assert np.array_equal(
        run_rounded(cumsum_model(node, axis)), one_by_one(ENTRIES, axis, exclusive=exclusive, reverse=reverse)
    )


def test_ones_add_up_to_2048() -> None:
    assert run_rounded(cumsum_model(), np.ones((1, 4096, 1), np.float16)).max() == 2048


def test_cumsum_of_an_empty_axis_is_empty() -> None:
    assert run_rounded(cumsum_model(), np.zeros((2, 0, 3), np.float16)).shape == (2, 0, 3)


def test_a_cumsum_in_a_body_uses_an_outer_axis() -> None:
    branch = "b = {} () => (float16[N, M, K] {}) {{ {} = CumSum (x, axis) }}"
    node = f"If (f) <then_branch {branch.format('t', 'a', 'a')[1:]}, else_branch {branch.format('e', 'b', 'b')[1:]}>"
    branching = cumsum_model(node)
    branching.graph.initializer.append(numpy_helper.from_array(np.array(True), "f"))
    assert np.array_equal(run_rounded(branching), one_by_one(ENTRIES, 1))


@pytest.mark.parametrize("constant", ["value_int = 1", "value = int32 {1}", "value = int64[1] {1}"])
def test_the_cumsum_axis_may_be_a_constant_node(constant: str) -> None:
    written = cumsum_model()
    del written.graph.initializer[:]
    made = parse(f"g () => (int64 axis) {{ axis = Constant <{constant}> () }}", opset=17, ir=8)
    written.graph.node.insert(0, made.graph.node[0])
    assert np.array_equal(run_rounded(written), one_by_one(ENTRIES, 1))


def test_a_cumsum_over_a_computed_axis_is_not_decomposed() -> None:
    rounded = round_every_node(cumsum_model("CumSum (x, axis)", inputs=", int64 axis"))
    assert [node.op_type for node in rounded.graph.node] == ["Cast", "CumSum", "Cast"]


def test_a_float32_cumsum_is_not_decomposed() -> None:
    wide = cumsum_model("CumSum (x, axis)")
    for value in (*wide.graph.input, *wide.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    assert [node.op_type for node in round_every_node(wide).graph.node] == ["CumSum"]


def pair_model(operator: str, shapes: Sequence[Sequence[int | str]], kind: str = "float16") -> onnx.ModelProto:
    """y = operator(x0, x1, ...), its node called "node"."""
    names = [f"x{index}" for index in range(len(shapes))]
    inputs = ", ".join(f"{kind}[{', '.join(map(str, shape))}] {name}" for name, shape in zip(names, shapes, strict=True))
    return parse(f"g ({inputs}) => ({kind} y) {{ [node] y = {operator} ({', '.join(names)}) }}", opset=17, ir=8)


def run_feeds(rounded: onnx.ModelProto, *arrays: Array) -> Array:
    feeds = {f"x{index}": array for index, array in enumerate(arrays)}
    (y,) = answers(rounded, feeds).values()
    return y


def equations(onnx_model: onnx.ModelProto) -> list[str]:
    nodes = [node for node in onnx_model.graph.node if node.op_type == "Einsum"]
    return [attribute.s.decode() for node in nodes for attribute in node.attribute]


def test_a_sum_of_many_inputs_overflows_in_between() -> None:
    large, small = np.full((2, 3), 6e4, np.float16), np.full(3, 100, np.float16)
    rounded = round_every_node(pair_model("Sum", [[2, 3], [2, 3], [2, 3], [3]]))
    assert np.isposinf(run_feeds(rounded, large, large, -large, small)).all()
    assert (run_feeds(rounded, large, -large, large, small) == np.float16(60100)).all()
    assert [node.name for node in rounded.graph.node if node.op_type == "Add"][-1] == "node"


@pytest.mark.parametrize(
    ("equation", "parts"),
    [
        ("ij,jk,kl->il", ["ij,jk->ik", "ik,kl->il"]),
        ("ij, jk, kl", ["ij,jk->ik", "ik,kl->il"]),
        ("ij,kl->k", ["ij->", "kl->k", ",k->k"]),
        ("ij,ij,ij->i", ["ij,ij->ij", "ij,ij->i"]),
        ("ii,i,i->i", ["ii,i->i", "i,i->i"]),
        ("i,j,k->kji", ["i,j->ij", "ij,k->kji"]),
        ("ij,jk->ik", ["ij,jk->ik"]),
        ("ij->i", ["ij->i"]),
        ("...i,...i,...i->...", ["...i,...i,...i->..."]),
    ],
)
def test_an_einsum_multiplies_pairwise(equation: str, parts: list[str]) -> None:
    ranks = [len(term) for term in equation.partition("->")[0].replace(" ", "").replace("...", "n").split(",")]
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal([3] * rank).astype(np.float16) for rank in ranks]
    rounded = round_every_node(pair_model(f'Einsum <equation = "{equation}">', [[3] * rank for rank in ranks]))
    assert equations(rounded) == parts
    assert np.allclose(run_feeds(rounded, *arrays), np.einsum(equation, *map(np.float32, arrays)), atol=2e-2)


def test_an_einsum_of_three_operands_overflows_in_between() -> None:
    x, small = np.full(3, 600, np.float16), np.full(3, 1e-3, np.float16)
    assert np.isposinf(run_feeds(round_every_node(pair_model('Einsum <equation = "i,i,i->i">', [[3]] * 3)), x, x, small)).all()


def test_a_float32_sum_is_not_decomposed() -> None:
    assert [node.op_type for node in round_every_node(pair_model("Sum", [[2]] * 3, "float")).graph.node] == ["Sum"]


def test_a_sum_that_overflows_in_between_is_over_budget() -> None:
    reference = pair_model("Sum", [["N", 8]] * 3, "float")
    with pytest.raises(BudgetExceeded, match="NaN or infinite"):
        verify(reference, convert_float_to_float16(reference), [LARGE, LARGE, -LARGE], adversarial=False, cuda=False)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model in float32 with fp16 twin, and samples on which the twin overflows inside while its answer would fit."""

    text: str
    inputs: dict[str, Array]
    weights: dict[str, Array]

    def models(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        return both(self.text, **self.weights)


ROWS = normal(8, 64)
EXAMPLES = {
    "scale pair": Example(
        text="g (T[N,64] x) => (T[N,64] y) { a = Mul(x, c)  b = Mul(a, c)  d = Div(b, c)  y = Div(d, c) }",
        inputs={"x": ROWS},
        weights={"c": np.array([300.0])},
    ),
    "a norm's squares": Example(
        text="""g (T[N,64] x) => (T[N,64] y) {
            m = ReduceMean<axes=[-1]>(x)  d = Sub(x, m)  s = Mul(d, d)  v = ReduceMean<axes=[-1]>(s)  r = Sqrt(v)  y = Div(d, r)
        }""",
        inputs={"x": ROWS * 200},
        weights={},
    ),
    "attention logits": Example(
        text="""g (T[N,4,64] q, T[N,4,64] k) => (T[N,4,4] y) {
            t = Transpose<perm=[0,2,1]>(k)  p = MatMul(q, t)  s = Mul(p, c)  y = Softmax(s)
        }""",
        inputs={"q": normal(6, 4, 64, scale=60), "k": normal(6, 4, 64, scale=60)},
        weights={"c": np.array([0.00001])},
    ),
    "residual sum": Example(
        text="g (T[N,64] x) => (T[N,64] y) {"
        + "".join(f" h{i} = Add({'x' if i == 0 else f'h{i - 1}'}, w)" for i in range(12))
        + " m = ReduceMean<axes=[-1]>(h11)  d = Sub(h11, m)  y = Mul(d, c) }",
        inputs={"x": ROWS},
        weights={"w": np.full(64, 6000.0), "c": np.array([0.5])},
    ),
    "sum of squares": Example(
        text="g (T[N,64] x) => (T[N,1] y) { s = ReduceSumSquare<axes=[-1]>(x)  y = Mul(s, c) }",
        inputs={"x": ROWS * 300},
        weights={"c": np.array([1e-6])},
    ),
    "logarithm of a sum": Example(
        text="g (T[N,64] x) => (T[N,1] y) { y = ReduceLogSum<axes=[-1]>(x) }",
        inputs={"x": np.abs(ROWS) * 4000},
        weights={},
    ),
}


def on_cpu(model: onnx.ModelProto, inputs: dict[str, Array]) -> Array:
    session = open_session(serialize(model), "ORT_ENABLE_BASIC")
    wanted = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    feeds = {value.name: inputs[value.name].astype(wanted[value.type]) for value in session.get_inputs()}
    return np.asarray(session.run(None, feeds)[0], np.float32)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=list(EXAMPLES))
def test_the_cpu_hides_the_overflow_and_the_simulation_shows_it(example: Example) -> None:
    float32, float16 = example.models()
    wanted, hidden = on_cpu(float32, example.inputs), on_cpu(float16, example.inputs)
    assert np.abs(hidden - wanted).max() <= 0.02 * np.abs(wanted).max()
    shown = on_cpu(round_every_node(float16), example.inputs)
    assert not np.allclose(shown, wanted, rtol=0.1, atol=0.1 * float(np.abs(wanted).max()))


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_is_there(), reason="needs a CUDA device to compare with")
@pytest.mark.parametrize("example", EXAMPLES.values(), ids=list(EXAMPLES))
def test_the_simulation_and_a_gpu_agree(example: Example) -> None:
    load_nvidia_libraries()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(serialize(example.models()[1]), options, providers=["CUDAExecutionProvider"])
    assert session.get_providers()[0] == "CUDAExecutionProvider"
    (on_gpu,) = session.run(None, {name: array.astype(np.float16) for name, array in example.inputs.items()})
    simulated = on_cpu(round_every_node(example.models()[1]), example.inputs)
    assert np.array_equal(np.isfinite(on_gpu), np.isfinite(simulated))
    finite = np.isfinite(simulated)
    assert np.allclose(on_gpu[finite], simulated[finite], rtol=2.0**-8, atol=2.0**-10)


Rounding = Callable[[Any], Array]  # to the half type and back, in float64


def kernel_sigmoid(x: Array, half: Rounding) -> Array:
    """`a > 0 ? 1 / (1 + exp(-|a|)) : 1 - 1 / (1 + exp(-|a|))` in activations_impl.cu, each operation rounded."""
    share = half(1 / half(1 + half(np.exp(-np.abs(x)))))
    return np.where(x > 0, share, half(1 - share))


def kernel_softplus(x: Array, half: Rounding) -> Array:
    """`a > 0 ? a + log(exp(-a) + 1) : log(exp(a) + 1)`."""
    logarithm = half(np.log(half(half(np.exp(-np.abs(x))) + 1)))
    return np.where(x > 0, half(x + logarithm), logarithm)


def kernel_elu(x: Array, half: Rounding, alpha: float = 1.0) -> Array:
    """`alpha * (exp(a) - 1)` below 0."""
    return half(half(alpha) * half(half(np.exp(np.minimum(x, 0))) - 1))


def kernel_hard_sigmoid(x: Array, half: Rounding, alpha: float) -> Array:
    return np.maximum(np.minimum(half(half(half(alpha) * x) + 0.5), 1), 0)


def kernel_fast_gelu(x: Array, half: Rounding) -> Array:
    """`x * (0.5 + 0.5 * tanh(x * (c * x * x + b)))` in fast_gelu_impl.cu."""
    b, c = half(0.7978845608028654), half(0.035677408136300125)
    inner = half(x * half(half(half(c * x) * x) + b))
    return half(x * half(0.5 + half(0.5 * half(np.tanh(inner)))))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An activation as ONNX nodes, in float64, and as its CUDA kernel rounds it."""

    text: str
    exact: Callable[[Array], Array]
    kernel: Callable[[Array, Rounding], Array]


SELU = (1.67326319217681884765625, 1.05070102214813232421875)
ACTIVATIONS = {
    "Sigmoid": Activation(text="y = Sigmoid(x)", exact=sigmoid, kernel=kernel_sigmoid),
    "SiLU": Activation(
        text="s = Sigmoid(x)  y = Mul(x, s)",
        exact=lambda x: x * sigmoid(x),
        kernel=lambda x, half: half(x * kernel_sigmoid(x, half)),
    ),
    "Softplus": Activation(text="y = Softplus(x)", exact=lambda x: np.logaddexp(x, 0), kernel=kernel_softplus),
    "Mish": Activation(
        text="y = Mish(x)",
        exact=lambda x: x * np.tanh(np.logaddexp(x, 0)),
        kernel=lambda x, half: half(x * half(np.tanh(kernel_softplus(x, half)))),
    ),
    "Elu": Activation(
        text="y = Elu<alpha=0.7>(x)",
        exact=lambda x: 0.7 * np.expm1(np.minimum(x, 0)),
        kernel=lambda x, half: kernel_elu(x, half, 0.7),
    ),
    "Selu": Activation(
        text="y = Selu(x)",
        exact=lambda x: SELU[0] * SELU[1] * np.expm1(np.minimum(x, 0)),
        kernel=lambda x, half: half(half(SELU[1]) * kernel_elu(x, half, SELU[0])),
    ),
    "Softsign": Activation(
        text="y = Softsign(x)", exact=lambda x: x / (1 + np.abs(x)), kernel=lambda x, half: half(x / half(1 + np.abs(x)))
    ),
    "HardSigmoid": Activation(
        text="y = HardSigmoid<alpha=0.15>(x)",
        exact=lambda x: np.clip(0.15 * x + 0.5, 0, 1),
        kernel=lambda x, half: kernel_hard_sigmoid(x, half, 0.15),
    ),
    "HardSwish": Activation(
        text="y = HardSwish(x)",
        exact=lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
        kernel=lambda x, half: half(x * kernel_hard_sigmoid(x, half, 1 / 6)),
    ),
    "tanh Gelu": Activation(
        text='y = Gelu<approximate="tanh">(x)',
        exact=lambda x: x * 0.5 * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
        kernel=kernel_fast_gelu,
    ),
}
# Below 0, where each of them loses most of its digits, and where Elu and Selu compute at all.
BELOW_ZERO = np.linspace(-20, 0, 200001)


@pytest.mark.parametrize("half", HALF_TYPES.values(), ids=list(HALF_TYPES))
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=list(ACTIVATIONS))
def test_activations_round_where_their_cuda_kernels_do(activation: Activation, half: HalfType) -> None:
    def to_half(values: Any) -> Array:
        return half.narrowed(np.asarray(values, np.float32)).astype(np.float64)

    x = np.unique(to_half(BELOW_ZERO))
    model = parse(f"g ({half.name}[N] x) => ({half.name}[N] y) {{ {activation.text} }}", opset=22, ir=10)
    feeds = {"x": x.astype(np.float32 if half.has_float32_range else np.float16)}
    (simulated,) = answers(round_every_node(model, half, cuda=True), feeds).values()
    exact = activation.exact(x)
    shown, made = (np.abs(answer - exact).max() for answer in (simulated, activation.kernel(x, to_half)))
    assert 0.9 <= shown / made <= 1.1


SILU = "g (T[N,8] x) => (T[N,8] y) { s = Sigmoid(x)  y = Mul(x, s) }"
NEGATIVE = np.linspace(-9, -5, 400, dtype=np.float32).reshape(50, 8)


def test_what_cuda_kernels_round_is_judged_for_cuda_alone() -> None:
    with pytest.raises(BudgetExceeded, match=r"output 'y' \(cuda\): max error") as caught:
        verify(*both(SILU), NEGATIVE, adversarial=False, cuda=False)
    outputs = caught.value.certificate.outputs
    assert [verdict.execution for verdict in outputs if verdict.violations] == ["cuda"]
    assert [verdict.execution for verdict in outputs] == ["rounded", "cuda", "runtime"]
    certificate = verify(*both(SILU), NEGATIVE, adversarial=False, target_device="cpu", cuda=False)
    assert (certificate.passed, {verdict.execution for verdict in certificate.outputs}) == (True, {"rounded", "runtime"})


def test_a_model_without_such_kernels_has_no_verdict_of_its_own_for_cuda() -> None:
    certificate = verify(*both("g (T[N,8] x) => (T[N,8] y) { y = Tanh(x) }"), NEGATIVE, adversarial=False, cuda=False)
    assert {verdict.execution for verdict in certificate.outputs} == {"rounded", "runtime"}


@pytest.mark.parametrize(("target_device", "kept"), [("any", ("s",)), ("cpu", ())])
def test_the_search_keeps_what_cuda_kernels_round(target_device: TargetDevice, kept: tuple[str, ...]) -> None:
    found = find_fp32_nodes(both(SILU)[0], NEGATIVE, budget=Budget(), adversarial=False, target_device=target_device)
    assert (found.passed, found.keep_fp32_nodes) == (True, kept)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_silu_converted_for_cuda_is_within_a_tenth_of_its_kernels_error(dtype: HalfName) -> None:
    x = np.unique(HALF_TYPES[dtype].rounded(BELOW_ZERO.astype(np.float32)))
    x = np.concatenate([x, -np.geomspace(21, 6e4, 50, dtype=np.float32)])
    x = HALF_TYPES[dtype].rounded(x).reshape(1, -1)
    text = f"g (float[N,{x.size}] x) => (float[N,{x.size}] y) {{ s = Sigmoid(x)  y = Mul(x, s) }}"
    errors = []
    for target_device in ("any", "cuda"):
        converted = convert_float_to_float16(parse(text, opset=17, ir=8), dtype=dtype, target_device=target_device)
        (answer,) = answers(round_every_node(converted, HALF_TYPES[dtype], cuda=True), {"x": x}).values()
        errors.append(np.abs(answer - x / (1 + np.exp(np.minimum(-x.astype(np.float64), 700)))).max())
    assert errors[1] <= errors[0] / 10


MIXED = """g (float16[N,1,4,4] x, float[M,4] a, float[4,3] b) => (float16[N,1,4,4] z, float[M,3] y) {{
    z = {convolution}  y = MatMul(a, b)
}}"""


def test_float32_products_are_tf32_beside_a_half_precision_convolution() -> None:
    a, b = normal(20, 4, scale=30), normal(4, 3)
    a[0], a[1], a[2] = np.inf, 3e37, 1e-30  # as the rounding may not change them much, however large
    feeds = {"x": np.zeros((1, 1, 4, 4), np.float16), "a": a, "b": np.abs(b)}
    plain, narrow = (answers(model, feeds)["y"] for model in map(rounded_for_cuda, ("Mul(x, w)", "Conv(x, w)")))
    tf32 = a[3:].astype(np.float16).astype(np.float32) @ feeds["b"].astype(np.float16).astype(np.float32)  # has as many bits
    assert np.allclose(plain[3:], a[3:] @ feeds["b"], rtol=1e-6, atol=1e-5)
    assert np.allclose(narrow[3:], tf32, rtol=1e-6, atol=1e-5)
    assert not np.allclose(tf32, plain[3:], rtol=1e-6, atol=1e-5)
    assert np.allclose(narrow[:3], plain[:3], rtol=1e-3, atol=0)


def rounded_for_cuda(convolution: str) -> onnx.ModelProto:
    model = parse(MIXED.format(convolution=convolution), opset=17, ir=8, w=np.ones((1, 1, 1, 1), np.float16))
    rounded = round_every_node(model, cuda=True)
    assert has_cuda_steps(rounded.graph) == (convolution == "Conv(x, w)")
    return rounded


def test_attention_rounds_its_scores() -> None:
    text = "g (float16[1,2,3,4] q, float16[1,2,3,4] k, float16[1,2,3,4] v) => (float16[1,2,3,4] y) { y = Attention (q, k, v) }"
    model, value = parse(text, opset=23, ir=10), normal(1, 2, 3, 4).astype(np.float16)
    once, stepwise = round_every_node(model), round_every_node(model, cuda=True)
    assert (has_cuda_steps(once.graph), has_cuda_steps(stepwise.graph)) == (False, True)

    def scored(size: float) -> list[Array]:
        large = np.full((1, 2, 3, 4), size, np.float16)
        feeds = {"q": large, "k": large, "v": value}
        return [answers(rounded, feeds)["y"].astype(np.float32) for rounded in (once, stepwise)]

    small, large = scored(2.0), scored(400.0)  # scores of 8 and of 320,000
    np.testing.assert_allclose(small[1], small[0], rtol=4e-3, atol=4e-3)
    assert np.isfinite(large[0]).all()
    assert not np.isfinite(large[1]).any()
