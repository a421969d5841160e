from __future__ import annotations

import numpy as np
import onnx
import pytest

from export.certificate.budget import Budget
from export.certificate.certificate import BudgetExceeded
from export.search.smallest_fp32_set import find_fp32_nodes
from export.verification.metrics import Array
from export.verification.verify import verify


def quantized(shift: float = 0.0) -> onnx.ModelProto:
    """y = 3 quantized(x + shift) - 2 (x + shift): half way between two steps, the last bit decides over 3 in 255."""
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[N, 8] x) => (float[N, 8] y) {{
        f = Constant <value_float = {shift!r}> () three = Constant <value_float = 3.0> () two = Constant <value_float = 2.0> ()
        s = Add (x, f) q, scale, zero = DynamicQuantizeLinear (s) d = DequantizeLinear (q, scale, zero)
        a = Mul (d, three) b = Mul (s, two) y = Sub (a, b) }}"""
    return onnx.parser.parse_model(text)


@pytest.fixture
def between_steps() -> Array:
    """[32, 8] of 0 and 255, which make each step 1, and numbers half way between steps."""
    numbers = np.random.default_rng(0).permutation(np.arange(253)) + 0.5
    return np.asarray(np.r_[0, 255, 100, numbers].reshape(32, 8), np.float32)


NEXT = 2.0**-14  # a few steps of float32 at 128


def test_what_float32_itself_answers_either_way_is_no_fault(between_steps: Array) -> None:
    certificate = verify(quantized(), quantized(NEXT), between_steps, batch_size=32, adversarial=False, cuda=False)
    assert certificate.passed
    assert [verdict.figures.noise for verdict in certificate.outputs] == pytest.approx([3.0, 3.0], abs=0.01)
    assert {level.trouble for level in certificate.levels} == {None}
    (note,) = [note for note in certificate.notes if "float32's own answers move by up to 3" in note]
    assert note.endswith("so 2 times that is allowed")
    assert certificate.outputs[0].figures.max_abs_error > Budget().max_scaled_error * certificate.outputs[0].figures.scale


@pytest.mark.parametrize("shift", [10.0, -255.0])
def test_what_differs_by_more_than_the_noise_is_refused(shift: float, between_steps: Array) -> None:
    with pytest.raises(BudgetExceeded):
        verify(quantized(), quantized(shift), between_steps, batch_size=32, adversarial=False, cuda=False)


def test_noise_as_large_as_the_answers_proves_nothing() -> None:
    """sin(1e7 x) answers anything."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[N, 8] x) => (float[N, 8] y) {
        f = Constant <value_float = FACTOR> () m = Mul (x, f) y = Sin (m) }"""
    reference, candidate = (onnx.parser.parse_model(text.replace("FACTOR", factor)) for factor in ("1e7", "1.000001e7"))
    x = np.random.default_rng(0).uniform(0.5, 1, (32, 8)).astype(np.float32)
    with pytest.raises(BudgetExceeded) as caught:
        verify(reference, candidate, x, adversarial=False, cuda=False)
    assert not any("own answers move" in note for note in caught.value.certificate.notes)


def test_a_search_keeps_nothing_in_float32_for_noise(between_steps: Array) -> None:
    found = find_fp32_nodes(quantized(NEXT), between_steps, budget=Budget(), adversarial=False)
    assert (found.passed, found.node_block_list, found.runs) == (True, (), 1)
