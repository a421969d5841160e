from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor, nn

from halfserve.amp_core.policy import Policy
from halfserve.export.export_errors import ExportError
from halfserve.export.half_module.to_half import to_half
from halfserve.export.to_onnx import provenance
from halfserve.export.to_onnx.export_onnx import export_onnx, serialize
from halfserve.export.to_onnx.provenance import MODULE, OP, SOURCE
from tests.export import models
from tests.export.to_onnx.answers import difference, fed, session


class Frozen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0, 1, x.shape[1])


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Svd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svd(x).S  # type: ignore[no-any-return]  # (torch's return types are untyped)


def shape(value: onnx.ValueInfoProto) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def test_batch_is_dynamic_and_names_are_the_models() -> None:
    model = export_onnx(models.TwoHeads().eval(), [torch.rand(1, 4).half(), torch.ones(1, 4).half()])
    assert [(value.name, shape(value)) for value in model.graph.input] == [("features", ["batch", 4]), ("mask", ["batch", 4])]
    assert [(value.name, shape(value)) for value in model.graph.output] == [("masked", ["batch", 4]), ("total", ["batch"])]
    assert {value.type.tensor_type.elem_type for value in [*model.graph.input, *model.graph.output]} == {TensorProto.FLOAT16}


@pytest.mark.long
def test_outputs_may_be_called_like_values_inside() -> None:
    model = export_onnx(models.mlp(), torch.rand(2, 8), output_names=["linear"])
    assert [value.name for value in model.graph.output] == ["linear"]
    passed = export_onnx(nn.Identity().eval(), torch.rand(2, 8), output_names=["input"])
    assert (passed.graph.input[0].name, passed.graph.output[0].name) == ("input", "input_output")


@pytest.mark.parametrize("names", [["a", "a"], ["a"], ["a", ""]])
def test_names_must_be_one_each(names: list[str]) -> None:
    with pytest.raises(ExportError, match="input and output names must be one each and differ"):
        export_onnx(models.TwoHeads().eval(), [torch.rand(2, 4), torch.ones(2, 4)], output_names=names)


def test_names_and_sizes_can_be_chosen() -> None:
    model = export_onnx(
        models.lstm(), torch.rand(2, 5, 8), dynamic_shapes=({0: "rows"},), input_names=["in"], output_names=["out"]
    )
    assert (model.graph.input[0].name, shape(model.graph.input[0])) == ("in", ["rows", 5, 8])
    assert (model.graph.output[0].name, shape(model.graph.output[0])) == ("out", ["rows", 3])
    assert shape(export_onnx(models.mlp(), torch.rand(3, 8), dynamic_shapes=()).graph.input[0]) == [3, 8]


def test_provenance_travels_and_the_machine_does_not() -> None:
    model = export_onnx(models.mlp(), torch.rand(2, 8), metadata={"owner": "us"})
    found = {entry.key: entry.value for entry in model.metadata_props}
    assert found["halfserve.torch"] == torch.__version__
    assert found["halfserve.opset"] == str(model.opset_import[0].version)
    assert (found["halfserve.source"], found["owner"]) == ("torch.nn.modules.container.Sequential", "us")
    assert (found["halfserve.dimensions"], len(found["halfserve.source_sha256"])) == ('{"batch": [1, null]}', 64)
    assert "halfserve.policy" not in found
    assert str(Path(__file__).parent).encode() not in serialize(model)


@pytest.mark.long
def test_the_policy_travels() -> None:
    found = export_onnx(models.mlp(), torch.rand(2, 8), policy=Policy.parse("cuda+fp32:gelu")).metadata_props
    assert next(entry.value for entry in found if entry.key == "halfserve.policy") == "cuda+fp32:gelu"


def test_a_batch_norm_is_not_folded_in_float16() -> None:
    half = models.cnn().half()
    model = export_onnx(half, torch.rand(2, 1, 8, 8).half())
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "0.weight")
    assert "BatchNormalization" in [node.op_type for node in model.graph.node]
    assert torch.equal(torch.from_numpy(onnx.numpy_helper.to_array(weight).copy()), half.get_parameter("0.weight"))


@pytest.mark.long
def test_a_sum_in_float16_is_an_output_in_float16() -> None:
    model = export_onnx(models.TwoHeads().eval(), {"features": torch.rand(2, 4).half(), "mask": torch.ones(2, 4).half()})
    answer = fed(session(model), {"features": torch.ones(3, 4).half(), "mask": torch.ones(3, 4).half()})
    assert (str(answer["total"].dtype), answer["total"].tolist()) == ("float16", [4, 4, 4])


@pytest.mark.long
def test_the_same_module_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from tests.export import models; from halfserve.export.half_module.to_half import to_half; "
        "from halfserve.export.to_onnx.export_onnx import export_onnx; "
        "export_onnx(to_half(models.cnn()).module, torch.rand(2, 1, 8, 8).half(), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "other.onnx")], check=True, capture_output=True)
    export_onnx(to_half(models.cnn()).module, torch.rand(3, 1, 8, 8).half(), tmp_path / "here.onnx")
    assert (tmp_path / "here.onnx").read_bytes() == (tmp_path / "other.onnx").read_bytes()


def test_it_prints_nothing(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ExportError):
        export_onnx(Branching().eval(), torch.rand(2, 3))
    export_onnx(models.mlp(), torch.rand(2, 8))
    assert capfd.readouterr() == ("", "")


@pytest.mark.long
def test_float32_modules_of_a_half_model_have_their_casts() -> None:
    model = export_onnx(to_half(models.cnn(), keep_fp32=["1"]).module, torch.rand(2, 1, 8, 8).half())
    assert [node.op_type for node in model.graph.node][:4] == ["Conv", "Cast", "BatchNormalization", "Cast"]


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (
            Branching(),
            [torch.rand(2, 3)],
            "torch.export cannot capture the model: GuardOnDataDependentSymNode: Could not guard",
        ),
        (Svd(), [torch.rand(2, 3, 3)], "torch.onnx cannot express the model: DispatchError: No ONNX function found for .*svd"),
        (models.mlp(), [torch.rand(2, 5)], r"the model fails on inputs float32\[2, 5\]: RuntimeError: mat1 and mat2 shapes"),
        (models.mlp(), [torch.rand(2, 8).half()], r"the model fails on inputs float16\[2, 8\]"),
        (models.mlp(), [], "does not take these inputs: missing a required argument"),
        (
            models.TwoHeads(),
            [torch.rand(2, 4), torch.rand(3, 4)],
            "dimension 'batch' must be one size .* 2 in 'features' and 3 in 'mask'",
        ),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(module: nn.Module, inputs: list[Tensor], message: str) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        export_onnx(module.eval(), inputs)
    assert "\n" not in str(caught.value)


def test_a_size_that_the_code_fixes_is_refused() -> None:
    with pytest.raises(ExportError, match="fixes dimension 'n' at 5"):
        export_onnx(Frozen().eval(), torch.rand(2, 5), dynamic_shapes=({0: "batch", 1: "n"},))


def test_training_mode_is_refused() -> None:
    with pytest.raises(ExportError, match=r"training mode.*call \.eval\(\) first"):
        export_onnx(nn.Linear(2, 2).train(), torch.rand(2, 2))


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"cannot write .*nowhere/model\.onnx: No such file or directory"):
        export_onnx(models.mlp(), torch.rand(2, 8), tmp_path / "nowhere" / "model.onnx")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).eval()


INPUT = torch.rand(2, 3, 64)


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("version", [18, 25])
def test_opsets_can_be_chosen(version: int) -> None:
    exported = export_onnx(model(), INPUT, opset_version=version)
    assert [(entry.domain, entry.version) for entry in exported.opset_import if not entry.domain] == [("", version)]
    assert difference(model(), session(exported), {"input": INPUT}) < 1e-5


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
