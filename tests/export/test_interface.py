from __future__ import annotations

import subprocess
import sys

import pytest

import export


@pytest.mark.parametrize("name", export.__all__)
def test_every_public_name_is_there_and_is_no_module(name: str) -> None:
    found = getattr(export, name)
    assert callable(found)
    assert found.__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'export' has no attribute 'nope'"):
        _ = export.nope


def test_a_model_that_imports_the_helpers_does_not_load_onnx() -> None:
    program = "import sys; from export import new_zeros, mask_value; print({'onnx', 'onnxruntime'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
