from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

from export.certificate.budget import Budget
from export.errors import ExportError
from export.verification.children import Value
from export.verification.data_dependence import data_dependent_values
from export.verification.judging import PLOT_POINTS, Output, judge, plot_of
from export.verification.metrics import Array

Y = Output(name="y")
BOXES = Output(name="boxes", data_dependent=True)
SEEN: Array = np.array([[1.0, 2.0], [3.0, 4.0]])


def test_batches_of_different_lengths_are_compared_together() -> None:
    expected: list[list[Value]] = [[np.ones((2, 3))], [np.full((1, 7), 4.0)]]
    actual: list[list[Value]] = [[np.ones((2, 3))], [np.full((1, 7), 4.5)]]
    (verdict,) = judge([Y], "runtime", expected, actual, Budget()).verdicts
    assert (verdict.figures.elements, verdict.figures.scale, verdict.figures.max_scaled_error) == (13, 4.0, 0.125)
    assert verdict.violations == ("max error 0.125 of the output's scale 4 (limit 0.01)",)


def test_integers_texts_and_booleans_are_judged_by_agreement_alone() -> None:
    numbers = np.arange(400)
    numbers[0] = 399
    one: list[Value] = [numbers, np.array(["a"] * 400), np.ones(400, bool)]
    other: list[Value] = [np.arange(400), np.array(["a"] * 399 + ["b"]), np.ones(400, bool)]
    outputs = [Output(name=name) for name in ("i", "t", "b")]
    judged = judge(outputs, "runtime", [one], [other], Budget())
    assert [verdict.figures.agreement for verdict in judged.verdicts] == [0.9975, 0.9975, 1.0]
    assert not any(verdict.violations for verdict in judged.verdicts)
    strict = judge(outputs, "runtime", [one], [other], Budget(min_agreement=0.999))
    assert [bool(verdict.violations) for verdict in strict.verdicts] == [True, True, False]


def test_sequences_are_compared_item_by_item_and_absent_values_are_told() -> None:
    judged = judge([Y, Output(name="z")], "rounded", [[[SEEN, SEEN], None]], [[[SEEN, SEEN], None]], Budget())
    assert [verdict.name for verdict in judged.verdicts] == ["y"]
    assert judged.notes == ("output 'z' (rounded) is no tensor, or absent, and was not compared",)


def test_a_sequence_that_is_shorter_is_over_budget() -> None:
    judged = judge([Y], "rounded", [[[SEEN, SEEN]]], [[[SEEN]]], Budget())
    assert judged.verdicts[0].violations == ("in 1 of 1 batches the fp16 model gives 1 items, the reference 2",)


@pytest.mark.parametrize(
    ("wanted", "got", "text"),
    [
        ([SEEN, SEEN], [], "0 items, the reference 2"),
        ([], [SEEN], "1 items, the reference 0"),
        (SEEN, None, "no tensor, the reference one"),
        (None, SEEN, "a tensor, the reference none"),
    ],
)
def test_what_only_one_of_the_two_answers_is_over_budget(wanted: Value, got: Value, text: str) -> None:
    judged = judge([Y, Output(name="z")], "rounded", [[SEEN, wanted]], [[SEEN, got]], Budget())
    broken = {verdict.name: verdict.violations for verdict in judged.verdicts}
    assert broken == {"y": (), "z": (f"in 1 of 1 batches the fp16 model gives {text}",)}


def test_rows_that_depend_on_the_data_are_compared_where_both_have_them() -> None:
    batches: list[list[Value]] = [[SEEN]] * 300
    shorter: list[list[Value]] = [[SEEN[:1]], *batches[1:]]
    judged = judge([BOXES], "runtime", batches, shorter, Budget())
    text = r"output 'boxes' (runtime): in 1 of 300 batches the fp16 model gives shape [1, 2], the reference [2, 2]"
    assert judged.notes == (f"{text}; what both have was compared",)
    assert judged.verdicts[0].violations == ()
    assert judge([BOXES], "runtime", batches[:3], shorter[:3], Budget()).verdicts[0].violations


def test_other_shapes_mean_another_model() -> None:
    with pytest.raises(ExportError, match=r"output 'y': the candidate has shape \[1\], the reference \[2\]; is this the model"):
        judge([Y], "runtime", [[np.zeros(2)]], [[np.zeros(1)]], Budget())
    with pytest.raises(ExportError, match="the reference has 2 outputs, the fp16 model 1: y"):
        judge([Y], "runtime", [[SEEN, SEEN]], [[SEEN]], Budget())


def test_outputs_without_elements_are_no_offence_but_are_told() -> None:
    judged = judge([BOXES], "runtime", [[np.zeros((0, 4))]], [[np.zeros((0, 4))]], Budget())
    assert judged.verdicts[0].violations == ()
    assert judged.notes == ("output 'boxes' (runtime) is empty on every sample, so nothing of it was compared",)


def test_tiny_outputs_are_judged_in_steps_that_float16_has() -> None:
    reference, candidate = np.array([3e-7, 1e-7]), np.array([2.4e-7, 1.2e-7])  # which is one step less, and one more
    judged = judge([Y], "rounded", [[reference]], [[candidate]], Budget())
    assert judged.verdicts[0].violations == ()
    (note,) = judged.notes
    assert note.startswith("output 'y' (rounded) is at most 3e-07, where float16 has few digits or none: its error was judged")
    strict = judge([Y], "rounded", [[reference]], [[candidate]], Budget(max_abs_error=1e-8))
    assert (strict.notes, len(strict.verdicts[0].violations)) == ((), 1)
    assert judge([Y], "rounded", [[reference]], [[reference]], Budget()).notes == ()


def test_the_plot_counts_every_error_and_shows_points_of_all_the_output() -> None:
    reference = np.linspace(-1, 1, 1000)
    plot = plot_of([(reference[:500], reference[:500]), (reference[500:], reference[500:] + 0.1)], 1.0)
    assert plot is not None
    assert sum(plot.counts) == 1000
    assert plot.counts[0] == 500
    assert PLOT_POINTS // 3 < len(plot.reference) == len(plot.candidate) <= PLOT_POINTS
    assert {-1.0, 1.0} <= set(plot.reference)
    assert (plot.reference[0], plot.reference[-1], plot.candidate[-1]) == (-1.0, 1.0, 1.1)
    assert plot_of([(np.array([np.nan]), np.array([1.0]))], 1.0) is None


def test_what_depends_on_the_data_is_found_through_nodes_and_bodies() -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        g (float[N] x, bool f) => (int64[M] c, float[N] d, float[M] e) {
            a = NonZero(x)  b = Cast<to=7>(a)  c = Squeeze(b)  d = Relu(x)
            e = If (f) <
                then_branch = t () => (float[M] u) { u = Compress(x, x) }, else_branch = s () => (float[N] v) { v = Neg(x) }
            >
        }""")
    assert data_dependent_values(model.graph) == {"a", "b", "c", "e"}
