"""Softplus and LogSoftmax, found in their parts."""

from __future__ import annotations

import numpy as np
import pytest

from export.onnx_fp16.repair.refuse_log_softmax import RefuseLogSoftmax
from export.onnx_fp16.repair.refuse_softplus import RefuseSoftplus
from tests.export.onnx_fp16.models import parse
from tests.export.onnx_fp16.repair.same import answers, operators, repaired, same, untouched

X = {"x": (np.random.default_rng(0).standard_normal((3, 8)) * 5).astype(np.float32)}
LOG_SOFTMAX = "e = Exp (x) t = ReduceSum (e, last) l = Log (t) y = Sub (x, l)"


@pytest.mark.parametrize("addition", ["Add (e, one)", "Add (one, e)"])
def test_softplus(addition: str) -> None:
    model = parse(f"g (float[3, 8] x) => (float[3, 8] y) {{ e = Exp (x) o = {addition} y = Log (o) }}", one=np.array(1.0))
    assert operators(same(model, RefuseSoftplus(), X)) == ["Softplus"]


def test_softplus_of_a_hundred_is_a_hundred() -> None:
    model = parse("g (float[3, 8] x) => (float[3, 8] y) { e = Exp (x) o = Add (e, one) y = Log (o) }", one=np.array(1.0))
    hundreds = {"x": np.full((3, 8), 100, np.float32)}
    assert np.isinf(answers(model, hundreds)[0]).all()
    assert (answers(repaired(model, RefuseSoftplus())[0], hundreds)[0] == 100).all()


@pytest.mark.parametrize(
    ("body", "outputs", "one"),
    [
        ("e = Exp (x) o = Add (e, one) y = Log (o)", "float[3, 8] y", np.array(2.0)),
        ("e = Exp (x) o = Add (e, one) y = Log (o)", "float[3, 8] y, float[3, 8] o", np.array(1.0)),
        ("e = Exp (x) o = Add (e, one) y = Log (o)", "float[3, 8] y, float[3, 8] e", np.array(1.0)),
        ("e = Exp (x) o = Add (e, one) y = Log (o)", "float[1, 3, 8] y", np.ones((1, 1, 1))),
        ("e = Exp (x) o = Sub (e, one) y = Log (o)", "float[3, 8] y", np.array(1.0)),
    ],
    ids=["another number", "the sum is read", "the exponential is read", "the rank grows", "no sum"],
)
def test_what_is_no_softplus_stays(body: str, outputs: str, one: np.ndarray) -> None:
    untouched(parse(f"g (float[3, 8] x) => ({outputs}) {{ {body} }}", one=one), RefuseSoftplus())


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_log_softmax(axis: int) -> None:
    model = parse(f"g (float[3, 8] x) => (float[3, 8] y) {{ {LOG_SOFTMAX} }}", last=np.array([axis]))
    assert operators(same(model, RefuseLogSoftmax(), X)) == ["LogSoftmax"]


@pytest.mark.parametrize(
    ("body", "outputs", "axes"),
    [
        (LOG_SOFTMAX, "float[3, 8] y", [0, 1]),
        (LOG_SOFTMAX, "float[3, 8] y, float[3, 1] l", [-1]),
        (LOG_SOFTMAX, "float[3, 8] y, float[3, 8] e", [-1]),
        (LOG_SOFTMAX.replace("Sub (x, l)", "Sub (l, x)"), "float[3, 8] y", [-1]),
        (LOG_SOFTMAX.replace("Exp (x)", "Exp (n)").replace("e =", "n = Neg (x) e ="), "float[3, 8] y", [-1]),
    ],
    ids=["two axes", "the logarithm is read", "the exponential is read", "the other way round", "of another value"],
)
def test_what_is_no_log_softmax_stays(body: str, outputs: str, axes: list[int]) -> None:
    untouched(parse(f"g (float[3, 8] x) => ({outputs}) {{ {body} }}", last=np.array(axes)), RefuseLogSoftmax())


def test_an_older_opset_means_another_log_softmax() -> None:
    body = LOG_SOFTMAX.replace("ReduceSum (e, last)", "ReduceSum <axes = [-1]> (e)")
    untouched(parse(f"g (float[3, 8] x) => (float[3, 8] y) {{ {body} }}", opset=12), RefuseLogSoftmax())
