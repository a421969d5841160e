from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.onnx_fp16.prepare import prepare, repair_model
from halfserve.export.onnx_fp16.repair import REPAIRS, run_passes
from halfserve.export.verification.simulation import round_every_node
from tests.export.onnx_fp16.models import halve
from tests.export.onnx_fp16.repair.same import answers, compare
from tests.export.stored_models import parse

# All repairs, one after the other, over graphs put together at random from what each of them looks for.

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]
Piece = Callable[[str, str, str, np.random.Generator], tuple[str, Weights]]
SIZE = 8
SHARED: Weights = {
    "last": np.array([-1], np.int64),
    "one": np.array(1.0),
    "two": np.array(2.0),
    "three": np.array(3.0),
    "half": np.array(0.5),
    "cubic": np.array(0.044715),
    "root": np.array(0.7978846),
}


def _layer_norm(x: str, y: str, p: str, random: np.random.Generator) -> tuple[str, Weights]:
    square = (f"Mul ({p}d, {p}d)", f"Pow ({p}d, two)")[random.integers(2)]
    text = f"""{p}m = ReduceMean (x_, last) {p}d = Sub (x_, {p}m) {p}q = {square} {p}v = ReduceMean ({p}q, last)
    {p}e = Add ({p}v, {p}eps) {p}s = Sqrt ({p}e) {p}n = Div ({p}d, {p}s) {p}g = Mul ({p}n, {p}gain) y_ = Add ({p}g, {p}bias)"""
    weights = {"eps": np.array(10.0 ** -random.integers(3, 13)), "gain": random.uniform(0.5, 2, SIZE), "bias": np.ones(SIZE)}
    return _named(text, x, y), {p + name: array for name, array in weights.items()}


def _root_mean_square(x: str, y: str, p: str, random: np.random.Generator) -> tuple[str, Weights]:
    text = f"""{p}q = Pow (x_, two) {p}v = ReduceMean ({p}q, last) {p}e = Add ({p}v, {p}eps) {p}s = Sqrt ({p}e)
    {p}r = Reciprocal ({p}s) y_ = Mul (x_, {p}r)"""
    return _named(text, x, y), {f"{p}eps": np.array(10.0 ** -random.integers(3, 9))}


def _softmax(x: str, y: str, p: str, random: np.random.Generator) -> tuple[str, Weights]:
    text = f"""{p}m = ReduceMax (x_, last) {p}d = Sub (x_, {p}m) {p}e = Exp ({p}d) {p}t = ReduceSum ({p}e, last)
    y_ = Div ({p}e, {p}t)"""
    return _named(text, x, y), {}


def _masked_softmax(x: str, y: str, p: str, random: np.random.Generator) -> tuple[str, Weights]:
    text = f"{p}h = Sub (one, mask) {p}p = Mul ({p}h, {p}low) {p}s = Add (x_, {p}p) y_ = Softmax <axis = -1> ({p}s)"
    return _named(text, x, y), {f"{p}low": np.array((-1e5, -1e9, -1e12, float(np.finfo(np.float32).min))[random.integers(4)])}


def _gelu(x: str, y: str, p: str, random: np.random.Generator) -> tuple[str, Weights]:
    text = f"""{p}c = Pow (x_, three) {p}k = Mul ({p}c, cubic) {p}s = Add (x_, {p}k) {p}t = Mul ({p}s, root)
    {p}h = Tanh ({p}t) {p}o = Add ({p}h, one) {p}q = Mul (x_, {p}o) y_ = Mul ({p}q, half)"""
    return _named(text, x, y), {}


def _scaled(x: str, y: str, p: str, random: np.random.Generator) -> tuple[str, Weights]:
    weight = random.standard_normal((SIZE, SIZE)) * 2.0**-40
    return _named(f"{p}h = MatMul (x_, {p}w) y_ = Mul ({p}h, {p}up)", x, y), {f"{p}w": weight, f"{p}up": np.array(2.0**38)}


def _batch_norm(x: str, y: str, p: str, random: np.random.Generator) -> tuple[str, Weights]:
    text = f"{p}h = Gemm (x_, {p}w, {p}c) y_ = BatchNormalization ({p}h, {p}scale, {p}bias, {p}mean, {p}var)"
    weights = {
        "w": random.standard_normal((SIZE, SIZE)),
        "c": random.standard_normal(SIZE),
        "scale": random.uniform(0.5, 2, SIZE),
        "bias": random.standard_normal(SIZE),
        "mean": random.standard_normal(SIZE),
        "var": random.uniform(0.1, 10.0 ** random.integers(0, 9), SIZE),
    }
    return _named(text, x, y), {p + name: array for name, array in weights.items()}


def _logarithm(x: str, y: str, p: str, random: np.random.Generator) -> tuple[str, Weights]:
    text = f"{p}a = Abs (x_) {p}e = Add ({p}a, {p}eps) y_ = Log ({p}e)"
    return _named(text, x, y), {f"{p}eps": np.array(10.0 ** -random.integers(3, 21))}


def _named(text: str, x: str, y: str) -> str:
    return text.replace("x_", x).replace("y_", y)


PIECES: tuple[Piece, ...] = (
    _layer_norm,
    _root_mean_square,
    _softmax,
    _masked_softmax,
    _gelu,
    _scaled,
    _batch_norm,
    _logarithm,
)


def put_together(pieces: list[Piece], given_out: set[int], seed: int, opset: int = 20) -> onnx.ModelProto:
    """One piece behind the other; what the pieces in `given_out` give is an output of the graph as well."""
    random, text, outputs = np.random.default_rng(seed), [], ["y"]
    weights: dict[str, Any] = {}
    for index, piece in enumerate(pieces):
        made, more = piece("x" if index == 0 else f"v{index - 1}", f"v{index}", f"p{index}_", random)
        text.append(made)
        weights.update(more)
        if index in given_out:
            outputs.append(f"v{index}")
    text.append(f"y = Identity (v{len(pieces) - 1})")
    body = " ".join(text)
    weights.update({name: array for name, array in SHARED.items() if f" {name})" in body or f"({name}," in body})
    mask = f", float[3, {SIZE}] mask" if "mask" in body else ""
    given = ", ".join(f"float[3, {SIZE}] {name}" for name in outputs)
    return parse(f"g (float[3, {SIZE}] x{mask}) => ({given}) {{ {body} }}", opset=opset, **weights)


def feeds_of(model: onnx.ModelProto, seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    mask = np.array([[1] * SIZE, [1, 0] * (SIZE // 2), [0] * SIZE], np.float32)  # the last row is hidden from end to end
    feeds = {"x": random.standard_normal((3, SIZE)).astype(np.float32), "mask": mask}
    return {value.name: feeds[value.name] for value in model.graph.input}


def unread(model: onnx.ModelProto) -> set[str]:
    """Initializers that no node reads."""
    read = {name for node in model.graph.node for name in node.input} | {output.name for output in model.graph.output}
    return {tensor.name for tensor in model.graph.initializer} - read


@settings(max_examples=60)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4), st.sets(st.integers(0, 3)), st.integers(0, 99))
def test_together_they_change_no_answer(pieces: list[Piece], given_out: set[int], seed: int) -> None:
    model = put_together(pieces, given_out, seed)
    work = onnx_ir.from_proto(onnx.ModelProto.FromString(model.SerializeToString()))
    repair_model(work)
    assert run_passes(work, REPAIRS) == (), "there is nothing left to repair"
    after = onnx_ir.to_proto(work)
    onnx.checker.check_model(after, full_check=True)
    compare(model, after, feeds_of(model, seed), 2e-4)  # a norm behind a norm sees differences of the last bit
    assert [value.name for value in after.graph.input] == [value.name for value in model.graph.input]
    assert [value.name for value in after.graph.output] == [value.name for value in model.graph.output]
    assert not unread(after)


@settings(max_examples=20)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4), st.integers(0, 99))
def test_they_do_the_same_each_time(pieces: list[Piece], seed: int) -> None:
    model = put_together(pieces, set(), seed)
    first, second = (onnx_ir.from_proto(onnx.ModelProto.FromString(model.SerializeToString())) for _ in range(2))
    assert repair_model(first) == repair_model(second)
    assert onnx_ir.to_proto(first).SerializeToString(deterministic=True) == onnx_ir.to_proto(second).SerializeToString(
        deterministic=True
    )


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.__name__.strip("_"))
def test_what_another_graph_reads_is_not_taken_apart(piece: Piece) -> None:
    """Each value between the nodes is an output too, in turn: it must come out as it was, under its name."""
    model = put_together([piece], set(), 0)
    for node in list(model.graph.node)[:-2]:
        shown = onnx.ModelProto.FromString(model.SerializeToString())
        shown.graph.output.add().name = node.output[0]
        shown = onnx.shape_inference.infer_shapes(shown)
        work = onnx_ir.from_proto(onnx.ModelProto.FromString(shown.SerializeToString()))
        repair_model(work)
        compare(shown, onnx_ir.to_proto(work), feeds_of(model, 0))


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.__name__.strip("_"))
def test_what_comes_from_where_is_still_known(piece: Piece) -> None:
    """New nodes carry the module and the line of those that they stand for."""
    model = put_together([piece], set(), 0)
    for node in model.graph.node:
        node.metadata_props.add(key="halfserve.module", value="encoder.0")
    work = onnx_ir.from_proto(model)
    repair_model(work)
    assert {node.metadata_props.get("halfserve.module") for node in work.graph if node.op_type != "Constant"} == {"encoder.0"}


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.__name__.strip("_"))
def test_in_the_branch_of_an_if_they_change_no_answer_either(piece: Piece) -> None:
    model = put_together([piece], set(), 1)
    outer = onnx.ModelProto.FromString(model.SerializeToString())
    branch = onnx.GraphProto.FromString(model.graph.SerializeToString())
    for field in ("input", "initializer", "output"):
        branch.ClearField(field)
    branch.output.append(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3, SIZE]))
    branch.name = "then"
    other = onnx.helper.make_graph(
        [onnx.helper.make_node("Neg", ["x"], ["negative"], name="negative")],
        "else",
        [],
        [onnx.helper.make_tensor_value_info("negative", onnx.TensorProto.FLOAT, [3, SIZE])],
    )
    outer.graph.ClearField("node")
    outer.graph.input.append(onnx.helper.make_tensor_value_info("chosen", onnx.TensorProto.BOOL, []))
    outer.graph.node.append(
        onnx.helper.make_node("If", ["chosen"], ["result"], name="if", then_branch=branch, else_branch=other)
    )
    outer.graph.ClearField("output")
    outer.graph.output.append(onnx.helper.make_tensor_value_info("result", onnx.TensorProto.FLOAT, [3, SIZE]))
    work = onnx_ir.from_proto(onnx.ModelProto.FromString(outer.SerializeToString()))
    repair_model(work)
    after = onnx_ir.to_proto(work)
    onnx.checker.check_model(after, full_check=True)
    for chosen in (True, False):
        compare(outer, after, {**feeds_of(model, 1), "chosen": np.array(chosen)})


def test_the_passes_find_what_each_piece_is_there_for() -> None:
    """The graphs above are no use if nothing in them is repaired."""
    for piece in PIECES:
        work = onnx_ir.from_proto(put_together([piece], set(), 0))
        prepare(work, ConversionSettings())
        assert run_passes(work, REPAIRS), piece.__name__
    model = put_together(list(PIECES), set(), 0)
    assert all(np.isfinite(answer).all() for answer in answers(model, feeds_of(model, 0)))


# Patterns that float16 breaks, rounded after every node: wrong without repairs, right with them.

RANDOM = np.random.default_rng(0)
NUMBERS = RANDOM.standard_normal((3, 8)).astype(np.float32)
FREQUENCIES = 10000.0 ** -(np.arange(8) / 8)
ZEROS = np.zeros((3, 8), np.float32)
EPSILON = {"eps": np.array(1e-8)}
POWER = "q = Pow (x, two) v = ReduceMean (q, last) e = Add (v, eps) r = Pow (e, power) n = Mul (x, r)"
POWERS = {"two": np.array(2.0), "last": np.array([-1]), "power": np.array(-0.5)}


def survives(model: onnx.ModelProto, x: Array, *, repair: bool) -> bool:
    """Whether the model, converted, gives what it gave before within 1 % of the largest number."""
    (wanted,) = answers(model, {"x": x})
    (found,) = answers(round_every_node(halve(model, repair=repair)[0]), {"x": x})
    return bool(np.allclose(found, wanted, rtol=0, atol=1e-2 * float(np.abs(wanted).max())))


@pytest.mark.parametrize(
    "path",
    [
        "k = Identity (eps)",
        "k = Unsqueeze (eps, place)",
        "k = CastLike (eps, x)",
        "k = Expand (eps, size)",
        "k = Reshape (eps, size)",
        "k = Mul (eps, one)",
        "k = ConstantOfShape <value = float[1] {1e-8}> (size)",
        "d = Cast <to = 11> (eps) k = Cast <to = 1> (d)",
    ],
)
def test_an_epsilon_is_seen_through_what_hands_it_on(path: str) -> None:
    known = {**EPSILON, "place": np.array([0]), "size": np.array([1]), "one": np.array(1.0)}
    used: dict[str, Any] = {name: array for name, array in known.items() if name in path}
    model = parse(f"g (float[3, 8] x) => (float[3, 8] y) {{ {path} e = Add (x, k) y = Log (e) }}", **used)
    assert not survives(model, ZEROS, repair=False)
    assert survives(model, ZEROS, repair=True)


BROKEN: dict[str, tuple[str, dict[str, Array], Array]] = {
    "a chosen epsilon": (
        "z = Equal (x, zero) e = Where (z, eps, x) y = Log (e)",
        {**EPSILON, "zero": np.array(0.0)},
        np.abs(NUMBERS) * (NUMBERS > 0),
    ),
    "softplus": ("e = Exp (x) o = Add (e, one) y = Log (o)", {"one": np.array(1.0)}, NUMBERS * 20),
    "a tanh of exponentials": (
        "p = Exp (x) m = Neg (x) q = Exp (m) a = Sub (p, q) b = Add (p, q) y = Div (a, b)", {}, NUMBERS * 20,
    ),
    "a logarithm of a softmax": (
        "e = Exp (x) t = ReduceSum (e, last) l = Log (t) y = Sub (x, l)", {"last": np.array([-1])}, NUMBERS * 10,
    ),
    "the power -0.5, with an epsilon that float16 holds": (
        f"{POWER} y = Relu (n)", {**POWERS, "eps": np.array(1e-3)}, NUMBERS * 900,
    ),
    "the power -0.5 in a long residual network": (
        f"{POWER} a0 = Add (n, n) " + " ".join(f"a{i + 1} = Add (a{i}, n)" for i in range(60)) + " y = Relu (a60)",
        {**POWERS, "eps": np.array(1e-6)},
        NUMBERS * 900,
    ),
    "a time step's sine": ("a = Mul (x, rates) y = Sin (a)", {"rates": FREQUENCIES}, np.full((3, 8), 999.3, np.float32)),
    "a factor for each channel": (
        "h = MatMul (x, w) y = Mul (h, s)",
        {"w": RANDOM.standard_normal((8, 8)) * 3e4, "s": RANDOM.uniform(1e-7, 3e-7, 8)},
        NUMBERS * 30,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_alone_is_right_when_repaired(name: str) -> None:
    text, weights, x = BROKEN[name]
    given: dict[str, Any] = dict(weights)
    model = parse(f"g (float[3, 8] x) => (float[3, 8] y) {{ {text} }}", **given)
    assert not survives(model, x.astype(np.float32), repair=False)
    assert survives(model, x.astype(np.float32), repair=True)


def test_a_gelu_that_was_limited_is_float16() -> None:
    model = parse(
        """g (float[3, 8] x) => (float[3, 8] y) { c = Pow (x, three) k = Mul (c, cubic) s = Add (x, k) t = Mul (s, root)
        h = Tanh (t) o = Add (h, one) y = Mul (x, o) }""",
        three=np.array(3.0), cubic=np.array(0.044715), root=np.array(0.79788), one=np.array(1.0),
    )  # fmt: skip
    assert survives(model, NUMBERS * 60, repair=True)
    assert not halve(model, repair=True)[1].kept


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1)])
@pytest.mark.parametrize("operator", ["Mul", "Div"])
def test_a_norm_that_was_taken_apart_goes_into_its_convolution(shape: tuple[int, ...], operator: str) -> None:
    random = np.random.default_rng(1)
    scale = random.uniform(1e-7, 3e-7, shape)
    model = parse(
        f"g (float[2, 4, 6, 6] x) => (float[2, 4, 6, 6] y) {{ c = Conv (x, w) m = {operator} (c, s) y = Add (m, b) }}",
        w=random.standard_normal((4, 4, 1, 1)) * 3e4, s=scale if operator == "Mul" else 1 / scale, b=np.full((4, 1, 1), 1e-2),
    )  # fmt: skip
    x = random.standard_normal((2, 4, 6, 6)).astype(np.float32) * 30
    assert operator == "Div" or not survives(model, x, repair=False)  # a divisor over the range is kept in float32
    assert survives(model, x, repair=True)
    assert not halve(model, repair=True)[1].kept


def test_a_factor_that_adds_an_axis_stays() -> None:
    model = parse(
        "g (float[3, 8] x) => (float[1, 3, 8] y) { h = MatMul (x, w) y = Mul (h, s) }",
        w=np.ones((8, 8)) * 1e-9, s=np.full((1, 1, 1), 1e9),
    )  # fmt: skip
    half, report = halve(model, repair=True)
    onnx.checker.check_model(half, full_check=True)
    assert "fold-scale" not in [repair.pass_name for repair in report.repairs]
