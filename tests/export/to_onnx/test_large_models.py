from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from export.errors import ExportError
from export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import difference, session


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).eval()


INPUT = torch.rand(2, 3, 64)


def test_over_the_limit_weights_go_beside_the_file(tmp_path: Path) -> None:
    returned = export_onnx(model(), INPUT, tmp_path / "model.onnx", limit_bytes=10_000)
    data = sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".data")
    assert len(data) == 1
    assert (tmp_path / "model.onnx").stat().st_size < 10_000
    assert {t.data_location for t in returned.graph.initializer if t.name.endswith("weight")} == {onnx.TensorProto.EXTERNAL}
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    assert difference(model(), session(str(tmp_path / "model.onnx")), {"input": INPUT}) < 1e-6
    again = tmp_path / "again"
    again.mkdir()
    export_onnx(model(), INPUT, again / "model.onnx", limit_bytes=10_000)
    for name in ("model.onnx", *data):
        assert (again / name).read_bytes() == (tmp_path / name).read_bytes()


def test_external_data_can_be_asked_for_and_forbidden(tmp_path: Path) -> None:
    export_onnx(model(), INPUT, tmp_path / "model.onnx", external_data="yes")
    assert any(path.suffix == ".data" for path in tmp_path.iterdir())
    with pytest.raises(ExportError, match="too much for one file; allow external data"):
        export_onnx(model(), INPUT, tmp_path / "model.onnx", external_data="no", limit_bytes=10_000)


def test_large_models_need_a_path_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="give a path, beside which they can be stored"):
        export_onnx(model(), INPUT, limit_bytes=10_000)
    with pytest.raises(ExportError, match=r"cannot write .*nowhere/model\.onnx: No such file or directory"):
        export_onnx(model(), INPUT, tmp_path / "nowhere" / "model.onnx", limit_bytes=10_000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [17, 99, "18"])
def test_opsets_that_cannot_be_reached_are_refused(version: int) -> None:
    with pytest.raises(ExportError, match=f"opset_version is {version}; expected a whole number from 18 to 25"):
        export_onnx(model(), INPUT, opset_version=version)


@pytest.mark.parametrize("version", [18, 25])
def test_opsets_can_be_chosen(version: int) -> None:
    exported = export_onnx(model(), INPUT, opset_version=version)
    assert [(entry.domain, entry.version) for entry in exported.opset_import if not entry.domain] == [("", version)]
    assert difference(model(), session(exported), {"input": INPUT}) < 1e-5
