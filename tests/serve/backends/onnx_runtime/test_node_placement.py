from __future__ import annotations

from pathlib import Path

import pytest

from serve.backends.onnx_runtime.backend import OnnxRuntime
from serve.engine.backend import DevicePlacement
from serve.engine.config.model_config import Defaults
from serve.engine.repository.loaded_version import load_version
from serve.engine.repository.model_repository import find_models
from tests.models import save_mlp, save_unbatched


@pytest.mark.parametrize(("save", "nodes"), [(save_mlp, range(3, 20)), (save_unbatched, range(1, 2))])
def test_every_node_has_its_provider_in_the_config(tmp_path: Path, save: object, nodes: range) -> None:
    (files,) = find_models(save(tmp_path / "m.onnx"))  # type: ignore[operator]  # (a function of the list above)
    version = load_version(files, OnnxRuntime(), DevicePlacement(use_gpu=False, threads=1), Defaults())
    name, count = version.config.parameters["halfserve.nodes"].string_value.split("=")
    assert name == version.backends[0].provider == "CPUExecutionProvider"
    assert int(count) in nodes
