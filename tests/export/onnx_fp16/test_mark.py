from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.onnx_fp16.convert import convert
from tests.export.onnx_fp16.models import FLOAT, halve, normal, ops, reasons, types
from tests.export.stored_models import parse


@pytest.fixture
def model() -> onnx.ModelProto:
    return parse("g (float[2, 4] x) => (float[2, 3] y) { m = MatMul (x, w) e = Exp (m) y = Neg (e) }", w=normal(4, 3))


def props(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def test_a_conversion_leaves_its_mark(model: onnx.ModelProto) -> None:
    marks = props(halve(model, keep_fp32_ops=["Exp"])[0])
    assert marks["halfserve.converted"] == "float16"
    assert marks["halfserve.converted.by"].startswith("halfserve ")
    assert marks["halfserve.converted.settings"] == "keep_io_types=True keep_fp32_ops=Exp keep_fp32_nodes= repair=False"


def test_the_same_again_changes_nothing_and_says_so(model: onnx.ModelProto) -> None:
    first, _ = halve(model, keep_fp32_ops=["Exp"])
    second, report = halve(first, keep_fp32_ops=["Exp"])
    assert second.SerializeToString(deterministic=True) == first.SerializeToString(deterministic=True)
    assert report.converted_before
    assert (report.float_nodes, report.fp16_nodes, reasons(report)) == (3, 2, {"e": "the earlier conversion kept it"})


def test_absent_outputs_that_a_file_leaves_out_do_not_matter() -> None:
    model = parse("g (float[2, 4] x) => (float[2, 4] y) { n, m = LayerNormalization (x, w) y = Neg (n) }", w=normal(4))
    model.graph.node[0].output[:] = ["n", "", ""]
    first, _ = halve(model)
    second, report = halve(first)
    assert report.converted_before
    assert second.SerializeToString(deterministic=True) == first.SerializeToString(deterministic=True)


def test_other_settings_convert_again(model: onnx.ModelProto) -> None:
    first, _ = halve(model, keep_fp32_ops=["Exp"])
    second, report = halve(first, keep_io_types=False)
    assert not report.converted_before
    assert ops(second) == ["MatMul", "Exp", "Neg"]
    assert types(second)["y"] == onnx.TensorProto.FLOAT16


def test_a_converted_model_that_was_changed_is_converted_again(model: onnx.ModelProto) -> None:
    first, _ = halve(model)
    first.graph.node.append(onnx.helper.make_node("Exp", ["y"], ["z"], name="more"))
    first.graph.output.append(onnx.helper.make_tensor_value_info("z", FLOAT, [2, 3]))
    second, report = halve(first)
    assert (report.converted_before, report.float_nodes, report.fp16_nodes) == (False, 4, 4)
    onnx.checker.check_model(second, full_check=True)


def test_metadata_that_is_added_later_does_not_matter(model: onnx.ModelProto) -> None:
    first, _ = halve(model)
    first.metadata_props.add(key="certificate", value="sha256")
    first.graph.node[1].doc_string = "a product"
    assert halve(first)[1].converted_before


def test_torch_is_not_needed(model: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(model, tmp_path / "m.onnx")
    script = """
        import sys
        from halfserve.export.onnx_fp16.convert import convert_float_to_float16
        convert_float_to_float16(sys.argv[1])
        assert not {"torch", "onnxruntime"} & set(sys.modules), "imported"
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), tmp_path / "m.onnx"], check=True)


def test_weights_in_files_are_rounded_when_they_are_read(tmp_path: Path) -> None:
    weight = normal(64, 64)
    (tmp_path / "w.bin").write_bytes(weight.tobytes())
    source = onnx_ir.from_proto(parse("g (float[2, 64] x) => (float[2, 64] y) { y = MatMul (x, w) }", w=weight))
    source.graph.initializers["w"].const_value = onnx_ir.ExternalTensor(
        "w.bin", 0, weight.nbytes, onnx_ir.DataType.FLOAT, shape=onnx_ir.Shape([64, 64]), name="w", base_dir=tmp_path
    )
    tensor = convert(source, ConversionSettings()).model.graph.initializers["w"].const_value
    assert isinstance(tensor, onnx_ir.LazyTensor)
    assert not tensor.cache
    assert (tensor.dtype, tensor.nbytes) == (onnx_ir.DataType.FLOAT16, weight.nbytes // 2)
    np.testing.assert_array_equal(tensor.numpy(), weight.astype(np.float16))
