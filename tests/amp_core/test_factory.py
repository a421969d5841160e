from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch

from amp_core.factory import FactoryError, call_factory, load_factory

if TYPE_CHECKING:
    from pathlib import Path

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
    with pytest.raises(FactoryError, match="names no factory; expected MODULE:FACTORY, such as examples.digits.model:model"):
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
