"""The architectures that users bring end in float16 models within the budget, at other sizes too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halfserve.export.export_errors import ExportError
from halfserve.export.module_pipeline import export_module
from tests.export.architectures import ARCHITECTURES, FAILING, natural_weights
from tests.export.to_onnx.answers import difference, session

SHORT = {"bert"}
# Of an output's largest magnitude: more than float16's rounding, and far less than a wrong mask or size makes.
ROUNDING = 0.02


def marked(name: str) -> Any:
    marks = [] if name in SHORT else [pytest.mark.long]
    if name in FAILING:
        marks.append(pytest.mark.xfail(raises=ExportError, strict=True, reason=FAILING[name]))
    return pytest.param(name, marks=marks)


@pytest.mark.long
@pytest.mark.parametrize("name", [marked(name) for name in ARCHITECTURES])
@pytest.mark.filterwarnings("ignore")  # the architectures' own
def test_architecture_is_exported_within_budget_at_any_size(name: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    samples = architecture.inputs(architecture.length)
    module = natural_weights(architecture.make().eval(), samples)
    done = export_module(module, samples, tmp_path, "model", dynamic=architecture.dynamic, keep_io_types=False)
    assert done.certificate.passed
    other = {key: tensor[:3] for key, tensor in architecture.inputs(architecture.other).items()}
    assert difference(module, session(str(done.path / "model.onnx")), other, half=True) < ROUNDING
