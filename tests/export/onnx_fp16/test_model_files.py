from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from export.errors import ExportError
from export.files.model_file import open_model
from export.onnx_fp16.model_files import convert_file, staged_conversion
from tests.export.onnx_files import in_one_file, sums, with_data_files

MEGABYTE = 1 << 20


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def run(path: Path) -> np.ndarray:
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
    np.testing.assert_allclose(run(tmp_path / "out.onnx"), run(source), rtol=0, atol=0.01)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before, "the source is only read"


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    source = with_data_files(sums(), tmp_path / "in.onnx", files=2)
    hashes = []
    for _ in range(2):
        convert_file(source, tmp_path / "out.onnx", overwrite=True)
        hashes.append(open_model(tmp_path / "out.onnx").sha256)
    assert hashes[0] == hashes[1]
    assert len(files(tmp_path)) == 6


def test_settings_reach_the_converter(tmp_path: Path) -> None:
    source = in_one_file(sums(), tmp_path / "in.onnx")
    conversion = convert_file(
        source, tmp_path / "out.onnx", keep_io_types=False, node_block_list=["add1"], op_block_list=["Mul"], external_data="yes"
    )
    assert sorted(node.name for node in conversion.report.kept) == ["add1", "scale"]
    written = open_model(tmp_path / "out.onnx")
    assert written.outline.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    assert len(written.locations) == 1


def test_what_waits_can_be_run_and_dropped(tmp_path: Path) -> None:
    source = with_data_files(sums(), tmp_path / "in.onnx")
    with staged_conversion(source, tmp_path / "out.onnx") as done:
        np.testing.assert_allclose(run(done.staged.path), run(source), rtol=0, atol=0.01)
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
    expected, data = run(source), (tmp_path / "in.0.bin").read_bytes()
    convert_file(source, source, overwrite=True)
    np.testing.assert_allclose(run(source), expected, rtol=0, atol=0.01)
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


@pytest.mark.parametrize("data_files", [0, 2])
def test_memory_holds_about_one_tensor(data_files: int, tmp_path: Path) -> None:
    """24 tensors of 4 MB, 96 MB in all: converting them may take the largest twice, and what grows in any process."""
    model = sums(24, (1024, 1024))
    source = tmp_path / "in.onnx"
    _ = with_data_files(model, source, files=data_files) if data_files else in_one_file(model, source)
    program = textwrap.dedent("""
        import re, sys
        from pathlib import Path
        from export.onnx_fp16.model_files import convert_file
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
