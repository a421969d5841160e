"""Class 13: scattering with a reduction, for which ONNX Runtime's CPU has no float16 and puts no casts in."""

from __future__ import annotations

import numpy as np
import pytest

from tests.export.failure_classes.converters import Converter, both, normal, parse


@both
@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
def test_scatter_nd(reduction: str, converter: Converter) -> None:
    model = parse(f"""g (float[4, 3] x, float[2, 3] u) => (float[4, 3] y) {{
        r = Relu (x)
        s = ScatterND <reduction = "{reduction}"> (r, at, u)
        y = Neg (s) }}""", 18, at=np.array([[1], [1]], np.int64))  # fmt: skip
    converter.try_on(model, {"x": normal(4, 3), "u": normal(2, 3, seed=1)})


@both
@pytest.mark.parametrize("reduction", ["add", "mul"])
def test_scatter_elements(reduction: str, converter: Converter) -> None:
    model = parse(f"""g (float[4, 3] x, float[2, 3] u) => (float[4, 3] y) {{
        r = Relu (x)
        s = ScatterElements <axis = 0, reduction = "{reduction}"> (r, at, u)
        y = Neg (s) }}""", 18, at=np.array([[1, 2, 3], [1, 2, 3]], np.int64))  # fmt: skip
    converter.try_on(model, {"x": normal(4, 3), "u": normal(2, 3, seed=1)})
