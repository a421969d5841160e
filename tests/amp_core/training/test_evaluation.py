"""Figures over held-out data, worked out by hand."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_core.training.evaluation import evaluate


class Shown(nn.Module):
    """Gives its input back, and notes in which mode it did."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        return x


def absolute(outputs: Tensor, targets: Any) -> Tensor:
    wanted: Tensor = targets["far"][0] if isinstance(targets, dict) else targets
    return (outputs.mean() - wanted.double().mean()).abs()


@pytest.mark.parametrize("training", [True, False])
def test_the_mean_is_over_items_and_the_mode_stays(training: bool) -> None:
    model = Shown().train(training)
    batches = [(torch.full((3, 1), 2.0), torch.zeros(3, 1)), (torch.full((1, 1), 10.0), torch.zeros(1, 1))]
    assert evaluate(model, absolute, batches, nullcontext()) == {"loss": (3 * 2.0 + 10.0) / 4}
    assert (model.modes, model.training) == ([False, False], training)


def test_a_classifier_has_its_share_of_hits() -> None:
    outputs = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    batches = [(outputs[:3], torch.tensor([1, 0, 1])), (outputs[3:], torch.tensor([1]))]
    figures = evaluate(Shown(), nn.CrossEntropyLoss(), batches, nullcontext())
    assert figures["accuracy"] == 3 / 4
    mixed = [*batches, (outputs[3:], torch.ones(1, 2))]
    assert set(evaluate(Shown(), nn.CrossEntropyLoss(), mixed, nullcontext())) == {"loss"}


def test_targets_may_lie_deep_and_there_may_be_none() -> None:
    batches = [(torch.full((3, 1), 2.0), {"far": (torch.zeros(3),)}), (torch.full((1, 1), 6.0), {"far": [torch.zeros(1)]})]
    assert evaluate(Shown(), absolute, batches, nullcontext()) == {"loss": 3.0}
    assert evaluate(Shown(), absolute, [], nullcontext()) == {}


@pytest.mark.parametrize("targets", [(), {}, [{}], torch.tensor(5.0)], ids=["tuple", "dict", "nested", "scalar"])
def test_where_no_target_counts_the_items_the_inputs_do(targets: Any) -> None:
    batches = [(torch.full((3, 1), 2.0), targets), (torch.full((1, 1), 10.0), targets)]
    assert evaluate(Shown(), lambda outputs, _: outputs.mean(), batches, nullcontext()) == {"loss": 4.0}


def test_a_batch_without_anything_to_count_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensor among targets and inputs has a dimension"):
        evaluate(Shown(), lambda outputs, _: outputs, [(torch.tensor(1.0), ())], nullcontext())
