from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from halfserve.export.conversion_settings import PipelineSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.onnx_fp16.convert import convert_file, convert_float_to_float16, staged_conversion
from tests.export.onnx_fp16.models import FLOAT, FLOAT16, assert_clean_both_ways, halve, judged, normal, ops, run, types
from tests.export.stored_models import in_one_file, parse, sums, with_data_files

LINEAR = "g (float[N, 4] x) => (float[N, 3] y) { p = MatMul (x, w) y = Add (p, b) }"


@pytest.fixture
def linear() -> onnx.ModelProto:
    return parse(LINEAR, w=normal(4, 3), b=normal(3))


def test_inputs_and_outputs_keep_names_and_types_behind_casts(linear: onnx.ModelProto) -> None:
    converted = judged(linear, {"x": normal(2, 4)})
    assert ops(converted) == ["Cast", "MatMul", "Add", "Cast"]
    known = types(converted)
    assert (known["x"], known["y"], known["w"], known["b"]) == (FLOAT, FLOAT, FLOAT16, FLOAT16)
    assert [node.name for node in converted.graph.node if node.op_type != "Cast"] == ["p", "y"]


def shape_of(value: onnx.ValueInfoProto) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def test_inputs_and_outputs_become_float16_without_casts(linear: onnx.ModelProto) -> None:
    converted = judged(linear, {"x": normal(2, 4)}, keep=False)
    assert ops(converted) == ["MatMul", "Add"]
    assert {types(converted)[name] for name in "xy"} == {FLOAT16}
    assert shape_of(converted.graph.input[0]) == ["N", 4]


@pytest.mark.parametrize("keep", [True, False])
def test_an_output_that_is_cast_keeps_its_declared_shape(keep: bool) -> None:
    model = parse("g (float[N, 4] x, int64[2] n) => (float[N, 4] y) { a = Reshape (x, n) y = Cast <to = 1> (a) }")
    assert shape_of(halve(model, keep_io_types=keep)[0].graph.output[0]) == ["N", 4]


@pytest.mark.parametrize("kept", [["x"], ["y"], ["[xq]"], ["x", "y"]])
def test_single_inputs_and_outputs_keep_their_types(linear: onnx.ModelProto, kept: list[str]) -> None:
    converted, _ = halve(linear, keep_io_types=kept)
    onnx.checker.check_model(converted, full_check=True)
    named = {name[1] if name.startswith("[") else name for name in kept}
    assert {name for name in "xy" if types(converted)[name] == FLOAT} == named


def test_an_unknown_name_to_keep_is_an_error(linear: onnx.ModelProto) -> None:
    with pytest.raises(ExportError, match="keep_io_types: the input or output 'z' matches no input or output of the model"):
        halve(linear, keep_io_types=["z"])


def test_models_bytes_and_paths_are_taken_and_stay_as_they_are(linear: onnx.ModelProto, tmp_path: Path) -> None:
    before = linear.SerializeToString(deterministic=True)
    path = in_one_file(linear, tmp_path / "model.onnx")
    results = [convert_float_to_float16(source) for source in (linear, linear.SerializeToString(), path)]
    assert len({result.SerializeToString(deterministic=True) for result in results}) == 1
    assert linear.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("wrong", [None, 3])
def test_anything_else_is_an_error(wrong: object) -> None:
    with pytest.raises(ExportError, match="expected an onnx.ModelProto, the bytes of one or a path, not"):
        convert_float_to_float16(wrong)  # type: ignore[arg-type]  # (that is the test)


@pytest.mark.parametrize(
    ("text", "w"),
    [
        ("g (float[3] x) => (float[3] x, float[3] y) { y = Relu (x) }", FLOAT),
        ("g (float[3] x) => (float[3] w, float[3] y) { y = Mul (x, w) }", FLOAT),
    ],
    ids=["an input", "an initializer that is a weight too"],
)
def test_what_is_given_out_as_it_is_keeps_its_type(text: str, w: int) -> None:
    weights: dict[str, Any] = {"w": [1.0, 2, 3]} if "w" in text else {}
    kept = assert_clean_both_ways(parse(text, **weights), {"x": np.array([-1, 0.5, 2], np.float32)})
    assert types(kept).get("w", FLOAT) == w


def test_weights_listed_as_inputs_in_the_oldest_format_are_weights() -> None:
    model = parse("g (float[2, 4] x, float[4, 3] w) => (float[2, 3] y) { y = MatMul (x, w) }", ir=3, opset=9, w=normal(4, 3))
    converted = judged(model, {"x": normal(2, 4)})
    assert types(converted)["w"] == FLOAT16
    assert [value.name for value in converted.graph.input] == ["x", "w"]
    kept, _ = halve(model, keep_io_types=["w"])
    assert types(kept)["w"] == FLOAT


def test_inputs_with_a_default_are_inputs() -> None:
    model = parse("g (float[2, 4] x, float[4] w) => (float[2, 4] y) { y = Mul (x, w) }", w=normal(4))
    converted, _ = halve(model)
    assert types(converted)["w"] == FLOAT
    feeds = {"x": normal(2, 4), "w": np.full(4, 3, np.float32)}
    np.testing.assert_allclose(run(converted, **feeds)[0], run(model, **feeds)[0], rtol=2e-3)
    assert types(halve(model, keep_io_types=False)[0])["w"] == FLOAT16


def test_an_input_that_only_takes_float32_stays() -> None:
    model = parse(
        'g (float[1, 1, 2, 2] x, float[4] s) => (float[A, B, C, D] y) { y = Resize <mode = "nearest"> (x, , s) }', opset=13
    )
    converted = judged(model, {"x": normal(1, 1, 2, 2), "s": np.array([1, 1, 1.7, 2], np.float32)}, keep=False)
    assert (types(converted)["x"], types(converted)["s"]) == (FLOAT16, FLOAT)


def test_all_but_the_graphs_numbers_stays() -> None:
    model = parse("g (float[3] x) => (float[3] y) { r = Relu (x) y = Neg (r) }")
    model.producer_name, model.producer_version, model.doc_string, model.domain, model.model_version = "p", "1", "about", "d", 7
    model.metadata_props.add(key="author", value="me")
    model.graph.node[0].doc_string = "positive part"
    model.graph.node[0].metadata_props.add(key="halfserve.module", value="act")
    model.graph.output[0].doc_string = "the result"
    annotation = model.graph.quantization_annotation.add(tensor_name="r")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="s")
    model.training_info.add().algorithm.name = "step"
    converted = convert_float_to_float16(model)
    props = {entry.key: entry.value for entry in converted.metadata_props}
    assert (props["author"], props["halfserve.converted"]) == ("me", "float16")
    (relu,) = (node for node in converted.graph.node if node.op_type == "Relu")
    assert (relu.doc_string, relu.metadata_props) == ("positive part", model.graph.node[0].metadata_props)
    assert converted.graph.output[0].doc_string == "the result"
    assert converted.graph.quantization_annotation == model.graph.quantization_annotation
    for one in (model, converted):
        one.ClearField("graph")
        one.ClearField("metadata_props")
    assert converted == model, "producer, version, documentation, opset and training"


def test_unnamed_nodes_get_names_and_named_ones_keep_theirs() -> None:
    model = parse("g (float[3] x) => (float[3] y) { a = Relu (x) b = Relu (a) y = Neg (b) }")
    for node, name in zip(model.graph.node, ["", "Relu_0", ""], strict=True):
        node.name = name
    converted, _ = halve(model, keep_io_types=False)
    assert [node.name for node in converted.graph.node] == ["Relu_0_2", "Relu_0", "Neg_2"]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, []),
        ((FLOAT, [3]), [("a", FLOAT16, [3])]),
        ((onnx.TensorProto.DOUBLE, [5]), [("a", FLOAT16, [3])]),
        ((FLOAT, ["b", "c"]), [("a", FLOAT16, [3])]),
    ],
)
def test_types_written_down_follow_and_contradictions_are_replaced(
    stated: tuple[int, list[int | str]] | None, expected: list[tuple[str, int, list[int | str]]]
) -> None:
    model = parse("g (float[3] x) => (float[3] y) { a = Relu (x) y = Neg (a) }")
    if stated is not None:
        model.graph.value_info.append(onnx.helper.make_tensor_value_info("a", *stated))
    converted, _ = halve(model, keep_io_types=False)
    onnx.checker.check_model(converted, full_check=True)
    found = [(info.name, info.type.tensor_type.elem_type, shape_of(info)) for info in converted.graph.value_info]
    assert found == expected


@pytest.mark.parametrize(("kind", "float_nodes"), [("int64", 0), ("float16", 1)])
def test_a_model_without_float32_stays_as_it_is(kind: str, float_nodes: int) -> None:
    converted, report = halve(parse(f"g ({kind}[3] x) => ({kind}[3] y) {{ y = Neg (x) }}"))
    assert (report.float_nodes, report.fp16_nodes, report.casts_added, report.share) == (float_nodes, float_nodes, 0, 1.0)
    assert ("halfserve.converted" in {entry.key for entry in converted.metadata_props}) == bool(float_nodes)
    assert ops(converted) == ["Neg"]


def test_bfloats_eight_bits_and_doubles_that_are_only_cast_stay() -> None:
    model = parse(
        """g (double[3] d, bfloat16[3] b, float[3] x) => (double[3] e, bfloat16[3] c, float8e4m3fn[3] q, float[3] y) {
        e = Cast <to = 11> (x) c = Identity (b) q = Cast <to = 17> (x) f = Cast <to = 1> (d) y = Add (f, x) }""",
    )
    converted, _ = halve(model)
    onnx.checker.check_model(converted, full_check=True)
    known = types(converted)
    assert (known["d"], known["e"]) == (onnx.TensorProto.DOUBLE, onnx.TensorProto.DOUBLE)
    assert (known["c"], known["q"]) == (onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT8E4M3FN)


BRANCHES = """y = If (yes) <then_branch = t () => (bfloat16[3] a) { a = Identity (x) },
    else_branch = e () => (bfloat16[3] b) { b = Neg (x) }>"""


@pytest.mark.parametrize("repair", [True, False])
@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("g (float[3] x) => (bfloat16[3] y) { a = Exp (x) c = Cast <to = 16> (a) y = Neg (c) }", "Neg 'y'"),
        ("g (float[3] x) => (float[3] y) { c = Cast <to = 16> (x) d = Abs (c) y = Cast <to = 1> (d) }", "Abs 'd'"),
        (f"g (bool yes, bfloat16[3] x) => (bfloat16[3] y) {{ {BRANCHES} }}", "Neg .*"),
    ],
)
def test_what_computes_in_bfloat16_is_refused(text: str, node: str, repair: bool) -> None:
    with pytest.raises(ExportError, match=rf"{node} computes in bfloat16; expected a float32 model: .*\.float\(\)"):
        convert_float_to_float16(parse(text), repair=repair)


MEGABYTE = 1 << 20


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def run_file(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {"x": np.ones(512, np.float32)})[0]
    return result


@pytest.mark.parametrize("data_files", [0, 1, 3])
def test_weights_become_float16_and_lie_as_they_lay(data_files: int, tmp_path: Path) -> None:
    path = tmp_path / "in.onnx"
    source = with_data_files(sums(6), path, files=data_files) if data_files else in_one_file(sums(6), path)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    conversion = convert_file(source, tmp_path / "out.onnx")
    assert (conversion.report.float_nodes, conversion.report.fp16_nodes) == (7, 7)
    written = open_model(tmp_path / "out.onnx")
    assert len(written.locations) == data_files
    types = {tensor.name: tensor.data_type for tensor in written.proto.graph.initializer}
    assert set(types.values()) == {onnx.TensorProto.FLOAT16}
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    np.testing.assert_allclose(run_file(tmp_path / "out.onnx"), run_file(source), rtol=0, atol=0.01)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before, "the source is only read"


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    source = with_data_files(sums(), tmp_path / "in.onnx", files=2)
    hashes = []
    for _ in range(2):
        convert_file(source, tmp_path / "out.onnx", overwrite=True)
        hashes.append(open_model(tmp_path / "out.onnx").sha256)
    assert hashes[0] == hashes[1]
    assert len(files(tmp_path)) == 6


def test_what_waits_can_be_run_and_dropped(tmp_path: Path) -> None:
    source = with_data_files(sums(), tmp_path / "in.onnx")
    with staged_conversion(source, tmp_path / "out.onnx", PipelineSettings()) as done:
        np.testing.assert_allclose(run_file(done.staged.path), run_file(source), rtol=0, atol=0.01)
    assert files(tmp_path) == ["in.0.bin", "in.onnx"]


def test_a_model_that_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    source = with_data_files(sums(), tmp_path / "in.onnx")
    (tmp_path / "out.onnx").write_bytes(b"mine")
    with pytest.raises(ExportError, match="out.onnx exists; give another name, or --overwrite to replace it"):
        convert_file(source, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == b"mine"
    with pytest.raises(ExportError, match="in.onnx is the model to convert itself; give another name, or --overwrite"):
        convert_file(source, tmp_path / "in.onnx")
    assert open_model(source).proto == sums()


def test_the_source_itself_is_replaced_when_asked(tmp_path: Path) -> None:
    source = with_data_files(sums(), tmp_path / "in.onnx")
    expected, data = run_file(source), (tmp_path / "in.0.bin").read_bytes()
    convert_file(source, source, overwrite=True)
    np.testing.assert_allclose(run_file(source), expected, rtol=0, atol=0.01)
    assert (tmp_path / "in.0.bin").read_bytes() == data, "its old data files are nobody's to remove"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "is a folder; give the file to write, such as .*model.onnx"),
        ("none/out.onnx", "cannot write .*: there is no folder .*none"),
        ("in.0.bin", "in.0.bin holds weights of .*in.onnx; choose another name"),
    ],
)
def test_places_that_will_not_do_are_named_before_any_work(target: str, message: str, tmp_path: Path) -> None:
    source = with_data_files(sums(), tmp_path / "in.onnx")
    with pytest.raises(ExportError, match=message):
        convert_file(source, tmp_path / target, overwrite=True)
    assert files(tmp_path) == ["in.0.bin", "in.onnx"]


def test_a_damaged_source_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "in.onnx").write_bytes(in_one_file(sums(), tmp_path / "whole.onnx").read_bytes()[:-100])
    with pytest.raises(ExportError, match="in.onnx is not an ONNX model or is damaged"):
        convert_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert files(tmp_path) == ["in.onnx", "whole.onnx"]


@pytest.mark.long
@pytest.mark.parametrize("data_files", [0, 2])
def test_memory_holds_about_one_tensor(data_files: int, tmp_path: Path) -> None:
    """24 tensors of 4 MB, 96 MB in all: converting them may take the largest twice, and what grows in any process."""
    model = sums(24, (1024, 1024))
    source = tmp_path / "in.onnx"
    _ = with_data_files(model, source, files=data_files) if data_files else in_one_file(model, source)
    program = textwrap.dedent("""
        import re, sys
        from pathlib import Path
        from halfserve.export.onnx_fp16.convert import convert_file
        def peak():
            return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
        convert_file(sys.argv[1], sys.argv[2])  # a small one first: what it imports and allocates is no part of the question
        before = peak()
        convert_file(sys.argv[3], sys.argv[4])
        print(peak() - before, "torch" in sys.modules)
    """)
    small = in_one_file(sums(), tmp_path / "small.onnx")
    command = [sys.executable, "-c", program, small, tmp_path / "small16.onnx", source, tmp_path / "out.onnx"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    grown, torch = done.stdout.split()
    assert int(grown) < 2 * 4 * MEGABYTE + 16 * MEGABYTE
    assert torch == "False"
    assert 0.5 <= open_model(tmp_path / "out.onnx").size_bytes / open_model(source).size_bytes < 0.51
