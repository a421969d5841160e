from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from export.onnx_fp16.repair.fold_scale import FoldScale
from tests.export.onnx_fp16.models import parse
from tests.export.onnx_fp16.repair.same import compare, operators, repaired, same, untouched


@settings(max_examples=30)
@given(st.integers(-40, 20), st.lists(st.integers(-20, 30), min_size=1, max_size=3), st.integers(0, 9))
def test_powers_of_two_move_without_a_trace(weight: int, factors: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    steps = " ".join(f"h{i + 1} = Mul (h{i}, f{i})" for i in range(len(factors)))
    numbers: dict[str, Any] = {f"f{i}": np.array(2.0**factor) for i, factor in enumerate(factors)}
    model = parse(
        f"g (float[3, 8] x) => (float[3, 8] y) {{ h0 = MatMul (x, w) {steps} y = Identity (h{len(factors)}) }}",
        w=random.standard_normal((8, 8)) * 2.0**weight,
        **numbers,
    )
    after, _ = repaired(model, FoldScale())
    compare(model, after, {"x": random.standard_normal((3, 8)).astype(np.float32)}, 1e-6)


def test_vanishing_weights_become_ordinary() -> None:
    random = np.random.default_rng(0)
    model = parse(
        "g (float[1, 3, 6, 6] x) => (float[1, 4, 4, 4] y) { c = Conv (x, w, b) d = Mul (c, up) y = Div (d, down) }",
        w=random.standard_normal((4, 3, 3, 3)) * 1e-9,
        b=random.standard_normal(4) * 1e-9,
        up=np.array(2e5),
        down=np.array(1e-3),
    )
    after = same(model, FoldScale(), {"x": random.standard_normal((1, 3, 6, 6)).astype(np.float32)})
    assert operators(after) == ["Conv"]
    assert all(1e-2 < np.abs(numpy_helper.to_array(tensor)).max() < 10 for tensor in after.graph.initializer)


SETTINGS = [
    ("Conv <strides = [2, 2], pads = [1, 1, 1, 1], dilations = [2, 2]>", (1, 4, 6, 6), (4, 4, 3, 3)),
    ("Conv <group = 2>", (1, 4, 6, 6), (4, 2, 3, 3)),
    ("ConvTranspose <strides = [2, 2], output_padding = [1, 1]>", (1, 4, 6, 6), (4, 4, 3, 3)),
    ("Gemm <alpha = 2.0, beta = 0.5, transA = 1>", (3, 5), (3, 4)),
    ("Gemm <transB = 1>", (5, 3), (4, 3)),
]


@pytest.mark.parametrize(("linear", "x", "w"), SETTINGS)
def test_the_operator_keeps_its_settings(linear: str, x: tuple[int, ...], w: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    sizes, result = ", ".join(map(str, x)), ", ".join("ABCD"[: len(x)])
    model = parse(
        f"g (float[{sizes}] x) => (float[{result}] y) {{ h = {linear} (x, w, b) y = Mul (h, up) }}",
        w=random.standard_normal(w) * 1e-9, b=random.standard_normal(4) * 1e-9, up=np.array(2.0**28),
    )  # fmt: skip
    after = same(model, FoldScale(), {"x": random.standard_normal(x).astype(np.float32)})
    assert operators(after) == [linear.partition(" ")[0]]


@pytest.mark.parametrize("name", ["h", "y"])
def test_what_a_user_wants_in_float32_stays_as_it_is(name: str) -> None:
    model = parse(
        "g (float[3, 8] x) => (float[3, 8] y) { h = MatMul (x, w) y = Mul (h, up) }", w=np.eye(8) * 1e-9, up=np.array(2e8)
    )
    node = next(node for node in model.graph.node if name in node.output)
    node.metadata_props.add(key="halfserve.keep", value="asked for")
    untouched(model, FoldScale())


@pytest.mark.parametrize(
    ("text", "w"),
    [
        ("h = MatMul (x, w) y = Mul (h, half)", 1.0),  # float16 holds both
        ("h = MatMul (x, w) y = Div (half, h)", 1e-9),  # divides by the product
        ("h = MatMul (x, w) m = Mul (h, large) y = Add (h, m)", 1e-9),  # others read the product
        ("h = MatMul (x, w) m = Mul (h, vector) y = Identity (m)", 1e-9),
    ],
)
def test_what_gains_nothing_stays(text: str, w: float) -> None:
    model = parse(
        f"g (float[3, 8] x) => (float[3, 8] y) {{ {text} }}",
        w=np.ones((8, 8)) * w, half=np.array(0.5), large=np.array(2e5), vector=np.full(8, 2e5),
    )  # fmt: skip
    untouched(model, FoldScale())
