from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.certificate import BudgetExceeded, Certificate
from halfserve.export.half_types import FP16
from halfserve.export.search.smallest_fp32_set import find_fp32_nodes
from halfserve.export.verification.samples import Array
from halfserve.export.verification.verify import verify
from tests.export.stored_models import parse

ROWS = 108
NEAR = "output 'y' (rounded): agreement 0.9815 (limit 0.9950): 2 of 108 rows differ (and 1 more over budget)"
NEARER = "float32's two numbers are closer than the error that is allowed"
NUMBERS = f"where they differ, {NEARER}, so verify on other or more samples, "
FLOAT, HALF = "float", "float16"
STEEP = "float32 itself leaves the budget when only its inputs are rounded to float16"
NEXT = 2.0**-14  # a few steps of float32 at 128


def model(shift: float) -> onnx.ModelProto:
    """y = x, the first class larger by a shift, and the second smaller."""
    return parse("g (float[N, 2] x) => (float[N, 2] y) { y = Add(x, s) }", opset=17, ir=8, s=np.array([shift, -shift]))


def close(count: int, apart: float) -> Array:
    """Samples of the second class, which some of them are only just."""
    x = np.tile(np.array([0.0, 1.0], np.float32), (ROWS, 1))
    x[:count, 0] = 1 - apart
    return x


def message(x: Array) -> str:
    with pytest.raises(BudgetExceeded) as caught:
        verify(model(0.0), model(0.008), x, adversarial=False)
    return str(caught.value)


def test_near_ties_are_reported_with_the_option_to_allow_them() -> None:
    x = close(2, 0.004)
    text = message(x)
    assert text.startswith(f"{NEAR}; {NUMBERS}keep sensitive layers in float32 (")
    share = re.search(r"or allow it \(--min-agreement ([0-9.]+)\)$", text)
    assert share is not None
    assert verify(model(0.0), model(0.008), x, budget=Budget(min_agreement=float(share[1])), adversarial=False).passed


def test_clear_disagreements_are_reported_without_a_share() -> None:
    text = message(close(2, 0.0125))
    assert text.startswith(f"{NEAR}; keep sensitive layers in float32 (")
    assert text.endswith(") or allow more rows to differ (--min-agreement)")


def test_a_lone_near_tie_passes_and_is_noted() -> None:
    certificate = verify(model(0.0), model(0.008), close(1, 0.004), adversarial=False)
    assert [round(verdict.figures.agreement or 0, 4) for verdict in certificate.outputs] == [0.9907, 0.9907]
    noted = "differs in the argmax of 1 of 108 rows, which is a near-tie: float32's two numbers there are at most 0.004 apart"
    assert [note for note in certificate.notes if noted in note] == [
        f"output 'y' ({run}) {noted}, and an error of 0.01 is allowed" for run in ("rounded", "runtime")
    ]


def steep(inside: str, outside: str = FLOAT, factor: float = 300.0) -> onnx.ModelProto:
    """y = sin(factor * x): so steep that rounding x moves it by about factor / 4096."""
    text = f"""g ({outside}[N, 4] x) => ({outside}[N, 4] y) {{
        k = Constant <value_float = {factor}> () f = Cast <to = {1 if inside == FLOAT else 10}> (k)
        i = Cast <to = {1 if inside == FLOAT else 10}> (x) m = Mul (i, f) s = Sin (m)
        y = Cast <to = {1 if outside == FLOAT else 10}> (s) }}"""
    return parse(text, opset=17, ir=8)


class Steep(nn.Module):
    """The same in torch; counts the samples that it is given."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return (x * 300).sin()


def over(reference: onnx.ModelProto | nn.Module, candidate: onnx.ModelProto, x: Array) -> tuple[str, Certificate]:
    with pytest.raises(BudgetExceeded) as caught:
        verify(reference, candidate, x, budget=Budget(min_agreement=0), adversarial=False)
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.certificate


@pytest.fixture(scope="module")
def x() -> Array:
    return np.linspace(0.5, 1.0, 256, dtype=np.float32).reshape(64, 4)


@pytest.mark.parametrize("by_torch", [False, True])
def test_float16_inputs_that_alone_are_too_coarse_are_named(by_torch: bool, x: Array) -> None:
    message, certificate = over(Steep().eval() if by_torch else steep(FLOAT), steep(FLOAT, HALF), x)
    exact, coarse = np.sin(x * np.float32(300)), np.sin(FP16.rounded(x) * np.float32(300))
    error = np.abs(exact - coarse).max() / np.abs(exact).max()
    assert f"{STEEP} (output 'y': max error {error:.3g} of the output's largest magnitude" in message
    assert message.endswith("cannot meet it: keep float32 ones (keep_io_types=True or --keep-io-types) or allow more")
    assert any(f"inputs alone rounded to float16: output 'y': max error {error:.3g}" in note for note in certificate.notes)


def test_a_steep_model_with_float32_inputs_gets_its_own_remedy(x: Array) -> None:
    message, _ = over(steep(FLOAT), steep(HALF), x)
    assert message.endswith("so it tolerates little float16: allow more, or serve it in float32")


def test_rounded_inputs_within_budget_are_not_mentioned(x: Array) -> None:
    message, certificate = over(steep(FLOAT, factor=1.0), steep(FLOAT, factor=1.1), x)
    assert STEEP not in message
    assert "keep sensitive layers in float32 (keep_fp32_nodes or --keep-fp32-nodes, keep_fp32_ops or --keep" in message
    assert not any("inputs alone rounded" in note for note in certificate.notes)


def test_inputs_beyond_float16_are_to_blame() -> None:
    x = np.linspace(1e5, 2e5, 64, dtype=np.float32).reshape(16, 4)
    message, _ = over(steep(FLOAT, factor=1e-6), steep(FLOAT, HALF, factor=1e-6), x)
    assert f"{STEEP} (output 'y': 64 of 64 values are NaN or infinite (limit 0))" in message


def test_only_float32_and_float64_are_rounded() -> None:
    for dtype in (np.float32, np.float64):
        rounded = FP16.rounded(np.array([1 / 3, 1e6], dtype))
        assert (rounded.tolist(), rounded.dtype) == ([float(np.float16(1 / 3)), float("inf")], dtype)
    for array in (np.array([1 / 3], np.float16), np.array([1 << 20])):
        assert FP16.rounded(array) is array


def test_within_the_budget_the_reference_runs_once(x: Array) -> None:
    reference = Steep().eval()
    assert verify(reference, steep(FLOAT), x, budget=Budget(min_agreement=0), adversarial=False).passed
    assert reference.seen == len(x)


class Keeping(nn.Module):
    """Adds the mean of all that it was given before."""

    seen: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.mean(0, keepdim=True)
        return x + self.seen


def test_a_reference_that_keeps_state_is_named_and_not_its_inputs(x: Array) -> None:
    message, certificate = over(Keeping().eval(), steep(FLOAT, HALF), x)
    assert "; float32 itself answers the same samples differently a second time (output 'y': max error" in message
    assert "--keep-io-types" not in message
    assert [note for note in certificate.notes if note.startswith("float32 itself, asked a second time: output 'y': max error")]


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_a_reference_that_draws_random_numbers_is_named(x: Array) -> None:
    message, _ = over(Drawing().eval(), steep(FLOAT, HALF), x)
    assert "it draws random numbers or keeps state between calls" in message


def quantized(shift: float = 0.0) -> onnx.ModelProto:
    """y = 3 quantized(x + shift) - 2 (x + shift): half way between two steps, the last bit decides over 3 in 255."""
    text = """g (float[N, 8] x) => (float[N, 8] y) {
        s = Add (x, f) q, scale, zero = DynamicQuantizeLinear (s) d = DequantizeLinear (q, scale, zero)
        a = Mul (d, three) b = Mul (s, two) y = Sub (a, b) }"""
    return parse(text, opset=17, ir=8, f=np.array(shift), three=np.array(3.0), two=np.array(2.0))


@pytest.fixture
def between_steps() -> Array:
    """[32, 8] of 0 and 255, which make each step 1, and numbers half way between steps."""
    numbers = np.random.default_rng(0).permutation(np.arange(253)) + 0.5
    return np.asarray(np.r_[0, 255, 100, numbers].reshape(32, 8), np.float32)


def test_errors_within_the_references_noise_pass(between_steps: Array) -> None:
    certificate = verify(quantized(), quantized(NEXT), between_steps, batch_size=32, adversarial=False, cuda=False)
    assert certificate.passed
    assert [verdict.figures.noise for verdict in certificate.outputs] == pytest.approx([3.0, 3.0], abs=0.01)
    assert {level.trouble for level in certificate.levels} == {None}
    (note,) = [note for note in certificate.notes if "float32's own answers move by up to 3" in note]
    assert note.endswith("so 2 times that is allowed")
    assert certificate.outputs[0].figures.max_abs_error > Budget().max_scaled_error * certificate.outputs[0].figures.scale


@pytest.mark.parametrize("shift", [10.0, -255.0])
def test_errors_beyond_the_references_noise_are_over_budget(shift: float, between_steps: Array) -> None:
    with pytest.raises(BudgetExceeded):
        verify(quantized(), quantized(shift), between_steps, batch_size=32, adversarial=False, cuda=False)


def test_noise_as_large_as_the_answers_is_not_allowed_for() -> None:
    """sin(1e7 x) answers anything."""
    text = "g (float[N, 8] x) => (float[N, 8] y) { m = Mul (x, f) y = Sin (m) }"
    reference, candidate = (parse(text, opset=17, ir=8, f=np.array(factor)) for factor in (1e7, 1.000001e7))
    x = np.random.default_rng(0).uniform(0.5, 1, (32, 8)).astype(np.float32)
    with pytest.raises(BudgetExceeded) as caught:
        verify(reference, candidate, x, adversarial=False, cuda=False)
    assert not any("own answers move" in note for note in caught.value.certificate.notes)


def test_a_search_keeps_nothing_in_float32_for_noise(between_steps: Array) -> None:
    found = find_fp32_nodes(quantized(NEXT), between_steps, budget=Budget(), adversarial=False)
    assert (found.passed, found.keep_fp32_nodes, found.runs) == (True, (), 1)
