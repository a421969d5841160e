"""What is said of a search that could not succeed."""

from __future__ import annotations

import numpy as np

from export.certificate.budget import Budget
from export.search.smallest_fp32_set import find_fp32_nodes
from tests.export.onnx_fp16.models import parse


def test_outputs_without_elements_are_nothing_to_search_by() -> None:
    model = parse(
        """g (float[n, 4] x) => (float[m, 4] y)
        <int64[1] nothing = {0}> {
            grown = Exp(x)
            y = Slice(grown, nothing, nothing)
        }"""
    )
    found = find_fp32_nodes(model, [np.ones((3, 4), np.float32)], budget=Budget())
    assert not found.passed
    assert found.explanation == "nothing was compared: no output has elements on these samples; give others"
