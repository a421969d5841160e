"""The verdict on bfloat16 models: the simulation rounds as numpy's bfloat16 does, and the limits are its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from numpy.typing import ArrayLike
from torch import nn

from halfserve.export.certificate.budget import Budget, usual_budgets
from halfserve.export.certificate.certificate import BudgetExceeded, read_certificate
from halfserve.export.certificate.html import certificate_page
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import BF16, FP16
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.onnx_files.proto_graphs import half_type_of
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.to_onnx.export_onnx import export_onnx
from halfserve.export.verification import executions
from halfserve.export.verification.metrics import ulp_distance
from halfserve.export.verification.samples import Array
from halfserve.export.verification.simulation import round_every_node
from halfserve.export.verification.verify import verify
from tests.export import models
from tests.export.onnx_fp16.models import normal
from tests.export.stored_models import answers, parse, with_data_files

LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"]
X = np.linspace(-2, 2, 21).astype(np.float32)[:, None]
# ONNX Runtime's CPU provider has no bfloat16 kernel for these.
MOVING = """g (bfloat16[1,4,2,2] x) => (bfloat16[a,b,c,d] y) {
    p = Pad (x, sizes)  t = Tile (p, twice)  s = DepthToSpace <blocksize = 2> (t)  e = Expand (s, wide)
    k = Constant <value = int64 {1}> ()  q = SequenceConstruct (e, e)  y = SequenceAt (q, k)
}"""
typed = partial(parse, opset=22, ir=10)


def half(values: Array) -> Array:
    return values.astype(ml_dtypes.bfloat16)


def run(model: onnx.ModelProto, *, level: str = "ORT_ENABLE_BASIC", **feeds: Array) -> list[Array]:
    return list(answers(round_every_node(model, BF16), feeds, level).values())


@pytest.mark.parametrize("level", LEVELS)
def test_every_node_rounds_as_numpy_does_at_every_level(level: str) -> None:
    text = "g (bfloat16[N, 1] x) => (bfloat16[N, 1] y) { a = Mul (x, w)  b = Add (a, w)  c = Tanh (b)  y = Div (c, w) }"
    (y,) = run(typed(text, w=half(np.array(1.7))), level=level, x=X)
    w, x = half(np.array(1.7)), half(X)
    expected = half(np.tanh(x * w + w)) * half(1 / w.astype(np.float32))
    assert y.dtype == np.float32
    assert np.array_equal(y, expected.astype(np.float32))


def rounded(values: ArrayLike) -> Array:
    return half(np.asarray(values, np.float32)).astype(np.float32)


# Each beside what it computes where its constants are numbers of bfloat16, which the results are rounded to.
SELU = rounded(1.67326319), rounded(1.05070102)
W, B = rounded([[1.7]]), rounded([0.3])
STORED: dict[str, Callable[[Array], Array]] = {
    "Selu (x)": lambda x: np.where(x > 0, x, SELU[0] * np.expm1(x)) * SELU[1],
    "LeakyRelu <alpha = 0.3> (x)": lambda x: np.where(x > 0, x, x * rounded(0.3)),
    "HardSigmoid (x)": lambda x: np.clip(rounded(0.2) * x + 0.5, 0, 1),
    "ThresholdedRelu <alpha = 0.3> (x)": lambda x: np.where(x > rounded(0.3), x, 0),
    "Gemm <alpha = 0.37, beta = 0.7> (x, w, b)": lambda x: x @ rounded(W * rounded(0.37)) + rounded(B * rounded(0.7)),
    "Mean (x, x, x)": lambda x: rounded(rounded(2 * x) + x) * rounded(1 / 3),
    "Div (x, w)": lambda x: x * rounded(1 / W),
}


@pytest.mark.parametrize("text", STORED)
def test_constants_round_as_runtimes_store_them(text: str) -> None:
    x = rounded(np.concatenate([X, 0.3 + X / 300]))  # numbers near the threshold too
    weights: dict[str, Any] = {name: half(array) for name, array in (("w", W), ("b", B)) if f", {name}" in text}
    (y,) = run(typed(f"g (bfloat16[N, 1] x) => (bfloat16[N, 1] y) {{ y = {text} }}", **weights), x=x)
    assert np.array_equal(y, rounded(STORED[text](x)))


def test_division_by_what_has_no_reciprocal_stays() -> None:
    (y,) = run(typed("g (bfloat16[N, 1] x) => (bfloat16[N, 1] y) { y = Div (x, w) }", w=half(np.array(0.0))), x=X[:2])
    assert np.array_equal(y, np.full((2, 1), -np.inf, np.float32))


@pytest.mark.parametrize("level", LEVELS)
def test_products_sum_in_float32_and_round_once(level: str) -> None:
    random = np.random.default_rng(0)
    x, w = random.standard_normal((3, 512)).astype(np.float32), half(random.standard_normal((512, 4)))
    (y,) = run(typed("g (bfloat16[N, 512] x) => (bfloat16[N, 4] y) { y = MatMul (x, w) }", w=w), level=level, x=x)
    expected = half(half(x).astype(np.float32) @ w.astype(np.float32)).astype(np.float32)
    assert ulp_distance(y, expected, BF16).max() <= 1  # sums in another order
    assert np.array_equal(y, half(y).astype(np.float32))


def test_an_infinity_a_nan_and_a_subnormal_round_as_numbers_do() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 3.4e38, 1e-39, 1 + 2.0**-8, 1 + 3 * 2.0**-8], np.float32)
    (y,) = run(typed("g (bfloat16[N] x) => (bfloat16[N] y) { y = Abs (x) }"), x=x)
    assert np.array_equal(y, np.abs(half(x)).astype(np.float32), equal_nan=True)


def test_what_moves_numbers_runs_without_kernels_for_bfloat16() -> None:
    x = normal(1, 4, 2, 2)
    weights: dict[str, Any] = {
        "sizes": np.array([0, 0, 0, 0, 0, 0, 1, 1]),
        "twice": np.array([1, 1, 2, 2]),
        "wide": np.array([3, 1, 12, 12]),
    }
    (y,) = run(typed(MOVING, **weights), x=x)
    assert y.shape == (3, 1, 12, 12)
    assert set(np.unique(y)) == {0.0, *half(x).astype(np.float32).ravel().tolist()}


def test_float32_nodes_between_bfloat16_ones_do_not_round() -> None:
    text = """g (float[N, 1] x) => (float[N, 1] y) { h = Cast <to = 16> (x)  a = Mul (h, h)  w = Cast <to = 1> (a)
        b = Div (w, three)  l = CastLike (b, h)  y = Cast <to = 1> (l) }"""
    (y,) = run(typed(text, three=np.array(3, np.float32)), x=X)
    square = (half(X) * half(X)).astype(np.float32)
    assert np.array_equal(y, half(square / np.float32(3)).astype(np.float32))


def bfloat16_of(module: nn.Module, x: Array) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A module in float32 and in bfloat16."""
    wide = export_onnx(module, torch.from_numpy(x))
    return wide, convert_float_to_float16(wide, dtype="bfloat16", upgrade_opset=True)


def test_a_sound_model_passes_with_a_certificate_that_says_bfloat16() -> None:
    x = normal(40, 1, 8, 8)
    certificate = verify(*bfloat16_of(models.cnn(), x), x, cuda=False)
    assert (certificate.passed, certificate.precision, certificate.budget) == (True, "bfloat16", usual_budgets()["bfloat16"])
    rounded, runtime = (verdict.figures.max_scaled_error for verdict in certificate.outputs)
    assert 2.0**-11 < runtime < rounded < certificate.budget.max_scaled_error, "the weights alone lose less than all nodes"
    assert certificate.risks == ()
    assert read_certificate(certificate.to_bytes()) == certificate
    page = certificate_page(certificate)
    assert "bf16 certificate" in page
    assert "fp16" not in page


def test_a_difference_of_large_numbers_is_over_budget() -> None:
    text = "g (float[N, 8] x) => (float[N, 8] y) { a = MatMul (x, w)  b = Add (a, large)  c = Mul (b, b)  y = Sub (c, square) }"
    wide = parse(text, opset=17, ir=8, w=np.eye(8), large=np.array(60.0), square=np.array(3600.0))
    x = normal(32, 8)
    assert verify(wide, convert_float_to_float16(wide), x, cuda=False, adversarial=False).passed
    with pytest.raises(BudgetExceeded, match=r"max error 0\.\d+ of the output's largest magnitude \d+ \(limit 0.04\)"):
        verify(wide, convert_float_to_float16(wide, dtype="bfloat16"), x, cuda=False, adversarial=False)


def overflowing() -> onnx.ModelProto:
    text = "g (float[N, 8] x) => (float[N, 8] y) { a = MatMul (x, w)  b = Mul (a, large)  y = Div (b, large) }"
    return parse(text, opset=17, ir=8, w=np.random.default_rng(1).standard_normal((8, 8)), large=np.array(6e4))


def test_what_overflows_in_float16_passes_in_bfloat16() -> None:
    wide, x = overflowing(), normal(32, 8)
    with pytest.raises(BudgetExceeded, match="NaN or infinite"):
        verify(wide, convert_float_to_float16(wide, repair=False), x, cuda=False)
    assert verify(wide, convert_float_to_float16(wide, dtype="bfloat16"), x, cuda=False).headroom == 64


def test_bfloat16_inputs_are_rounded_and_judged() -> None:
    x = normal(8, 8)
    wide = export_onnx(models.mlp(), torch.from_numpy(x))
    narrow = convert_float_to_float16(wide, dtype="bfloat16", keep_io_types=False)
    certificate = verify(wide, narrow, x, cuda=False)
    assert all(verdict.figures.max_scaled_error > 2.0**-10 for verdict in certificate.outputs)


FLOAT16_FILE = """g (float[N, 8] x) => (float[N, 8] y) {
    h = Cast <to = 10> (x)  a = MatMul (h, w)  b = Tanh (a)  c = Cast <to = 1> (b)  d = Mul (c, third)
    k = Constant <value = float16 {15565}> ()  e = Cast <to = 10> (d)  f = Mul (e, k)  y = Cast <to = 1> (f) }"""


WEIGHTS = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float16)


def float16_file() -> onnx.ModelProto:
    """A float16 model in which `d` is float32; `k`, by its bits, is 1.2001953125."""
    return parse(FLOAT16_FILE, opset=17, ir=10, w=WEIGHTS, third=np.array(1 / 3))


@pytest.mark.parametrize("level", LEVELS)
def test_a_float16_file_computed_in_bfloat16_rounds_weights_and_half_nodes(level: str) -> None:
    x = normal(32, 8)
    rounded = round_every_node(float16_file(), BF16, FP16)
    (y,) = answers(rounded, {"x": x}, level).values()
    product = half(half(x).astype(np.float32) @ half(WEIGHTS).astype(np.float32))
    kept = half(np.tanh(product)).astype(np.float32) * np.float32(1 / 3)
    expected = (half(kept) * half(np.array(1.2001953125))).astype(np.float32)
    assert ulp_distance(y, expected, BF16).max() <= 1  # sums in another order
    assert np.array_equal(y, half(y).astype(np.float32))


def test_outputs_of_a_float16_file_overflow_although_bfloat16_holds_them() -> None:
    model = parse("g (float16[N] x) => (float16[N] y) { y = Mul (x, x) }", opset=17, ir=10)
    feeds = {"x": np.array([3.01, 300], np.float32)}
    (y,) = answers(round_every_node(model, BF16, FP16), feeds).values()
    assert np.array_equal(y, [float(half(half(np.array(3.01)) ** 2)), np.inf])


def test_one_certificate_holds_a_verdict_for_each_precision() -> None:
    x = normal(40, 1, 8, 8)
    wide = export_onnx(models.cnn(), torch.from_numpy(x))
    narrow = convert_float_to_float16(wide)
    certificate = verify(wide, narrow, x, cuda=False, precisions=("bfloat16", "float16"))
    alone = verify(wide, narrow, x, cuda=False)
    assert (certificate.passed, certificate.precision, certificate.not_proved) == (True, "float16", {})
    assert certificate.outputs == alone.outputs, "the own verdict is the same as without others"
    (further,) = certificate.precisions.values()
    assert (further.passed, further.budget) == (True, usual_budgets()["bfloat16"])
    for own, other in zip(certificate.outputs, further.outputs, strict=True):
        assert own.figures.max_scaled_error * 3 < other.figures.max_scaled_error < 0.04, own.execution
    content = certificate.to_json()
    assert (content["precision"], content["passed"], content["precisions"]["bfloat16"]["passed"]) == ("float16", True, True)
    assert read_certificate(certificate.to_bytes()) == certificate
    assert "<h2>Computed in bfloat16</h2>" in certificate_page(certificate)
    only = verify(wide, narrow, x, cuda=False, precisions=["bfloat16"])
    assert (only.precision, only.precisions) == ("bfloat16", {})
    assert [verdict.figures for verdict in only.outputs] == [verdict.figures for verdict in further.outputs]


def test_a_bfloat16_file_whose_numbers_overflow_in_float16_is_not_proved_there() -> None:
    wide, x = overflowing(), normal(32, 8)
    narrow = convert_float_to_float16(wide, dtype="bfloat16")
    certificate = verify(wide, narrow, x, cuda=False, precisions=("bfloat16", "float16"))
    assert certificate.passed
    assert "NaN or infinite" in certificate.not_proved["float16"].worst_violation


def test_weights_in_files_are_mapped_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executions, "INLINE_LIMIT_BYTES", 0)
    x = normal(4, 64)
    wide = export_onnx(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.from_numpy(x))
    narrow = with_data_files(convert_float_to_float16(wide, dtype="bfloat16"), tmp_path / "narrow.onnx")
    assert open_model(narrow).locations
    assert verify(wide, narrow, x, cuda=False).passed
    in_float16 = with_data_files(convert_float_to_float16(wide), tmp_path / "float16.onnx")
    assert verify(wide, in_float16, x, cuda=False, precisions=["bfloat16"]).passed


def test_sums_in_float16_are_refused_for_bfloat16() -> None:
    x = np.zeros((2, 8), np.float32)
    wide = export_onnx(models.mlp(), torch.from_numpy(x))
    with pytest.raises(ExportError, match="sums in float16 are asked for, and the model is bfloat16"):
        verify(wide, convert_float_to_float16(wide, dtype="bfloat16"), x, accumulators="float16")


def test_the_type_of_a_model_is_read_from_its_mark_or_its_types() -> None:
    x = np.zeros((2, 8), np.float32)
    wide = export_onnx(models.mlp(), torch.from_numpy(x))
    narrow = convert_float_to_float16(wide, dtype="bfloat16")
    assert (half_type_of(wide), half_type_of(narrow)) == (FP16, BF16)
    del narrow.metadata_props[:]
    assert half_type_of(narrow) is BF16
    assert half_type_of(onnx_ir.to_proto(onnx_ir.from_proto(convert_float_to_float16(wide)))) is FP16


def test_a_limit_of_ones_own_replaces_the_usual_one() -> None:
    assert usual_budgets(max_scaled_error=0.2)["bfloat16"] == Budget(max_scaled_error=0.2)
    assert (usual_budgets()["float16"], usual_budgets()["bfloat16"].max_scaled_error) == (Budget(), 0.04)
