from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.certificate import BudgetExceeded, Certificate, read_certificate
from halfserve.export.certificate.embed import graph_sha256
from halfserve.export.certificate.verdicts import TaskFigure
from halfserve.export.export_errors import ExportError
from halfserve.export.half_module.to_half import to_half
from halfserve.export.onnx_files.model_file import ModelFile, serialize
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.to_onnx.export_onnx import export_onnx
from halfserve.export.verification import executions
from halfserve.export.verification.samples import Array, Feed
from halfserve.export.verification.verify import verify
from tests.export import models
from tests.export.stored_models import both, chain, parse, sums

SHAPES = {"mlp": (8,), "cnn": (1, 8, 8), "lstm": (5, 8), "transformer": (5, 16)}
DETECTOR = """
g (T[1,16,4] boxes, T[1,1,16] scores) => (int64[M,3] kept, T[N] found, seq(T[1,16,4]) both) {
    wide = Cast<to=1>(boxes)
    sure = Cast<to=1>(scores)
    most = Constant<value=int64[1] {10}>()
    share = Constant<value=float[1] {0.5}>()
    least = Constant<value=float[1] {0.3}>()
    kept = NonMaxSuppression(wide, sure, most, share, least)
    flat = Constant<value=int64[1] {-1}>()
    column = Reshape(scores, flat)
    limit = Cast<to=NUMBER>(least)
    high = Greater(column, limit)
    found = Compress(column, high)
    both = SequenceConstruct(boxes, boxes)
}
"""
MISSING_AS_ZERO = """g (float[N,4] x, float[N,4] z) => (float[N,4] y) {
    missing = IsNaN(x)  zero = Constant<value_float=0.0>()  known = Where(missing, zero, x)  y = Add(known, z)
}"""


class Chain(nn.Module):
    """The torch twin of tests.export.onnx_files: x * c * c / c / c."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 300.0 * 300.0 / 300.0 / 300.0


class Reciprocal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 / x


class Reciprocals(nn.Module):
    """Finite in float32 for every x, zeros included."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * x + 1e-8).reciprocal() * 1e-6


def half_reciprocals() -> onnx.ModelProto:
    text = """g (float16[N,4] x) => (float16[N,4] output) {
        s = Mul(x, x)  small = Constant<value_float=1e-8>()  e = Cast<to=10>(small)  a = Add(s, e)  r = Reciprocal(a)
        factor = Constant<value_float=1e-6>()  f = Cast<to=10>(factor)  output = Mul(r, f)
    }"""
    return parse(text, opset=17, ir=8)


def half_reciprocal() -> onnx.ModelProto:
    return parse("g (float16[N,1] x) => (float16[N,1] y) { y = Reciprocal(x) }", opset=17, ir=8)


def samples(name: str, count: int = 40) -> Tensor:
    return torch.randn(count, *SHAPES[name], generator=torch.Generator().manual_seed(0))


def converted(module: nn.Module, inputs: Tensor) -> onnx.ModelProto:
    return export_onnx(to_half(module).module, inputs[:2].half())


@cache
def mlp_as_fp16() -> bytes:
    return serialize(converted(models.mlp(), samples("mlp")))


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(name, marks=pytest.mark.long) for name in ("cnn", "lstm", "transformer"))]
)
def test_sound_conversions_pass_the_default_budget(name: str) -> None:
    reference, inputs = getattr(models, name)(), samples(name)
    certificate = verify(reference, converted(reference, inputs), inputs, batch_size=16)
    assert certificate.passed
    assert certificate.samples == 40
    assert {verdict.execution for verdict in certificate.outputs} == {"rounded", "runtime"}
    assert all(0 < verdict.figures.max_scaled_error < 2e-3 for verdict in certificate.outputs)
    assert all(verdict.figures.cosine > 0.99999 for verdict in certificate.outputs)


def test_the_reference_can_be_onnx_and_the_inputs_arrays() -> None:
    reference, inputs = models.mlp(), samples("mlp")
    float32 = export_onnx(reference, inputs[:2])
    by_onnx = verify(serialize(float32), mlp_as_fp16(), [inputs.numpy()])
    by_torch = verify(reference, onnx.load_from_string(mlp_as_fp16()), inputs)
    for one, other in zip(by_onnx.outputs, by_torch.outputs, strict=True):
        assert one.figures.max_abs_error == pytest.approx(other.figures.max_abs_error, rel=0.05)


def test_accuracy_is_the_share_of_matching_labels() -> None:
    reference, inputs = models.mlp(), samples("mlp")
    labels = reference(inputs).argmax(-1)
    labels[:10] = (labels[:10] + 1) % models.CLASSES
    accuracy = verify(reference, mlp_as_fp16(), inputs, labels=labels).accuracy
    assert accuracy is not None
    assert accuracy.reference == 0.75
    assert accuracy.rounded == pytest.approx(0.75, abs=0.026)


def failing(reference: nn.Module, candidate: onnx.ModelProto, inputs: Tensor, budget: Budget, message: str) -> Certificate:
    with pytest.raises(BudgetExceeded, match=message) as caught:
        verify(reference, candidate, inputs, budget=budget)
    assert "\n" not in str(caught.value)
    return caught.value.certificate


def test_an_overflow_that_the_runtime_hides_is_caught() -> None:
    certificate = failing(
        Chain().eval(),
        chain(["Mul", "Mul", "Div", "Div"], 300.0),
        torch.linspace(0.1, 1, 10)[:, None],
        Budget(),
        r"output 'y' \(rounded\): 3 of 10 values are NaN or infinite \(limit 0\).*; keep the layers that overflow in float32",
    )
    assert [verdict.figures.non_finite for verdict in certificate.outputs] == [3, 0]
    assert not certificate.passed


def test_infinities_of_the_reference_do_not_count() -> None:
    reference, inputs = Reciprocal().eval(), torch.tensor([[0.0], [1.0], [-2.0]])
    certificate = verify(reference, half_reciprocal(), inputs)
    assert certificate.passed
    assert certificate.outputs[0].figures.non_finite == 0


def test_nan_figures_never_pass() -> None:
    reference, inputs = Reciprocal().eval(), torch.zeros(2, 1)
    loose = Budget(max_abs_error=1e30, min_agreement=0, max_non_finite=10**6)
    failing(reference, half_reciprocal(), inputs, loose, "there is no place where both are finite")


def test_a_candidate_that_overflows_everywhere_does_not_ask_for_samples() -> None:
    inputs = torch.linspace(0.9, 1, 10)[:, None]
    certificate = failing(
        Chain().eval(), chain(["Mul", "Mul", "Div", "Div"], 300.0), inputs, Budget(), "10 of 10 values are NaN"
    )
    assert not [offence for offence in certificate.violations if "give other samples" in offence]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (
            Budget(max_abs_error=1e-9),
            r"output 'output' \(rounded\): max abs error .* \(limit 1e-09\) \(and \d+ more over budget\)",
        ),
        (Budget(max_scaled_error=1e-9), r"max error .* of the output's largest magnitude .* \(limit 1e-09\)"),
    ],
)
def test_the_error_names_violation_limit_and_remedy(budget: Budget, message: str) -> None:
    failing(models.mlp(), onnx.load_from_string(mlp_as_fp16()), samples("mlp"), budget, message)


def test_another_models_answers_disagree() -> None:
    reference, inputs = models.mlp(), samples("mlp")
    other = nn.Sequential(nn.Linear(8, models.CLASSES)).eval()
    certificate = failing(reference, converted(other, inputs), inputs, Budget(max_abs_error=1e6), "agreement 0")
    assert certificate.outputs[0].figures.agreement is not None


def test_a_fixed_batch_is_run_in_its_size() -> None:
    model = chain(["Mul"], 1.0, batch=4)
    certificate = verify(nn.Identity().eval(), model, torch.rand(11, 1).half().float())
    assert certificate.samples == 8
    with pytest.raises(ExportError, match="batches of exactly 4, only 3 samples"):
        verify(nn.Identity().eval(), model, torch.rand(3, 1))


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (torch.rand(4, 7), None, r"input 'input': expected float16 \[batch, 8\], got float32 \[4, 7\]"),
        ([torch.rand(4, 8), torch.rand(4, 8)], None, r"the model takes 1 inputs \(input\), 2 were given"),
        (torch.rand(0, 8), None, r"at least 1; got \[0, 8\]"),
        (torch.zeros(4, 8, dtype=torch.long), None, r"input 'input': expected float16 \[batch, 8\], got int64"),
        (torch.rand(4, 8), torch.zeros(3), r"labels have shape \[3\], the first output's classes \[4\]"),
    ],
)
def test_samples_that_do_not_fit_are_refused(inputs: Tensor | list[Tensor], labels: Tensor | None, message: str) -> None:
    reference = models.mlp()
    with pytest.raises(ExportError, match=message):
        verify(reference, mlp_as_fp16(), inputs, labels=labels)


def test_unsuitable_references_are_refused() -> None:
    candidate = mlp_as_fp16()
    with pytest.raises(ExportError, match="half-precision weights; expected the float32 model"):
        verify(models.mlp().half(), candidate, samples("mlp"))
    with pytest.raises(ExportError, match="reference model is in training mode"):
        verify(models.mlp().train(), candidate, samples("mlp"))
    with pytest.raises(ExportError, match=r"output 'output': the candidate has shape \[32, 10\], the reference \[32, 8\]"):
        verify(nn.Identity().eval(), candidate, samples("mlp"))


@pytest.mark.parametrize("content", [b"", b"not a model", np.random.default_rng(0).bytes(500), serialize(sums())[:1000]])
def test_files_that_are_not_models_are_refused(content: bytes) -> None:
    with pytest.raises(ExportError, match="is not an ONNX model or is damaged"):
        verify(models.mlp(), content, samples("mlp"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_agreement": 1.5}, "min_agreement is 1.5; expected a share from 0 to 1"),
        ({"max_abs_error": float("nan")}, "max_abs_error is nan; expected a number of at least 0"),
        ({"max_non_finite": -1}, "max_non_finite is -1; expected a number of at least 0"),
    ],
)
def test_limits_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        Budget(**settings)  # type: ignore[arg-type]  # (wrong on purpose)


def test_a_model_with_data_files_is_not_loaded_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, dtype in (("wide", np.float32), ("half", np.float16)):
        model = sums(3, (40, 64), dtype=dtype)
        (tmp_path / name).mkdir()
        onnx.save(model, tmp_path / name / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=100)
    monkeypatch.setattr(executions, "INLINE_LIMIT_BYTES", 0)  # as if it were too large for one message
    monkeypatch.setattr(ModelFile, "proto", property(lambda _: pytest.fail("taken into memory as a whole")))
    x = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    certificate = verify(tmp_path / "wide" / "m.onnx", tmp_path / "half" / "m.onnx", x, cuda=False)
    assert certificate.passed
    assert 0 < certificate.outputs[0].figures.max_scaled_error < 2e-3
    assert certificate.onnx_bytes == sum(file.stat().st_size for file in (tmp_path / "half").iterdir())


def test_large_tensors_of_a_single_file_stay_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.onnx").write_bytes(serialize(sums(2, (40, 1024), dtype=np.float16)))
    monkeypatch.setattr(executions, "INLINE_LIMIT_BYTES", 0)
    x = np.random.default_rng(0).standard_normal((40, 1024)).astype(np.float32)
    certificate = verify(sums(2, (40, 1024)), tmp_path / "m.onnx", x, cuda=False, adversarial=False)
    assert certificate.outputs[0].figures.elements == x.size


def test_outputs_whose_shapes_depend_on_the_data_and_sequences_are_compared() -> None:
    reference, candidate = both(DETECTOR)
    generator = np.random.default_rng(0)
    corners = generator.uniform(0, 10, (1, 16, 2))
    boxes = np.concatenate([corners, corners + generator.uniform(1, 5, (1, 16, 2))], -1).astype(np.float32)
    certificate = verify(reference, candidate, [boxes, generator.random((1, 1, 16)).astype(np.float32)], cuda=False)
    rounded = {verdict.name: verdict.figures for verdict in certificate.outputs if verdict.execution == "rounded"}
    assert rounded["kept"].agreement == 1
    assert rounded["found"].elements > 5
    assert rounded["both"].elements == 2 * boxes.size


def test_a_model_without_a_batch_dimension_and_with_no_input_at_all_is_verified() -> None:
    reference, candidate = both("g (T[3] a, T[4,2] b) => (T[3] y, T[4,2] z) { y = Neg(a)  z = Neg(b) }")
    arrays = [np.ones(3, np.float32), np.ones((4, 2), np.float32)]
    certificate = verify(reference, candidate, arrays, cuda=False)
    assert (certificate.samples, certificate.outputs[1].figures.elements) == (1, 8)
    constant = parse("g () => (float[2] y) { y = Constant<value=float[2] {1.0, 2.0}>() }", opset=17, ir=8)
    assert verify(constant, constant, [], cuda=False).passed


def test_adversarial_samples_have_verdicts_of_their_own() -> None:
    far_apart = 1 + torch.arange(32.0).reshape(8, 4) / 32  # two that float16 rounds together would be a disagreement
    certificate = failing(
        Reciprocals().eval(),
        half_reciprocals(),
        far_apart,
        Budget(),
        r"output 'output' on zeros \(rounded\): .* values are NaN or infinite",
    )
    assert not any(verdict.violations for verdict in certificate.outputs)
    assert {line.case for line in certificate.adversarial} >= {"zeros", "ones", "largest", "4 times larger", "batch of one"}
    without = verify(Reciprocals().eval(), half_reciprocals(), far_apart, adversarial=False, cuda=False)
    assert without.passed
    assert (without.adversarial, without.headroom) == ((), None)


def test_headroom_that_cannot_be_measured_is_over_budget() -> None:
    reference, inputs = models.mlp(), samples("mlp")
    with pytest.raises(ExportError, match="headroom of 4 is asked for, which adversarial samples measure: leave them on"):
        verify(reference, mlp_as_fp16(), inputs, budget=Budget(min_headroom=4), adversarial=False)
    wide, half = both("g (int64[N,4] i) => (T[N,4] y) { f = Cast<to=NUMBER>(i)  y = Neg(f) }")
    with pytest.raises(BudgetExceeded, match=r"headroom was not measured.* or ask for none \(least 4\)$"):
        verify(wide, half, np.ones((2, 4), np.int64), budget=Budget(min_headroom=4))


def test_a_fully_masked_row_that_becomes_nan_is_caught() -> None:
    text = """g (T[batch,n] x, int64[batch,n] attention_mask) => (T[batch,n] y) {
        m = Cast<to=NUMBER>(attention_mask)  one = Constant<value_float=1.0>()  o = CastLike(one, m)  i = Sub(o, m)
        low = Constant<value_float=-1e9>()  l = CastLike(low, m)  p = Mul(i, l)  s = Add(x, p)  y = Softmax(s)
    }"""
    reference, candidate = both(text)
    x, mask = np.random.default_rng(0).random((4, 6)).astype(np.float32), np.ones((4, 6), np.int64)
    with pytest.raises(BudgetExceeded) as caught:
        verify(reference, candidate, {"x": x, "attention_mask": mask}, cuda=False)
    masked = [line for line in caught.value.certificate.adversarial if line.case == "masked row" and line.violations]
    assert masked


def test_facts_from_the_caller_are_in_the_certificate() -> None:
    placement = {"nodes": {"CPUExecutionProvider": 1}}
    certificate = verify(Chain().eval(), chain(["Mul"], 1.0), torch.full((4, 1), 0.5), placement=placement, cuda=False)
    assert certificate.placement == placement
    assert certificate.graph_sha256 == graph_sha256(chain(["Mul"], 1.0))
    assert {"halfserve", "onnx", "onnxruntime", "torch"} <= certificate.versions.keys()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_sample_with_a_non_finite_answer_is_named(value: float) -> None:
    model, inputs = parse(MISSING_AS_ZERO, opset=17, ir=8), [np.ones((40, 4), np.float32) for _ in range(2)]
    inputs[1][35, 2] = inputs[1][38, 0] = value
    with pytest.raises(ExportError, match=r"sample 35 \(counted from 0\) holds NaN or infinity in input 'z', .*; so do 1 more"):
        verify(model, convert_float_to_float16(model), inputs, adversarial=False)


def test_nan_as_a_missing_value_is_accepted() -> None:
    model, inputs = parse(MISSING_AS_ZERO, opset=17, ir=8), [np.ones((40, 4), np.float32) for _ in range(2)]
    inputs[0][3] = np.nan
    assert verify(model, convert_float_to_float16(model), inputs, adversarial=False).passed


def test_a_sample_with_nan_is_refused_where_the_answer_holds_no_floats() -> None:
    model = parse("g (float[N,4] x) => (int64[N,1] y) { r = Relu(x)  y = ArgMax<axis=1>(r) }", opset=17, ir=8)
    inputs = np.ones((4, 4), np.float32)
    inputs[2, 1] = np.nan
    with pytest.raises(ExportError, match="sample 2 .counted from 0. holds NaN or infinity in input 'x'"):
        verify(model, convert_float_to_float16(model), inputs, adversarial=False)


def test_a_detector_without_its_scores_is_refused_with_the_column_named() -> None:
    reference, candidate = both("g (T[N,16,6] x, T[6] m) => (T[N,16,6] y) { y = Mul(x, m) }")
    for model, mask in ((reference, np.ones(6, np.float32)), (candidate, np.array([1, 1, 1, 1, 0, 0], np.float16))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(mask, "m"))
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.uniform(0, 640, (4, 16, 4)), generator.random((4, 16, 2))], -1).astype(np.float32)
    message = (
        r"output 'y' \(rounded\): column 4 and 1 more on axis 2 is 0 throughout and up to .* it vanishes in half precision"
    )
    with pytest.raises(BudgetExceeded, match=message):
        verify(reference, candidate, x, cuda=False)


def test_a_task_judges_the_first_output_in_place_of_the_argmax() -> None:
    module, inputs = nn.Linear(8, 4).eval(), samples("mlp")
    seen: list[int] = []

    def judge(
        batches: Sequence[Feed], expected: Sequence[Array], actual: Sequence[Array], budget: Budget
    ) -> tuple[TaskFigure, ...]:
        seen.append(sum(len(batch) for batch in expected))
        assert [batch.shape for batch in expected] == [batch.shape for batch in actual]
        assert len(batches) == len(expected)
        return (TaskFigure("share of ones", 0.5, budget.min_agreement),)

    candidate = converted(module, inputs)
    with pytest.raises(BudgetExceeded, match="share of ones 0.5 \\(least 0.995\\)") as refused:
        verify(module, candidate, inputs, task=judge)
    assert set(seen) == {len(inputs)}
    certificate = refused.value.certificate
    assert [verdict.figures.agreement for verdict in certificate.outputs] == [None, None]
    assert read_certificate(certificate.to_bytes()).outputs == certificate.outputs
    allowed = verify(module, candidate, inputs, task=judge, budget=Budget(min_agreement=0.5))
    assert [verdict.task for verdict in allowed.outputs] == [(TaskFigure("share of ones", 0.5, 0.5),)] * 2
