from __future__ import annotations

from pathlib import Path

import pytest
import torch
from onnx import TensorProto, helper

from tests.models import save_mlp, save_model, save_picky, save_unbatched
from tests.serve.backends.torch_programs import (
    save_torch_mlp,
    save_torch_picky,
    save_torch_same,
    save_torch_twice,
    save_torch_unbatched,
)

KINDS = ("onnx", "torch", "openvino", "onnx_on_openvino")


def save_onnx_twice(path: Path, number: int) -> Path:
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    return save_model(path, nodes, [("x", number, ["batch", 1])], [("y", number, ["batch", 1])])


def save_onnx_same(path: Path) -> Path:
    nodes, number = [helper.make_node("Identity", ["x"], ["y"])], TensorProto.FLOAT
    return save_model(path, nodes, [("x", number, ["batch", 1])], [("y", number, ["batch", 1])])


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A repository of the same models, by the kind of their files."""
    onnx, program, graph, on_openvino = (tmp_path_factory.mktemp(kind) for kind in KINDS)
    save_mlp(onnx / "mlp" / "1" / "model.onnx")
    save_onnx_twice(onnx / "twice" / "1" / "model.onnx", TensorProto.FLOAT16)
    save_onnx_twice(onnx / "twice_bf16" / "1" / "model.onnx", TensorProto.BFLOAT16)
    save_onnx_same(onnx / "same" / "1" / "model.onnx")
    save_picky(onnx / "picky" / "1" / "model.onnx")
    save_unbatched(onnx / "unbatched" / "1" / "model.onnx")
    save_torch_mlp(program / "mlp" / "1" / "model.pt2")
    save_torch_twice(program / "twice" / "1" / "model.pt2", torch.float16)
    save_torch_twice(program / "twice_bf16" / "1" / "model.pt2", torch.bfloat16)
    save_torch_same(program / "same" / "1" / "model.pt2")
    save_torch_picky(program / "picky" / "1" / "model.pt2")
    save_torch_unbatched(program / "unbatched" / "1" / "model.pt2")
    for folder in onnx.iterdir():
        save_graph(graph / folder.name / "1" / "model.xml", folder / "1" / "model.onnx")
        copied = on_openvino / folder.name / "1" / "model.onnx"
        copied.parent.mkdir(parents=True)
        copied.write_bytes((folder / "1" / "model.onnx").read_bytes())
        (on_openvino / folder.name / "config.pbtxt").write_text('backend: "openvino"')
    return dict(zip(KINDS, (onnx, program, graph, on_openvino), strict=True))


def save_graph(path: Path, onnx_file: Path) -> Path:
    """An ONNX model as OpenVINO's own file."""
    import openvino as ov  # noqa: PLC0415  (not where a GPU is tested)

    path.parent.mkdir(parents=True, exist_ok=True)
    ov.save_model(ov.Core().read_model(onnx_file), path, compress_to_fp16=False)
    return path
