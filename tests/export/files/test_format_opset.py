from __future__ import annotations

import onnx
import pytest

from export.files.format_opset import format_opset


@pytest.mark.parametrize(("ir_version", "opset"), [(3, 8), (8, 18), (9, 20), (11, 23), (1000, onnx.defs.onnx_opset_version())])
def test_it_is_the_newest_that_the_format_had(ir_version: int, opset: int) -> None:
    assert format_opset(ir_version) == opset
