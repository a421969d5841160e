"""Samples at the edge on which a float16 model may choose otherwise than float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest

from export.certificate.budget import Budget
from export.certificate.certificate import BudgetExceeded, Certificate
from export.onnx_fp16.convert import convert
from export.search.smallest_fp32_set import find_fp32_nodes
from export.verification.verify import verify
from tests.export.onnx_fp16.models import parse

X = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
TOP = "best, route = TopK <axis = -1> (scores, k)"
EXPERTS = [[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0], [0.0, 1.0, 0.0, 1.0]]


def routed(biases: list[float], choose: str = TOP) -> onnx.ModelProto:
    """x [n, 4] -> x times an expert's row, chosen by scores whose biases decide on zeros."""
    model = parse(
        f"""g (float[n, 4] x) => (float[n, 4] y) {{
            raw = MatMul (x, w) scores = Add (raw, b) {choose}
            rows = Gather (experts, route) row = Squeeze (rows, axes) more = Add (x, row) y = Mul (more, row) }}""",
        w=np.random.default_rng(0).normal(size=(4, 3)),
        b=np.array(biases),
        experts=np.array(EXPERTS),
    )
    for name in ("k", "axes"):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1], np.int64), name))
    return model


def half(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx_ir.to_proto(convert(onnx_ir.from_proto(model)).model)


def verdict(model: onnx.ModelProto, candidate: onnx.ModelProto, **given: Any) -> Certificate:
    try:
        return verify(given.pop("reference", model), candidate, X, **given)
    except BudgetExceeded as error:
        return error.certificate


@pytest.mark.parametrize(
    ("choose", "node"),
    [
        (TOP, "TopK"),
        ("best, route = TopK <axis = -1, sorted = 0> (scores, k)", "TopK"),
        ("route = ArgMax <axis = 1> (scores)", "ArgMax"),
        ("less = Neg (scores) route = ArgMin <axis = -1> (less)", "ArgMin"),
        ("best, flat = TopK <axis = -1> (scores, k) route = Max (flat)", "TopK"),
    ],
)
def test_a_choice_between_values_that_tie_is_no_failure(choose: str, node: str) -> None:
    model = routed([0.5, 0.50001, 0.1], choose)
    certificate = verdict(model, half(model))
    assert certificate.passed, certificate.violations
    (rounded, _) = (note for note in certificate.notes if "near-tie" in note)
    assert rounded.startswith("output 'y' on zeros (rounded): at [0, 0] " + node)
    assert "takes index 0 (" in rounded
    assert "0.5) and float32 index 1 (" in rounded
    assert find_fp32_nodes(model, X, budget=Budget()).runs == 1  # the search takes it as the verdict does


def test_rows_that_a_detector_chooses_in_another_order_are_no_failure() -> None:
    model = parse(
        """g (float[n, 4] x) => (float[n, 3] best, float[n, 3] edges, int64[n, 3] places) {
            raw = MatMul (x, w) scores = Add (raw, b) more = MatMul (x, v) sides = Add (more, c)
            best, places = TopK <axis = -1> (scores, k) edges = GatherElements <axis = 1> (sides, places) }""",
        w=np.random.default_rng(0).normal(size=(4, 6)),
        b=np.array([0.3, 0.7, 0.70001, 0.1, 0.3, 0.30001]),
        v=np.random.default_rng(2).normal(size=(4, 6)),
        c=np.array([5.0, -4.0, 3.0, 2.0, -1.0, 6.0]),
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3], np.int64), "k"))
    certificate = verdict(model, half(model))
    assert certificate.passed, certificate.violations
    assert any(note.startswith("output 'edges' on zeros (rounded): at [0, ") for note in certificate.notes)


def test_a_choice_between_values_that_do_not_tie_is_told_and_refused() -> None:
    certificate = verdict(routed([0.5, 0.6, 0.1]), half(routed([0.7, 0.6, 0.1])))
    (told, *_) = (text for text in certificate.violations if text.startswith("output 'y' on zeros (rounded): max error "))
    assert "; at [0, 0] TopK 'best' takes index 0 (0.5) and float32 index 1 (0.6" in told
    assert "near-tie" not in told


def test_what_differs_by_more_than_a_tie_is_refused() -> None:
    model = routed([0.5, 0.50001, 0.1])
    wrong = half(model)
    experts = next(tensor for tensor in wrong.graph.initializer if tensor.name == "experts")
    experts.CopyFrom(onnx.numpy_helper.from_array(np.array(EXPERTS, np.float16)[[2, 1, 2]], "experts"))
    certificate = verdict(model, wrong)
    assert not certificate.passed
    assert any("a near-tie, and differs by more than that choice: max error" in text for text in certificate.violations)


def test_a_torch_reference_needs_the_float32_file_to_see_ties() -> None:
    import torch  # noqa: PLC0415  (slow to import, and needed only here)

    class Routed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32))
            row = torch.tensor(EXPERTS)[(x @ w + torch.tensor([0.5, 0.50001, 0.1])).argmax(-1)]
            return (x + row) * row

    model = routed([0.5, 0.50001, 0.1])
    assert verdict(model, half(model), reference=Routed().eval(), source=model).passed
    with pytest.raises(BudgetExceeded, match=r"^output 'y' on zeros .*leave those samples out \(--no-adversarial\)$"):
        verify(Routed().eval(), half(model), X)
