from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from export.certificate.certificate import BudgetExceeded, Certificate
from export.errors import ExportError
from export.halving.to_half import to_half
from export.to_onnx.export_onnx import export_onnx, serialize
from export.verification.budget import Budget
from export.verification.verify import verify
from tests.export import models
from tests.export.chain import chain

SHAPES = {"mlp": (8,), "cnn": (1, 8, 8), "lstm": (5, 8), "transformer": (5, 16)}


class Chain(nn.Module):
    """The torch twin of tests.export.chain: x * c * c / c / c."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 300.0 * 300.0 / 300.0 / 300.0


class Reciprocal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 / x


def samples(name: str, count: int = 40) -> Tensor:
    return torch.randn(count, *SHAPES[name], generator=torch.Generator().manual_seed(0))


def converted(module: nn.Module, inputs: Tensor) -> onnx.ModelProto:
    return export_onnx(to_half(module).module, inputs[:2].half())


@cache
def mlp_as_fp16() -> bytes:
    return serialize(converted(models.mlp(), samples("mlp")))


@pytest.mark.parametrize("name", SHAPES)
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


def test_accuracy_is_the_share_of_labels_met() -> None:
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
        r"output 'y' \(rounded\): 3 of 10 values are NaN or infinite \(limit 0\); keep the layers that overflow in float32",
    )
    assert [verdict.figures.non_finite for verdict in certificate.outputs] == [3, 0]
    assert not certificate.passed


def test_infinities_of_the_reference_are_not_held_against_the_candidate() -> None:
    reference, inputs = Reciprocal().eval(), torch.tensor([[0.0], [1.0], [-2.0]])
    certificate = verify(reference, converted(reference, inputs), inputs)
    assert certificate.passed
    assert certificate.outputs[0].figures.non_finite == 0


def test_nan_figures_never_pass() -> None:
    reference, inputs = Reciprocal().eval(), torch.zeros(2, 1)
    loose = Budget(max_abs_error=1e30, min_agreement=0, max_non_finite=10**6)
    failing(reference, converted(reference, inputs), inputs, loose, r"max abs error nan \(limit 1e\+30\)")


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (
            Budget(max_abs_error=1e-9),
            r"output 'output' \(rounded\): max abs error .* \(limit 1e-09\) \(and 1 more over budget\)",
        ),
        (Budget(max_scaled_error=1e-9), r"max error .* of the output's scale .* \(limit 1e-09\)"),
    ],
)
def test_over_budget_says_what_by_how_much_and_what_to_do(budget: Budget, message: str) -> None:
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
        (torch.rand(4, 7), None, "the reference model fails on the samples: mat1 and mat2 shapes"),
        ([torch.rand(4, 8), torch.rand(4, 8)], None, "the reference model fails on the samples: .* takes 2 positional"),
        ([torch.rand(4, 8), torch.rand(5, 8)], None, r"same number of samples first, at least 1; got \[4, 8\], \[5, 8\]"),
        (torch.rand(0, 8), None, r"at least 1; got \[0, 8\]"),
        (torch.zeros(4, 8, dtype=torch.long), None, "fails on the samples: mat1 and mat2 must have the same dtype"),
        (torch.rand(4, 8), torch.zeros(3), r"labels have shape \[3\], the first output's classes \[4\]"),
    ],
)
def test_samples_that_do_not_fit_are_refused(inputs: Tensor | list[Tensor], labels: Tensor | None, message: str) -> None:
    reference = models.mlp()
    with pytest.raises(ExportError, match=message):
        verify(reference, mlp_as_fp16(), inputs, labels=labels)


def test_references_that_prove_nothing_are_refused() -> None:
    candidate = mlp_as_fp16()
    with pytest.raises(ExportError, match="half-precision weights; expected the float32 model"):
        verify(models.mlp().half(), candidate, samples("mlp"))
    with pytest.raises(ExportError, match="reference model is in training mode"):
        verify(models.mlp().train(), candidate, samples("mlp"))
    with pytest.raises(ExportError, match=r"output 'output': the candidate has shape \[40, 10\], the reference \[40, 8\]"):
        verify(nn.Identity().eval(), candidate, samples("mlp"))


@pytest.mark.parametrize("content", [b"", b"not a model", np.random.default_rng(0).bytes(500)])
def test_files_that_are_no_models_are_refused(content: bytes) -> None:
    with pytest.raises(ExportError, match="is not an ONNX model or is damaged"):
        verify(models.mlp(), content, samples("mlp"))


def test_a_truncated_model_is_refused() -> None:
    content = mlp_as_fp16()
    with pytest.raises(ExportError, match="is not an ONNX model or is damaged"):
        verify(models.mlp(), content[: len(content) // 2], samples("mlp"))


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(ExportError, match="cannot read the model /nowhere/model.onnx: No such file"):
        verify(models.mlp(), "/nowhere/model.onnx", samples("mlp"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_agreement": 1.5}, "min_agreement is 1.5; expected a share from 0 to 1"),
        ({"max_abs_error": float("nan")}, "max_abs_error is nan; expected a number of at least 0"),
        ({"max_non_finite": -1}, "max_non_finite is -1; expected a number of at least 0"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        Budget(**settings)  # type: ignore[arg-type]  # (wrong on purpose)
