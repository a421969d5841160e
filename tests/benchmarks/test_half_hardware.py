"""The program that compares the rounding simulation with a processor that has half-precision arithmetic."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import typer
from onnx import numpy_helper, parser

pytest.importorskip("openvino")

from benchmarks import half_hardware
from benchmarks.converters.prediction import Agreement, Errors, error_of
from benchmarks.half_device.comparison import compared
from halfserve.export.half_types import BF16
from halfserve.serve.backends.openvino import fitness
from halfserve.serve.backends.openvino.fitness import computed_halves
from tests.export.conversions.cases import Case

with_bfloat16 = pytest.mark.skipif("bf16" not in computed_halves(), reason="needs a processor with bfloat16 arithmetic")
# Operators whose constants the runtime rounds: a simulation that does not round them predicts less than half of their errors.
STORED = {
    "Selu (x)": "Selu",
    "Gemm <alpha = 0.37, beta = 0.13> (x, w, b)": "Gemm",
    "Mean (x, w, b)": "Mean",
    "ThresholdedRelu <alpha = 0.3> (x)": "ThresholdedRelu",
}


def case(text: str) -> Case:
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[32, 32] x) => (float[32, 32] y) {{ y = {text} }}'
    )
    random = np.random.default_rng(0)
    w, b, x = (BF16.rounded(random.standard_normal((32, 32)).astype(np.float32)) for _ in "wbx")
    weights = {name: array for name, array in (("w", w), ("b", b)) if f", {name}" in text}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return Case(kind="own", name=text, model=model.SerializeToString(), inputs=({"x": x},))


@with_bfloat16
@pytest.mark.parametrize("text", STORED, ids=STORED.values())
def test_rounded_constants_are_predicted_within_twice(text: str) -> None:
    outcome = compared(case(text), "bfloat16")
    assert outcome.errors is not None, outcome.reason
    assert 0 < outcome.errors.ratio <= 2


def test_float16_is_compared_where_nothing_computes_in_it() -> None:
    outcome = compared(case("Selu (x)"), "float16")
    assert outcome.errors is not None
    assert outcome.errors.rounding == 2.0**-11
    assert (outcome.half_layers > 0) == ("fp16" in computed_halves())


def test_what_stays_with_onnx_runtime_is_named() -> None:
    outcome = compared(case("RandomNormalLike (x)"), "bfloat16")
    assert outcome.errors is None
    assert "operator RandomNormalLike" in outcome.reason


def test_shares_and_places_of_the_ratios_are_counted() -> None:
    agreement = Agreement.of({"a": 0.5, "b": 1.0, "c": 1.5, "d": 4.0})
    assert (agreement.within, agreement.within_twice, agreement.worst[0]) == (0.5, 0.75, ("d", 4.0))
    assert agreement.cells == ("4", "50.0%", "75.0%", "1.50", "4.00", "4.00")


def test_a_processor_without_arithmetic_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fitness, "processor_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(typer.Exit) as ended:
        half_hardware.main(sets="simple")
    assert ended.value.exit_code == 2
    lines = capsys.readouterr().err.splitlines()
    assert ["it takes one with avx512_fp16" in line for line in lines] == [True, False]
    assert "bfloat16 is left out" in lines[1]


def test_an_instruction_set_that_the_environment_forbids_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitness, "processor_flags", lambda: frozenset({"avx512_bf16", "avx512_fp16"}))
    assert half_hardware.halves() == (["float16", "bfloat16"], [])
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    there, missing = half_hardware.halves()
    assert there == ["bfloat16"]
    assert "that ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 allows" in missing[0]


@with_bfloat16
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_onnxs_models_are_predicted_within_twice(capsys: pytest.CaptureFixture[str]) -> None:
    half_hardware.main(sets="pytorch-operator", as_json=True)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["precisions"]["bfloat16"]["pytorch-operator"]
    ratios = [Errors(**outcome["errors"]).ratio for outcome in found.values() if outcome["errors"]]
    assert len(ratios) >= 20
    assert max(ratios) <= 2
    half_hardware.main(sets="pytorch-operator", only="selu")
    assert "pytorch-operator, in half" in capsys.readouterr().out


def test_an_error_is_a_share_of_the_largest_number() -> None:
    assert error_of(np.array([4.0, np.inf]), np.array([3.0, np.inf])) == 0.25
    assert error_of(np.array([4.0, 1.0]), np.array([4.0, np.nan])) == float("inf")
    assert error_of(np.array([1, 2]), np.array([3, 4])) == 0
