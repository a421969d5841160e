"""Factories that users name, and how their models are called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfserve.amp_core.calling import arguments_of, call, described_call, without_fast_path
from halfserve.amp_core.factory import FactoryError, call_factory, load_factory
from tests.amp_core.several_inputs import padded

SOURCE = """
import torch

class Net(torch.nn.Linear):
    def __init__(self): super().__init__(2, 1)

def model(): return Net()
def broken(): raise KeyError("which key")
def two(a, b): return a
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, under a name that no other test has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    name = f"factories_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"{name}_needs.py").write_text("import package_that_is_not_there")
    (tmp_path / f"{name}_fails.py").write_text("1 / 0")
    return name


def test_functions_and_classes_are_found_in_the_working_directory(module: str) -> None:
    assert isinstance(call_factory(f"{module}:model"), torch.nn.Linear)
    assert isinstance(call_factory(f"{module}:Net"), torch.nn.Linear)
    assert load_factory("torch.nn.functional:cross_entropy") is torch.nn.functional.cross_entropy


@pytest.mark.parametrize("spec", ["", "module", "module:", ":name", "a b:c", "module:a.b", "module:factory:x", "../x:y"])
def test_what_is_no_spec(spec: str) -> None:
    with pytest.raises(
        FactoryError, match="names no factory; expected MODULE:FACTORY, such as halfserve.examples.digits.model:model"
    ):
        load_factory(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("M:modle", "the module M has no 'modle'; did you mean 'model'?"),
        ("M:number", "'M:number' is a int, not a function or class that can be called"),
        ("Mx:model", "there is no module 'Mx' in .* or the installed packages; did you mean 'M'?"),
        ("M.py:model", "there is no module 'M.py' in .*; did you mean 'M'. A module is named without .py"),
        ("torch.nn.functionl:relu", "there is no module 'torch.nn.functionl' in .*; did you mean 'functional'?"),
        ("no_such.module.at_all:x", "there is no module 'no_such'"),
        ("M_needs:x", "M_needs needs the package 'package_that_is_not_there', which is not installed"),
        ("M_fails:x", "importing M_fails raised ZeroDivisionError: division by zero"),
        ("M:broken", "'M:broken' raised KeyError: 'which key' when called without arguments"),
        ("M:two", r"'M:two' raised TypeError: two\(\) missing 2 required positional arguments"),
    ],
)
def test_every_error_is_one_line_that_helps(module: str, spec: str, message: str) -> None:
    with pytest.raises(FactoryError, match=message.replace("M", module).replace("?", r"\?")) as error:
        call_factory(spec.replace("M", module))
    assert "\n" not in str(error.value)


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
