from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest

from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.certificate import BudgetExceeded, Certificate
from halfserve.export.certificate.verdicts import AdversarialVerdict, OutputVerdict
from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import BF16, FP16
from halfserve.export.onnx_fp16.convert import convert
from halfserve.export.search.smallest_fp32_set import find_fp32_nodes
from halfserve.export.verification.comparison import data_dependent_values
from halfserve.export.verification.generated.adversarial import AdversarialCase
from halfserve.export.verification.judging import (
    PLOT_POINTS,
    ComparedOutput,
    headroom,
    judge,
    judge_cases,
    plot_of,
    units_by_output,
)
from halfserve.export.verification.metrics import compare
from halfserve.export.verification.samples import Array, Value
from halfserve.export.verification.verify import verify
from tests.export.stored_models import parse

Y = ComparedOutput(name="y")
BOXES = ComparedOutput(name="boxes", data_dependent=True)
SEEN: Array = np.array([[1.0, 2.0], [4.0, 3.0]])
USUAL = OutputVerdict(name="y", execution="rounded", figures=compare(np.full(3, 10.0), np.full(3, 10.0)), violations=())
X = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
TOP = "best, route = TopK <axis = -1> (scores, k)"
EXPERTS = [[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0], [0.0, 1.0, 0.0, 1.0]]


def test_batches_of_different_lengths_are_compared_together() -> None:
    expected: list[list[Value]] = [[np.ones((2, 3))], [np.full((1, 7), 4.0)]]
    actual: list[list[Value]] = [[np.ones((2, 3))], [np.full((1, 7), 4.5)]]
    (verdict,) = judge([Y], "runtime", expected, actual, Budget()).verdicts
    assert (verdict.figures.elements, verdict.figures.scale, verdict.figures.max_scaled_error) == (13, 4.0, 0.125)
    assert verdict.violations == ("max error 0.125 of the output's largest magnitude 4 (limit 0.01)",)


def test_integers_texts_and_booleans_are_judged_by_agreement_alone() -> None:
    numbers = np.arange(400)
    numbers[0] = 399
    one: list[Value] = [numbers, np.array(["a"] * 400), np.ones(400, bool)]
    other: list[Value] = [np.arange(400), np.array(["a"] * 399 + ["b"]), np.ones(400, bool)]
    outputs = [ComparedOutput(name=name) for name in ("i", "t", "b")]
    judged = judge(outputs, "runtime", [one], [other], Budget())
    assert [verdict.figures.agreement for verdict in judged.verdicts] == [0.9975, 0.9975, 1.0]
    assert not any(verdict.violations for verdict in judged.verdicts)
    strict = judge(outputs, "runtime", [one], [other], Budget(min_agreement=0.999))
    assert [bool(verdict.violations) for verdict in strict.verdicts] == [True, True, False]


@pytest.mark.parametrize(
    ("others", "note"),
    [
        (0, "float32 has the same argmax in all 400 rows, "),
        (
            1,
            "float32 has the same argmax in 399 of 400 rows: a model that always chose it would be within the limit of 0.995",
        ),
        (3, None),
    ],
)
def test_agreement_on_one_class_is_said_to_be_no_evidence(others: int, note: str | None) -> None:
    answers = np.random.default_rng(0).random((400, 10)) + np.eye(10)[3]
    answers[:others] = np.roll(answers[:others], 1, axis=1)
    judged = judge([Y], "rounded", [[answers]], [[answers]], Budget())
    if note is None:
        assert judged.notes == ()
    else:
        (said,) = judged.notes
        assert said.startswith(f"output 'y': {note}")
        assert "no evidence" in said


def test_an_error_over_a_columns_own_spread_is_noted_with_the_cure() -> None:
    reference = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    reference[:, 1] = 293.15 + 0.3 * reference[:, 1]
    for half, noted in ((BF16, True), (FP16, False)):
        found = judge([ComparedOutput(name="y")], "rounded", [[reference]], [[half.rounded(reference)]], Budget(), None, half)
        texts = [note for note in found.notes if "spread" in note]
        assert bool(texts) == noted
        assert all("column 1 on axis 1 is 293.1" in text and "subtract the mean" in text for text in texts)


@pytest.mark.parametrize("shape", [(40,), (40, 1), (4, 2, 5, 5), (40, 0)])
def test_a_spread_is_measured_in_outputs_of_every_shape(shape: tuple[int, ...]) -> None:
    reference = (500 + 0.1 * np.random.default_rng(0).normal(size=shape)).astype(np.float32)
    found = judge([ComparedOutput(name="y")], "rounded", [[reference]], [[BF16.rounded(reference)]], Budget(), None, BF16)
    assert any("spread" in note for note in found.notes) == (reference.size > 0)


def test_constants_and_certain_shares_have_no_spread_to_lose() -> None:
    reference = np.full((40, 3), 293.15, np.float32)
    reference[:, 2] = 1 - 1e-5 * np.random.default_rng(0).uniform(size=40)
    found = judge([ComparedOutput(name="y")], "rounded", [[reference]], [[BF16.rounded(reference)]], Budget(), None, BF16)
    assert not any("spread" in note for note in found.notes)


def test_a_constant_class_of_huge_bias_is_said_to_be_no_evidence() -> None:
    logits = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)
    logits[:, 3] += 100
    outputs = [ComparedOutput(name="y")]
    found = judge(outputs, "rounded", [[logits]], [[logits]], Budget(), units_by_output(outputs, [[logits]]))
    (note,) = found.notes
    assert "column 3 on axis 1 is the largest in all rows" in note
    assert "no evidence" in note


@pytest.mark.parametrize(("missing", "over"), [(0, False), (20, False), (32, False), (33, True), (63, True)])
def test_rows_that_float32_answers_with_nan_are_left_out_and_counted(missing: int, over: bool) -> None:
    reference = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    reference[:missing, 2] = np.nan
    found = judge([ComparedOutput(name="y")], "rounded", [[reference]], [[reference]], Budget())
    (verdict,) = found.verdicts
    assert (verdict.figures.nan_rows, verdict.figures.all_rows) == (missing, 64)
    assert verdict.figures.rows + verdict.figures.constant_rows == 64 - missing
    assert bool(verdict.violations) == over
    assert any(f"{missing} of 64 rows with NaN" in text for text in (*found.notes, *verdict.violations)) == (missing > 0)


def test_sequences_are_compared_by_item_and_absent_values_noted() -> None:
    judged = judge([Y, ComparedOutput(name="z")], "rounded", [[[SEEN, SEEN], None]], [[[SEEN, SEEN], None]], Budget())
    assert [verdict.name for verdict in judged.verdicts] == ["y"]
    assert judged.notes == ("output 'z' (rounded) is not a tensor, or is absent, and was not compared",)


@pytest.mark.parametrize(
    ("wanted", "got", "text"),
    [
        ([SEEN, SEEN], [], "0 items, the reference 2"),
        ([SEEN, SEEN], [SEEN], "1 items, the reference 2"),
        ([], [SEEN], "1 items, the reference 0"),
        (SEEN, None, "no tensor, the reference one"),
        (None, SEEN, "a tensor, the reference none"),
    ],
)
def test_an_answer_that_only_one_model_gives_is_over_budget(wanted: Value, got: Value, text: str) -> None:
    judged = judge([Y, ComparedOutput(name="z")], "rounded", [[SEEN, wanted]], [[SEEN, got]], Budget())
    broken = {verdict.name: verdict.violations for verdict in judged.verdicts}
    assert broken == {"y": (), "z": (f"in 1 of 1 batches the fp16 model gives {text}",)}


def test_rows_that_depend_on_the_data_are_compared_where_both_have_them() -> None:
    batches: list[list[Value]] = [[SEEN]] * 300
    shorter: list[list[Value]] = [[SEEN[:1]], *batches[1:]]
    judged = judge([BOXES], "runtime", batches, shorter, Budget())
    text = r"output 'boxes' (runtime): in 1 of 300 batches the fp16 model gives shape [1, 2], the reference [2, 2]"
    assert judged.notes == (f"{text}; the common part was compared",)
    assert judged.verdicts[0].violations == ()
    assert judge([BOXES], "runtime", batches[:3], shorter[:3], Budget()).verdicts[0].violations


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ExportError, match=r"output 'y': the candidate has shape \[1\], the reference \[2\]; is this the model"):
        judge([Y], "runtime", [[np.zeros(2)]], [[np.zeros(1)]], Budget())
    with pytest.raises(ExportError, match="the reference has 2 outputs, the fp16 model 1: y"):
        judge([Y], "runtime", [[SEEN, SEEN]], [[SEEN]], Budget())


def test_empty_outputs_are_noted_and_within_budget() -> None:
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


def test_data_dependent_values_are_found_through_nodes_and_bodies() -> None:
    text = """g (float[N] x, bool f) => (int64[M] c, float[N] d, float[M] e) {
            a = NonZero(x)  b = Cast<to=7>(a)  c = Squeeze(b)  d = Relu(x)
            e = If (f) <
                then_branch = t () => (float[M] u) { u = Compress(x, x) }, else_branch = s () => (float[N] v) { v = Neg(x) }
            >
        }"""
    model = parse(text, opset=17, ir=8)
    assert data_dependent_values(model.graph) == {"a", "b", "c", "e"}


def judged(
    wanted: list[Value] | str, got: list[Value] | str, *, factor: float | None = None, budget: Budget | None = None
) -> AdversarialVerdict:
    cases = [AdversarialCase(name="zeros", feed={}, factor=factor)]
    (line,) = judge_cases(cases, [wanted], {"rounded": [got]}, [USUAL], [ComparedOutput(name="y")], budget or Budget())
    return line


def test_five_times_the_usual_error_is_allowed_in_units_of_the_usual_scale() -> None:
    assert judged([np.zeros(2)], [np.full(2, 0.49)]).violations == ()
    (text,) = judged([np.zeros(2)], [np.full(2, 0.51)]).violations
    assert text == "max error 0.51 at the output's largest magnitude 10 (limit 0.05 of it)"
    (text,) = judged([np.zeros(2)], [np.full(2, 0.51)], budget=Budget(max_abs_error=0.1)).violations
    assert text == "max abs error 0.51 (limit 0.5)"


def test_nan_counts_only_where_the_reference_is_finite() -> None:
    assert judged([np.array([1.0, np.nan])], [np.array([1.0, np.nan])]).violations == ()
    assert judged([np.array([1.0, 2.0])], [np.array([1.0, np.nan])]).violations == (
        "1 of 2 values are NaN or infinite (limit 0)",
    )


def test_answers_beyond_float16_are_not_judged() -> None:
    beyond = judged([np.array([1e5])], [np.array([np.inf])])
    assert (beyond.note, beyond.violations) == ("float32 itself answers 1e+05, which float16 cannot hold", ())
    assert judged([np.array([np.nan])], [np.array([1.0])]).note == "float32 itself answers nothing finite"
    assert judged("index 9 is out of bounds", [np.zeros(1)]).note == "float32 itself fails on it: index 9 is out of bounds"


def test_a_candidate_that_fails_where_the_reference_does_not_is_over_budget() -> None:
    assert judged([np.zeros(1)], "killed by SIGSEGV").violations == ("killed by SIGSEGV",)
    assert judged([np.zeros(1)], [np.zeros(2)]).violations == ("shape [2], the reference [1]",)


def test_headroom_ends_at_the_first_factor_that_breaks() -> None:
    def line(factor: float, *violations: str, note: str | None = None) -> AdversarialVerdict:
        return AdversarialVerdict(case="", execution="", output="", factor=factor, violations=violations, note=note)

    assert headroom([line(4), line(16), line(64, "NaN")]) == 16
    assert headroom([line(4, "NaN"), line(16), line(64)]) == 1
    assert headroom([line(4), line(16, note="beyond float16")]) == 4
    assert headroom([line(4, note="beyond float16")]) is None
    assert headroom([]) is None


def routed(biases: list[float], choose: str = TOP) -> onnx.ModelProto:
    """x [n, 4] -> x times an expert's row, chosen by scores whose biases decide on zeros."""
    return parse(
        f"""g (float[n, 4] x) => (float[n, 4] y) {{
            raw = MatMul (x, w) scores = Add (raw, b) {choose}
            rows = Gather (experts, route) row = Squeeze (rows, axes) more = Add (x, row) y = Mul (more, row) }}""",
        w=np.random.default_rng(0).normal(size=(4, 3)),
        b=np.array(biases),
        experts=np.array(EXPERTS),
        k=np.array([1]),
        axes=np.array([1]),
    )


def half(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx_ir.to_proto(convert(onnx_ir.from_proto(model), ConversionSettings()).model)


def verdict(model: onnx.ModelProto, candidate: onnx.ModelProto, **given: Any) -> Certificate:
    try:
        return verify(given.pop("reference", model), candidate, X, **given)
    except BudgetExceeded as error:
        return error.certificate


@pytest.mark.long
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
def test_a_choice_between_tied_values_passes(choose: str, node: str) -> None:
    model = routed([0.5, 0.50001, 0.1], choose)
    certificate = verdict(model, half(model))
    assert certificate.passed, certificate.violations
    (rounded, _) = (note for note in certificate.notes if "near-tie" in note)
    assert rounded.startswith("output 'y' on zeros (rounded): at [0, 0] " + node)
    assert "takes index 0 (" in rounded
    assert "0.5) and float32 index 1 (" in rounded
    assert find_fp32_nodes(model, X, budget=Budget()).runs == 1  # the search takes it as the verdict does


def test_tied_boxes_in_another_order_pass() -> None:
    model = parse(
        """g (float[n, 4] x) => (float[n, 3] best, float[n, 3] edges, int64[n, 3] places) {
            raw = MatMul (x, w) scores = Add (raw, b) more = MatMul (x, v) sides = Add (more, c)
            best, places = TopK <axis = -1> (scores, k) edges = GatherElements <axis = 1> (sides, places) }""",
        w=np.random.default_rng(0).normal(size=(4, 6)),
        b=np.array([0.3, 0.7, 0.70001, 0.1, 0.3, 0.30001]),
        v=np.random.default_rng(2).normal(size=(4, 6)),
        c=np.array([5.0, -4.0, 3.0, 2.0, -1.0, 6.0]),
        k=np.array([3]),
    )
    certificate = verdict(model, half(model))
    assert certificate.passed, certificate.violations
    assert any(note.startswith("output 'edges' on zeros (rounded): at [0, ") for note in certificate.notes)


def test_a_choice_between_distinct_values_is_over_budget() -> None:
    certificate = verdict(routed([0.5, 0.6, 0.1]), half(routed([0.7, 0.6, 0.1])))
    (reported, *_) = (text for text in certificate.violations if text.startswith("output 'y' on zeros (rounded): max error "))
    assert "; at [0, 0] TopK 'best' takes index 0 (0.5) and float32 index 1 (0.6" in reported
    assert "near-tie" not in reported


def test_a_difference_beyond_a_tie_is_over_budget() -> None:
    model = routed([0.5, 0.50001, 0.1])
    wrong = half(model)
    experts = next(tensor for tensor in wrong.graph.initializer if tensor.name == "experts")
    experts.CopyFrom(onnx.numpy_helper.from_array(np.array(EXPERTS, np.float16)[[2, 1, 2]], "experts"))
    certificate = verdict(model, wrong)
    assert not certificate.passed
    assert any("a near-tie, and differs by more than that choice: max error" in text for text in certificate.violations)


def test_ties_of_a_torch_reference_need_the_onnx_source() -> None:
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
