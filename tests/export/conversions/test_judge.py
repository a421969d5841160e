from __future__ import annotations

import os
import signal
import threading

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.export.conversions.cases import KINDS, Case, cases, holds_float32
from tests.export.conversions.closeness import difference, right_elements
from tests.export.conversions.crash_pool import Crash, CrashPool
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


def test_what_float16_rounds_is_right_and_what_it_does_not_is_wrong() -> None:
    reference = np.linspace(-3, 3, 101, dtype=np.float32)
    assert difference(reference.astype(np.float16), [reference]) is None
    assert difference(reference + np.float32(0.05), [reference]) is not None


def test_one_wrong_element_is_named() -> None:
    reference = np.arange(6, dtype=np.float32).reshape(2, 3)
    wrong = reference.copy()
    wrong[1, 2] = 9
    assert difference(wrong, [reference]) == "1 of 6 elements, the first at [1, 2]: 9.0 instead of 5.0"


def test_either_reference_will_do_element_by_element() -> None:
    plain, coarse = np.array([0, 1], np.int64), np.array([5, 6], np.int64)
    assert difference(np.array([0, 6]), [plain, coarse]) is None
    assert difference(np.array([0, 7]), [plain, coarse]) is not None


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (np.inf, 1e6, True),
        (65504.0, 1e6, True),
        (-np.inf, 1e6, False),
        (np.nan, 1e6, False),
        (np.inf, 60000.0, False),
        (np.inf, np.inf, True),
        (65504.0, np.inf, False),
        (np.nan, np.nan, True),
        (0.0, np.nan, False),
        (0.0, 3e-8, True),
        (0.0, 1e-3, False),
    ],
)
def test_the_ends_of_float16(answer: float, reference: float, right: bool) -> None:
    found = right_elements(np.array([answer], np.float32), np.array([reference], np.float32))
    assert found.tolist() == [right]


def test_an_overflow_beside_it_excuses_no_other_element() -> None:
    reference = np.array([1e30, 1.0], np.float32)
    assert right_elements(np.array([np.inf, 200.0], np.float32), reference).tolist() == [True, False]


def test_integers_and_booleans_are_equal_or_wrong() -> None:
    assert difference(np.array([1, 2]), [np.array([1, 3])]) is not None
    assert difference(np.array([True]), [np.array([True])]) is None


def test_shapes_sequences_and_optionals() -> None:
    one = np.ones(2, np.float32)
    assert difference(np.ones(3, np.float32), [one]) == "shape [3] instead of [2]"
    assert difference([one, one], [[one, one]]) is None
    assert difference([one], [[one, one]]) == "a sequence has 1 elements instead of 2"
    assert difference([one, one * 2], [[one, one]]) == "element 1: 2 of 2 elements, the first at [0]: 2.0 instead of 1.0"
    assert difference(None, [None]) is None
    assert difference(one, [None]) is not None


def work(what: str) -> str:
    """What a piece of work may do."""
    if what == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        os._exit(7)
    if what == "raise":
        raise ValueError("no good\nand a second line")
    if what == "hang":
        threading.Event().wait()
    if what == "tell":
        return str(os.getpid())
    return f"did {what}"


def test_what_crashes_is_an_answer_and_the_rest_is_done() -> None:
    with CrashPool(work, workers=1) as pool:
        found = list(pool.map((what,) for what in ("a", "die", "b", "raise", "exit", "c")))
    assert found == [
        "did a",
        Crash("killed by SIGSEGV"),
        "did b",
        Crash("ValueError: no good"),
        Crash("ended with status 7"),
        "did c",
    ]


def test_what_hangs_is_ended() -> None:
    with CrashPool(work, workers=1, timeout_seconds=0.2) as pool:
        assert list(pool.map([("hang",)])) == [Crash("no answer within 0.2 s")]


def test_children_work_again_in_the_next_map() -> None:
    with CrashPool(work, workers=1) as pool:
        assert len({told for _ in range(3) for told in pool.map([("tell",)])}) == 1
