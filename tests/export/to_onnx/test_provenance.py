from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from halfserve.export.to_onnx import provenance
from halfserve.export.to_onnx.export_onnx import export_onnx
from halfserve.export.to_onnx.provenance import MODULE, OP, SOURCE
from tests.export import models


def notes(node: onnx.NodeProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


def test_every_node_says_where_it_comes_from_and_nothing_else() -> None:
    found = {node.op_type: notes(node) for node in export_onnx(models.lstm(), torch.rand(2, 5, 8)).graph.node}
    assert all(set(entry) <= {MODULE, SOURCE, OP} and MODULE in entry for entry in found.values())
    assert found["LSTM"][MODULE] == "lstm"
    assert found["LSTM"][OP] == "aten::lstm"
    assert found["Gemm"][MODULE] == "head"
    line = models.Lstm.forward.__code__.co_firstlineno + 1
    assert found["Gemm"][SOURCE] == f"tests/export/models.py:{line}"


def test_modules_in_modules_have_dotted_paths_and_sources_of_torch_are_the_last_resort() -> None:
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh())).eval()
    found = {node.op_type: notes(node) for node in export_onnx(nested, torch.rand(2, 4)).graph.node}
    assert found["Tanh"][MODULE] == "0.1"
    assert re.fullmatch(r"torch/nn/modules/activation\.py:\d+", found["Tanh"][SOURCE])


def test_weights_have_the_modules_names_and_are_stored_as_they_are_read() -> None:
    linear = nn.Linear(4, 3).eval()
    model = export_onnx(linear, torch.rand(2, 5, 4))
    assert {tensor.name: list(tensor.dims) for tensor in model.graph.initializer} == {"weight": [4, 3], "bias": [3]}
    assert [node.op_type for node in model.graph.node] == ["MatMul", "Add"]


def test_a_tied_weight_is_stored_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.embedding(ids), self.embedding.weight)

    model = export_onnx(Tied().eval(), torch.ones(2, 3, dtype=torch.int64))
    assert [list(t.dims) for t in model.graph.initializer if len(t.dims) == 2] == [[50, 8]]


def test_the_hash_follows_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return x {}\n"
    hashes = []
    for name, change in (("hashed_a", "+ 1"), ("hashed_b", "+ 2")):
        (tmp_path / f"{name}.py").write_text(text.format(change))
        kind = __import__(name).Net
        kind.__module__, kind.__qualname__ = name, "Net"
        hashes.append(provenance.source_hash(kind()))
    assert hashes[0] != hashes[1]
    assert provenance.source_hash(models.lstm()) == provenance.source_hash(models.lstm())
    typed_in = type("TypedIn", (nn.Module,), {})
    assert len(provenance.source_hash(typed_in())) == 64


class Lazy(types.ModuleType):
    """A module that imports another when it is asked for anything, which is not installed."""

    def __getattr__(self, name: str) -> None:
        raise ImportError(name)


def test_modules_that_import_themselves_late_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    assert export_onnx(nn.Linear(4, 3).eval(), torch.rand(2, 4)).graph.node
