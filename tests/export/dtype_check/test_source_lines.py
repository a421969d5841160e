from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from halfserve.export.dtype_check.source_lines import SourceLine, SourceLocator, assigned_at, autocast_region
from tests.export.dtype_check.pairs.held import Attribute


def test_a_frame_belongs_to_torch_a_library_or_the_user() -> None:
    locator = SourceLocator.of(nn.Linear(1, 1))
    assert locator.owner(torch.__file__) == "machinery"
    assert locator.owner(os.__file__) == "machinery"
    assert locator.owner("<string>") == "machinery"
    assert locator.owner(pytest.__file__) == "library"
    assert locator.owner(__file__) == "user"
    assert SourceLocator(frozenset({"pytest"})).owner(pytest.__file__) == "user"


def test_the_innermost_line_of_the_user_counts() -> None:
    locator = SourceLocator(frozenset())
    lines = [(__file__, 1), (torch.__file__, 2), (__file__, 3), (torch.__file__, 4), (pytest.__file__, 5)]
    assert locator.from_texts(iter(lines)) == SourceLine(__file__, 3)
    assert locator.from_texts(iter([(torch.__file__, 2)])) is None
    here = locator.here()
    assert here is not None
    assert here.source == "here = locator.here()"


def test_files_are_named_as_short_as_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert SourceLine(str(tmp_path / "model.py"), 3).file == "model.py"
    assert str(SourceLine(torch.__file__, 7)) == "torch/__init__.py:7"
    assert SourceLine("/elsewhere/model.py", 1).file == "/elsewhere/model.py"
    assert SourceLine("/elsewhere/model.py", 1).source == ""


def test_an_assignment_is_found_in_the_class_or_its_parents() -> None:
    class Child(Attribute):
        pass

    place = assigned_at(Child, "scale")
    assert place is not None
    assert place.source == "self.scale = torch.ones(4) / 3  # here"
    assert assigned_at(Child, "nothing") is None
    assert assigned_at(nn.Linear, "weight") is None
    made = type("Made", (nn.Module,), {})
    assert assigned_at(made, "scale") is None


def test_a_line_outside_of_autocast_has_no_region() -> None:
    assert autocast_region(SourceLine(__file__, 1)) is None
    assert autocast_region(SourceLine("/no/such/file.py", 1)) is None
