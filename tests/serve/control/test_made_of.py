from __future__ import annotations

from pathlib import Path

import pytest

from serve.control.made_of import MadeOf, made_of
from serve.engine.repository.model_repository import find_model
from tests.models import save_mlp


def looked_at(repository: Path) -> MadeOf:
    (files,) = find_model(repository, "mlp")
    return made_of(files, bare=False)


@pytest.mark.parametrize("place", ["model.onnx", "model.onnx/model.onnx"])
@pytest.mark.parametrize("changed", ["labels.txt", "1/model.onnx.data"])
def test_files_of_the_model_and_of_its_version_count(tmp_path: Path, place: str, changed: str) -> None:
    model = save_mlp(tmp_path / "mlp" / "1" / place)
    before = looked_at(tmp_path)
    assert looked_at(tmp_path) == before
    folder = model.parent if changed.startswith("1/") else tmp_path / "mlp"
    (folder / Path(changed).name).touch()
    assert looked_at(tmp_path) != before
