from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.export.conversions.cases import KINDS, Case, cases, holds_float32
from tests.export.conversions.judge import judge, judgeable
from tests.export.stored_models import parse

pytestmark = pytest.mark.long


def model(dtype: str = "float", op: str = "Sigmoid", opset: int = 17, body: str = "") -> onnx.ModelProto:
    """x -> y = op(x), both of this type; the node itself in another type where asked for."""
    there, back = (TensorProto.DataType.Value(name.upper()) for name in (body or dtype, dtype))
    text = f"a = Cast <to = {there}> (x) b = {op} (a) y = Cast <to = {back}> (b)" if body else f"y = {op} (x)"
    return parse(f"g ({dtype}[n, 4] x) => ({dtype}[n, 4] y) {{ {text} }}", opset=opset, ir=8)


X = np.linspace(-4, 4, 12, dtype=np.float32).reshape(3, 4)
CASE = Case(kind="own", name="sigmoid", model=model().SerializeToString(), inputs=({"x": X},))


@pytest.mark.parametrize(("dtype", "keep_io"), [("float", True), ("float16", False)])
def test_a_right_conversion_is_clean(dtype: str, keep_io: bool) -> None:
    converted = model(dtype, body="float16" if keep_io else "")
    verdict = judge(CASE, converted.SerializeToString(), keep_io)
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    ("converted", "keep_io", "step", "text"),
    [
        (b"no model", True, "checker", "pars"),
        (model("float", "NoSuchOperator").SerializeToString(), True, "checker", "NoSuchOperator"),
        (model("float16").SerializeToString(), True, "types", "input 'x' is float16 instead of float"),
        (model().SerializeToString(), False, "types", "input 'x' is float instead of float16"),
        (model("float", "Tanh").SerializeToString(), True, "value", "output 0"),
    ],
    ids=["garbage", "unknown operator", "types not kept", "types kept", "another function"],
)
def test_what_is_wrong_is_said(converted: bytes, keep_io: bool, step: str, text: str) -> None:
    verdict = judge(CASE, converted, keep_io)
    assert (verdict.ok, verdict.step) == (False, step)
    assert text in verdict.text


def test_what_the_schema_wants_in_float32_may_stay() -> None:
    celu = Case(kind="own", name="celu", model=model("float", "Celu").SerializeToString(), inputs=({"x": X},))
    assert judge(celu, celu.model, keep_io=False).ok
    assert not judge(CASE, CASE.model, keep_io=False).ok


def test_what_counts() -> None:
    assert judgeable(CASE)
    wrong = Case(kind="own", name="wrong", model=CASE.model, inputs=CASE.inputs, expected=([X],))
    assert not judgeable(wrong)
    halves = model("float16")
    assert not holds_float32(halves)
    assert not judgeable(Case(kind="own", name="half", model=halves.SerializeToString(), inputs=CASE.inputs))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in {"node", "light"}])
def test_the_stored_cases_have_inputs_and_answers(kind: str) -> None:
    found = list(cases(kind))
    assert len({case.name for case in found}) == len(found) > 20
    assert all(case.expected is not None and len(case.expected) == len(case.inputs) > 0 for case in found)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no cases of kind 'nodes'; there are node, simple"):
        next(cases("nodes"))
