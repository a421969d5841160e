from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch

from halfserve.export.half_module.to_half import to_half
from halfserve.export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import difference, halved, session
from tests.export.to_onnx.families import FAMILIES, resized

FP32_TOLERANCE, HALF_TOLERANCE = 5e-6, 5e-3
SINGLE = [name for name, family in FAMILIES.items() if family.single]
HALF = [name for name, family in FAMILIES.items() if family.half]


def lanes(names: list[str], *, short: set[str]) -> list[Any]:
    """Representatives in the short lane, the other families in the long one."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in names]


@pytest.mark.long
@pytest.mark.parametrize("name", lanes(SINGLE, short={"bert"}))
def test_float32_answers_as_torch_does_at_every_size(name: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    module = family.make().eval()
    model = export_onnx(module, family.inputs, dynamic_shapes=family.shapes)
    opened = session(model)
    for batch, length in product((1, 2, 5), family.lengths):
        found = difference(module, opened, resized(family, batch, length))
        assert found < FP32_TOLERANCE, (batch, length)
    assert all(any(entry.key == "halfserve.module" for entry in node.metadata_props) for node in model.graph.node)
    limits = json.loads(next(entry.value for entry in model.metadata_props if entry.key == "halfserve.dimensions"))
    assert set(limits) == {size for sizes in family.shapes.values() for size in sizes.values()}
    assert limits["batch"] == [1, None]
    least, most = limits.get("length", [1, None])
    assert least <= min(family.lengths)
    assert most is None or max(family.lengths) <= most


@pytest.mark.long
@pytest.mark.parametrize("name", lanes(HALF, short={"vit"}))
def test_the_half_module_answers_within_float16_at_every_size(name: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    module = family.make().eval()
    model = export_onnx(to_half(module).module, halved(family.inputs), dynamic_shapes=family.shapes)
    opened = session(model)
    for batch, length in product((1, 2, 5), family.lengths):
        assert difference(module, opened, resized(family, batch, length), half=True) < HALF_TOLERANCE, (batch, length)
