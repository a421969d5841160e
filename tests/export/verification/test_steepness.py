from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from export.certificate.budget import Budget
from export.certificate.certificate import BudgetExceeded, Certificate
from export.verification.comparison import rounded_to_half
from export.verification.metrics import Array
from export.verification.verify import verify

FLOAT, HALF = "float", "float16"
STEEP = "float32 itself leaves the budget when only its inputs are rounded to float16"


def steep(inside: str, outside: str = FLOAT, factor: float = 300.0) -> onnx.ModelProto:
    """y = sin(factor * x): so steep that rounding x moves it by about factor / 4096."""
    text = f"""<ir_version: 8, opset_import: ["": 17]> g ({outside}[N, 4] x) => ({outside}[N, 4] y) {{
        k = Constant <value_float = {factor}> () f = Cast <to = {1 if inside == FLOAT else 10}> (k)
        i = Cast <to = {1 if inside == FLOAT else 10}> (x) m = Mul (i, f) s = Sin (m)
        y = Cast <to = {1 if outside == FLOAT else 10}> (s) }}"""
    return onnx.parser.parse_model(text)


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
    exact, coarse = np.sin(x * np.float32(300)), np.sin(rounded_to_half(x) * np.float32(300))
    error = np.abs(exact - coarse).max() / np.abs(exact).max()
    assert f"{STEEP} (output 'y': max error {error:.3g} of the output's scale" in message
    assert message.endswith("so float16 inputs cannot meet it: keep float32 ones (--keep-io-types) or allow more")
    assert any(f"inputs alone rounded to float16: output 'y': max error {error:.3g}" in note for note in certificate.notes)


def test_a_steep_model_with_float32_inputs_is_told_that_it_bears_little(x: Array) -> None:
    message, _ = over(steep(FLOAT), steep(HALF), x)
    assert message.endswith("so it bears little float16: allow more, or serve it in float32")


def test_where_the_inputs_are_not_to_blame_nothing_is_said_of_them(x: Array) -> None:
    message, certificate = over(steep(FLOAT, factor=1.0), steep(FLOAT, factor=1.1), x)
    assert STEEP not in message
    assert "keep sensitive layers in float32 (--block-node, --block-op of halfserve convert" in message
    assert certificate.notes == ()


def test_inputs_beyond_float16_are_to_blame() -> None:
    x = np.linspace(1e5, 2e5, 64, dtype=np.float32).reshape(16, 4)
    message, _ = over(steep(FLOAT, factor=1e-6), steep(FLOAT, HALF, factor=1e-6), x)
    assert f"{STEEP} (output 'y': 64 of 64 values are NaN or infinite (limit 0))" in message


def test_only_float32_and_float64_are_rounded() -> None:
    for dtype in (np.float32, np.float64):
        rounded = rounded_to_half(np.array([1 / 3, 1e6], dtype))
        assert (rounded.tolist(), rounded.dtype) == ([float(np.float16(1 / 3)), float("inf")], dtype)
    for array in (np.array([1 / 3], np.float16), np.array([1 << 20])):
        assert rounded_to_half(array) is array


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
    assert "; float32 itself answers the very same differently a second time (output 'y': max error" in message
    assert "--keep-io-types" not in message
    assert [note for note in certificate.notes if note.startswith("float32 itself, asked a second time: output 'y': max error")]


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_a_reference_that_draws_random_numbers_is_named(x: Array) -> None:
    message, _ = over(Drawing().eval(), steep(FLOAT, HALF), x)
    assert "it draws random numbers or keeps something from one call to the next" in message
