"""A framework that is not installed is named, with the command that installs it."""

from __future__ import annotations

import importlib
import sys

import pytest

from amp_core.integrations.requirement import not_installed

OURS = "amp_core.integrations"


@pytest.mark.parametrize(
    ("module", "package", "minimum"), [("lightning", "lightning", "2.6"), ("accelerate", "accelerate", "1.15")]
)
def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch, module: str, package: str, minimum: str) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{OURS}.") or name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"needs {package}, which is not installed: pip install '{package}>={minimum}'"):
        importlib.import_module(f"{OURS}.{module}")


def test_another_missing_module_is_left_as_it_is() -> None:
    error = ModuleNotFoundError("No module named 'yaml'", name="yaml")
    assert not_installed(error, "lightning", "2.6") is error


def test_the_folder_itself_imports_no_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("lightning", "accelerate"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, OURS)
    importlib.import_module(OURS)
