from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfserve import ExportError, export_module
from halfserve.export.verification.torch_reference import FAST_PATH_NOTE, fast_path_note, require_batch_invariance, run_torch
from tests.amp_core.several_inputs import Reader, padded

WORDS = np.array([[3, 4, 0, 0], [5, 6, 7, 8]])
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("lengths", "expected"), [((2, 4), (FAST_PATH_NOTE,)), ((4, 4), ())])
def test_a_differing_fast_path_of_torch_is_noted(lengths: tuple[int, int], expected: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, feeds = padded().eval(), [{"words": WORDS, "lengths": np.array(lengths)}]
    assert fast_path_note(model, feeds, run_torch(model, feeds)) == expected
    assert fast_path_note(model, [], []) == ()


def test_a_model_without_attention_is_not_run_again() -> None:
    model, feeds = Reader().eval(), [{"words": WORDS, "lengths": np.array([2, 4])}]
    answers = run_torch(model, feeds)
    model.forward = None  # type: ignore[method-assign,assignment]  # (not to be called)
    assert fast_path_note(model, feeds, answers) == ()


class Formula(nn.Module):
    def __init__(self, formula: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.formula(*tensors)


def check(formula: Callable[..., Tensor | tuple[Tensor, ...]], tensors: Sequence[Tensor] = (X,)) -> None:
    require_batch_invariance(Formula(formula).eval(), [f"input_{place}" for place, _ in enumerate(tensors)], tensors)


@pytest.mark.parametrize(
    ("formula", "place"),
    [
        (lambda x: x - x.mean(0), 0),
        (lambda x: x.softmax(0), 0),
        (lambda x: x.cumsum(0), 0),
        (lambda x: (x * 2, x / x.abs().amax()), 1),
        (lambda x: x[:, 0].argsort().argsort(), 0),
        (lambda x: x[:, 0] >= x[:, 0].max(), 0),
    ],
)
def test_samples_that_change_each_others_answers_are_refused(
    formula: Callable[[Tensor], Tensor | tuple[Tensor, ...]], place: int
) -> None:
    with pytest.raises(ExportError, match=rf"^output {place} of a sample depends on the other samples .* --max-batch-size 1"):
        check(formula)


@pytest.mark.parametrize(
    "formula",
    [
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x.argmax(1),
        lambda x: x * (1 + 1e-4 * len(x)),
        lambda x: x * float("nan"),
        lambda x: x.sum(),
        lambda x: x[x > 0],
        torch.rand_like,
        lambda x: x[:0],
        lambda x: torch.full((len(x), 1), 1_000_000 + len(x)),
    ],
)
def test_batch_invariant_models_pass(formula: Callable[[Tensor], Tensor]) -> None:
    check(formula)


def test_scalar_inputs_are_shared_by_all_samples() -> None:
    check(lambda x, factor: x * factor, [X, torch.tensor(2.0)])
    with pytest.raises(ExportError, match="output 0"):
        check(lambda x, factor: (x - x.mean(0)) * factor, [X, torch.tensor(2.0)])


def test_one_sample_or_none_passes() -> None:
    check(lambda factor: factor * 2, [torch.tensor(2.0)])
    check(lambda x: x - x.mean(0), [X[:1]])


def test_nothing_is_written_for_a_model_that_mixes_samples(tmp_path: Path) -> None:
    model = Formula(lambda x: x - x.mean(0)).eval()
    with pytest.raises(ExportError, match="a server joins what different clients ask"):
        export_module(model, X, tmp_path, "centred")
    assert not list(tmp_path.iterdir())
    done = export_module(model, X, tmp_path, "centred", max_batch_size=1)
    assert "max_batch_size: 1" in (tmp_path / "centred" / "config.pbtxt").read_text()
    assert done.certificate is not None
    assert done.certificate.passed
