from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

from halfserve import BudgetExceeded, ExportError, export_module, export_onnx, find_dtype_leaks
from halfserve.amp_core.recorder import Recorder
from halfserve.export.certificate.budget import Budget
from halfserve.export.file_conversion import BFLOAT16_WEIGHTS
from halfserve.export.half_types import HalfName, TargetDevice
from halfserve.export.placement.cuda_kernels import predict_cuda
from tests.amp_core.several_inputs import LENGTH, Reader, Words
from tests.export import models


def words(count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    items = [Words(count, 3)[index] for index in range(count)]
    inputs = {name: torch.stack([inputs[name] for inputs, _ in items]) for name in ("words", "lengths")}
    return inputs, torch.stack([target for _, target in items])


def test_a_module_of_ones_own_becomes_a_certified_version(tmp_path: Path) -> None:
    inputs, labels = words(40)
    told: list[str] = []
    done = export_module(
        Reader().eval(), inputs, tmp_path, "reader", labels=labels, dynamic={"words": {1: "length"}}, progress=told.append
    )
    assert done.path == tmp_path / "reader" / "1"
    assert (done.certificate.samples, done.certificate.passed) == (40, True)
    assert done.certificate.accuracy is not None
    graph = onnx.load(done.path / "model.onnx").graph
    assert [value.name for value in graph.input] == ["words", "lengths"]
    assert graph.input[0].type.tensor_type.shape.dim[1].dim_param == "length"
    assert told[0] == "exporting to ONNX"


def test_numpy_arrays_are_samples_labels_and_examples(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((16, 4))  # float64, numpy's own type
    rows.flags.writeable = False  # as of a file that is mapped into memory
    module = nn.Linear(4, 2).eval()
    done = export_module(module, {"input": rows}, tmp_path, "linear", labels=np.zeros(16, np.int32))
    assert done.certificate.samples == 16
    assert done.certificate.accuracy is not None
    assert "rounded to the model's float32" in (done.path / "certificate.json").read_text()
    assert export_onnx(module, rows.astype(np.float32)).graph.input[0].name == "input"
    assert not find_dtype_leaks(module, rows.astype(np.float32)).findings


def test_a_config_of_other_sizes_is_refused_before_the_conversion(tmp_path: Path) -> None:
    export_module(nn.Linear(4, 2).eval(), torch.rand(4, 4), tmp_path, "linear")
    told: list[str] = []
    expected = r"config.pbtxt says input 'input' is .*\[4\], the model has .*\[3\]; mend that file, delete it to have"
    with pytest.raises(ExportError, match=expected):
        export_module(nn.Linear(3, 2).eval(), torch.rand(4, 3), tmp_path, "linear", progress=told.append)
    assert told == ["exporting to ONNX", "reading the model"]
    (tmp_path / "linear" / "config.pbtxt").unlink()
    assert export_module(nn.Linear(3, 2).eval(), torch.rand(4, 3), tmp_path, "linear").path.name == "2"
    # Types that the conversion changes are no difference.
    export_module(nn.Linear(4, 2).eval(), torch.rand(4, 4), tmp_path, "half", keep_io_types=False)
    assert export_module(nn.Linear(4, 2).eval(), torch.rand(4, 4), tmp_path, "half", keep_io_types=False).path.name == "2"


@pytest.mark.long
def test_inputs_in_order_and_alone(tmp_path: Path) -> None:
    inputs, _ = words(8)
    in_order = export_module(Reader().eval(), (inputs["words"], inputs["lengths"]), tmp_path, "in_order")
    alone = export_module(nn.Linear(LENGTH, 2).eval(), torch.rand(8, LENGTH), str(tmp_path), "alone", max_batch_size=4)
    assert [done.path.name for done in (in_order, alone)] == ["1", "1"]
    assert "max_batch_size: 4" in (tmp_path / "alone" / "config.pbtxt").read_text()
    assert export_module(nn.Linear(LENGTH, 2).eval(), torch.rand(8, LENGTH), tmp_path, "alone").path.name == "2"


@pytest.mark.long
def test_what_overflows_is_searched_for_unless_told_otherwise(tmp_path: Path) -> None:
    samples = torch.stack([models.rows()[1][index][0] for index in range(10)])
    with pytest.raises(BudgetExceeded, match="NaN or infinite"):
        export_module(models.peaking().eval(), samples, tmp_path, "peaking", search=False)
    assert not list(tmp_path.iterdir())
    done = export_module(models.peaking().eval(), samples, tmp_path, "peaking", policy="cuda", fp32_twin=True)
    assert done.search is not None
    assert done.search.passed
    assert (done.path / "fp32" / "model.onnx").is_file()


@pytest.mark.long
def test_an_output_that_no_float16_holds_keeps_its_type_by_name(tmp_path: Path) -> None:
    module, samples = models.pricing(), torch.rand(10, 4)
    with pytest.raises(BudgetExceeded, match=r"'price' reaches .* without --float16-io, .*keep_io_types=\['price'\]"):
        export_module(module, samples, tmp_path, "pricing", keep_io_types=False, search=False)
    done = export_module(module, samples, tmp_path, "pricing", keep_io_types=["price"])
    graph = onnx.load(done.path / "model.onnx").graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    assert types == {"x": half, "click": half, "price": single}
    with pytest.raises(ExportError, match="'prize' matches no input or output of the model; did you mean 'price'"):
        export_module(module, samples, tmp_path, "pricing", keep_io_types=["prize"])


@pytest.mark.long
def test_what_training_recorded_stays_in_float32(tmp_path: Path) -> None:
    model, samples = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2)), torch.rand(8, 4)
    with torch.no_grad():
        model[0].weight.fill_(1e5)  # type: ignore[operator]  # (a Linear's)
        model[1].weight.mul_(1e-5)  # type: ignore[operator]  # (as above)
    recorder = Recorder(model, every=1)
    with recorder.step(1, scale=1.0):
        model(samples).sum().backward()
    done = export_module(model.eval(), samples, tmp_path, "recorded", record=recorder.record())
    assert done.report.kept


@pytest.mark.long
@pytest.mark.parametrize(("keep", "kind"), [(False, onnx.TensorProto.FLOAT16), (True, onnx.TensorProto.DOUBLE)])
def test_a_float64_module_becomes_float16(tmp_path: Path, keep: bool, kind: int) -> None:
    module, samples = nn.Sequential(nn.Linear(64, 32), nn.Tanh()).double().eval(), torch.rand(8, 64).double()
    done = export_module(module, samples, tmp_path, "wide", keep_io_types=keep, fp32_twin=True)
    graph = onnx.load(done.path / "model.onnx").graph
    assert {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)} == {kind}
    assert {tensor.data_type for tensor in graph.initializer} == {onnx.TensorProto.FLOAT16}
    assert (done.report.fp16_nodes, done.report.float_nodes) == (2, 2)
    assert "float64" in done.report.repairs[0].text
    assert done.certificate.outputs[0].figures.max_abs_error > 0


@pytest.mark.long
def test_a_float64_module_that_overflows_is_searched(tmp_path: Path) -> None:
    samples = torch.stack([models.rows()[1][index][0] for index in range(10)]).double()
    done = export_module(models.peaking().double().eval(), samples, tmp_path, "peaking")
    assert done.search is not None
    assert {node.name for node in done.report.kept} == set(done.search.keep_fp32_nodes)


def test_nodes_and_operators_of_the_exported_graph_stay_float32(tmp_path: Path) -> None:
    module, samples = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).eval(), torch.rand(32, 4)
    done = export_module(module, samples, tmp_path, "m", keep_fp32_ops=["Tanh"])
    (kept,) = done.report.kept
    assert (kept.op_type, kept.reason) == ("Tanh", "Tanh is in keep_fp32_ops")
    again = export_module(module, samples, tmp_path, "m", keep_fp32_nodes=[kept.name])
    assert [node.name for node in again.report.kept] == [kept.name]


class Attending(nn.Module):
    """Attention over tokens of 8 numbers, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm = nn.InstanceNorm1d(4, affine=True) if way == "kernel lost" else nn.Identity()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """(batch, 4, 8), (batch, 4) -> (batch, 4, 3)."""
        heads = self.norm(x).view(-1, 4, 2, 4).transpose(1, 2)
        mask = seen[:, None, None, :] > 0
        added = torch.zeros(mask.shape).masked_fill(~mask, -1e4) if self.way == "numbers hide" else mask
        joined = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=added)
        scores: torch.Tensor = self.head(joined.transpose(1, 2).reshape(-1, 4, 8))
        return scores


@pytest.mark.parametrize(
    ("target_device", "way", "whole"),
    [("cuda", "", 1), ("any", "", 0), ("cuda", "kernel lost", 0), ("cuda", "numbers hide", 0)],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_is_one_node_for_cuda_where_nothing_is_lost(
    tmp_path: Path, dtype: HalfName, target_device: TargetDevice, way: str, whole: int
) -> None:
    inputs = {"x": torch.rand(16, 4, 8), "seen": torch.tensor([[1.0, 1, 1, 0]] * 8 + [[1.0, 0, 0, 0]] * 8)}
    done = export_module(Attending(way).eval(), inputs, tmp_path, "m", dtype=dtype, target_device=target_device)
    assert done.certificate.passed
    nodes = onnx.load(done.path / "model.onnx").graph.node
    assert [node.op_type for node in nodes].count("Attention") == whole
    assert predict_cuda(done.path / "model.onnx") == ()


@pytest.mark.parametrize(("target_device", "kind"), [("any", TensorProto.FLOAT), ("cpu", TensorProto.BFLOAT16)])
def test_a_node_without_a_cuda_kernel_is_bfloat16_for_cpus_alone(
    tmp_path: Path, target_device: TargetDevice, kind: int
) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU()).eval()
    done = export_module(module, torch.rand(16, 8), tmp_path, "m", dtype="bfloat16", target_device=target_device)
    model = onnx.shape_inference.infer_shapes(onnx.load(done.path / "model.onnx"))
    (leaky,) = [node for node in model.graph.node if node.op_type == "LeakyRelu"]
    values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
    (read,) = [value.type.tensor_type.elem_type for value in values if value.name == leaky.input[0]]
    assert read == kind


@pytest.mark.parametrize(
    ("held", "dtype"), [(torch.bfloat16, "bfloat16"), pytest.param(torch.float16, "float16", marks=pytest.mark.long)]
)
def test_a_module_with_half_weights_is_compared_with_its_float32_copy(tmp_path: Path, held: torch.dtype, dtype: str) -> None:
    module, samples = models.cnn().to(held), torch.rand(16, 1, 8, 8).to(held)
    done = export_module(module, samples, tmp_path, "cnn", dtype="auto")
    assert done.certificate.precision == dtype
    assert (BFLOAT16_WEIGHTS in done.certificate.notes) == (held is torch.bfloat16)
    assert {parameter.dtype for parameter in module.parameters()} == {held}, "the caller's module stays as it is"
    graph = onnx.load(done.path / "model.onnx").graph
    assert graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


@pytest.mark.parametrize(
    ("module", "samples", "message"),
    [
        (nn.Linear(4, 2), torch.rand(8, 4), "the model is in training mode"),
        (nn.Linear(4, 2).eval(), torch.rand(8, 5), "the model fails on inputs"),
        (nn.Linear(4, 2, device="meta").eval(), torch.rand(8, 4), r"the model is on meta; call \.cpu\(\) first"),
        (nn.Identity().eval(), torch.rand(8, 4).bfloat16(), "the samples of input 'input' are bfloat16; expected float32"),
        (Reader().eval(), {"words": torch.ones(2, 2)}, "does not take these inputs|fails on inputs"),
        (nn.Linear(4, 2).eval(), {"rows": torch.rand(8, 4)}, r"forward takes \(input\) and got .* a dict of rows$"),
        (nn.Linear(4, 2).eval(), torch.full((8, 4), torch.nan), "sample 0 .counted from 0. holds NaN .* in input 'input'"),
    ],
)
def test_what_cannot_be_exported_is_one_error_and_nothing_is_written(
    tmp_path: Path, module: nn.Module, samples: object, message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        export_module(module, samples, tmp_path / "models", "broken", budget=Budget())
    assert not (tmp_path / "models").exists()
