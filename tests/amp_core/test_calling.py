from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_core.calling import arguments_of, call, described_call, without_fast_path
from tests.amp_core.several_inputs import padded

A, B = torch.zeros(2), torch.ones(2)


def taking(forward: Callable[..., Any]) -> nn.Module:
    model = nn.Module()
    model.forward = forward
    return model


@pytest.mark.parametrize(
    ("forward", "inputs", "expected"),
    [
        (lambda x: x, A, ((A,), {})),
        (lambda x, y: x, (A, B), ((A, B), {})),
        (lambda x, y: x, [A, B], ((A, B), {})),
        (lambda x, mask=None: x, (A, B), ((A, B), {})),
        (lambda x: x, (A,), ((A,), {})),
        (lambda pair: pair, (A, B), (((A, B),), {})),
        (lambda *rest: rest, (A, B), ((A, B), {})),
        (lambda x, y: x, {"y": B, "x": A}, ((), {"y": B, "x": A})),
        (lambda x, y=None: x, {"x": A}, ((), {"x": A})),
        (lambda batch: batch, {"x": A, "y": B}, (({"x": A, "y": B},), {})),
        (lambda x, y: x, {"x": A, "z": B}, (({"x": A, "z": B},), {})),
        (lambda **named: named, {"x": A}, ((), {"x": A})),
        (lambda batch: batch, {0: A}, (({0: A},), {})),
        (lambda x, y: x, ((A, B), {"z": A}), (((A, B), {"z": A}), {})),
    ],
)
def test_forward_gets_its_inputs_as_it_takes_them(forward: Callable[..., Any], inputs: Any, expected: Any) -> None:
    args, named = arguments_of(taking(forward), inputs)
    assert repr((args, named)) == repr(expected)


def test_what_stands_before_the_model_gets_the_same_arguments() -> None:
    class Before(nn.Module):
        def forward(self, *args: Tensor, **named: Tensor) -> Any:
            return args, named

    model = taking(lambda x, y: [x, y])
    assert call(model, {"y": B, "x": A})[0] is A
    args, named = call(model, {"y": B, "x": A}, through=Before())
    assert (args, list(named)) == ((), ["y", "x"])
    args, named = call(model, (A, B), through=Before())
    assert (len(args), named) == (2, {})


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_evaluation_is_what_training_computes() -> None:
    torch.manual_seed(0)
    model = padded().eval()
    words, lengths = torch.tensor([[3, 4, 0, 0], [5, 6, 7, 8]]), torch.tensor([2, 4])
    with torch.no_grad(), without_fast_path():
        slow = model(words, lengths)
    with torch.no_grad():
        fast = model(words, lengths)
        trained = model.train()(words, lengths)  # its dropout is 0
    torch.testing.assert_close(slow, trained)
    assert (fast - trained)[0].abs().max() > 0.01
    torch.testing.assert_close(fast[1], trained[1])  # nothing of it is hidden


@pytest.mark.parametrize("before", [False, True])
def test_the_setting_is_the_callers_again(before: bool) -> None:
    torch.backends.mha.set_fastpath_enabled(before)
    try:
        with without_fast_path():
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() is before
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize(
    ("inputs", "given"),
    [
        ({"x": A, "y": B}, "; forward takes (x, y) and got the inputs by name, x, y"),
        ((A, B), "; forward takes (x, y) and got the inputs in order, 2 of them"),
        ({"x": A, "z": B}, "; forward takes (x, y) and got the inputs all in one, a dict of x, z"),
        ([A, B, A], "; forward takes (x, y) and got the inputs all in one, a list of 3"),
        (A, ""),
    ],
)
def test_a_call_is_described_by_what_forward_takes_and_gets(inputs: Any, given: str) -> None:
    assert described_call(taking(lambda x, y: x + y), inputs) == given
