from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import helper, numpy_helper

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.external_data import FileTensor, data_files, external_tensors, stored_at
from halfserve.export.onnx_files.model_file import format_opset, open_model, serialize
from halfserve.export.onnx_files.proto_graphs import all_graphs, all_nodes
from halfserve.files.onnx_tensors import all_tensors
from tests.export.stored_models import in_one_file, sums, with_a_body, with_data_files


@pytest.fixture(params=["message", "bytes", "path", "text path"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> onnx.ModelProto | bytes | Path | str:
    path = in_one_file(sums(), tmp_path / "m.onnx")
    kinds: dict[str, onnx.ModelProto | bytes | Path | str] = {"message": sums(), "bytes": serialize(sums())}
    return kinds.get(request.param, path if request.param == "path" else str(path))


def test_every_kind_of_source_is_the_same_model(source: onnx.ModelProto | bytes | Path | str) -> None:
    opened, content = open_model(source, large_bytes=1024), serialize(sums())
    assert opened.proto == sums()
    assert opened.content == content
    assert opened.sha256 == hashlib.sha256(content).hexdigest()
    assert opened.size_bytes == len(content)
    assert onnx_ir.to_proto(opened.to_ir()).graph.node == sums().graph.node
    opened = open_model(source)
    assert (opened.proto, opened.content) == (sums(), content)


def weights(model: onnx_ir.Model) -> dict[str, np.ndarray]:
    return {
        name: value.const_value.numpy() for name, value in model.graph.initializers.items() if value.const_value is not None
    }


def test_large_tensors_of_a_file_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    opened = open_model(in_one_file(sums(), tmp_path / "m.onnx"), large_bytes=1024)
    model = opened.to_ir()
    assert isinstance(model.graph.initializers["w0"].const_value, FileTensor)
    assert not opened.outline.graph.initializer[0].raw_data
    for tensor in sums().graph.initializer:
        np.testing.assert_array_equal(weights(model)[tensor.name], numpy_helper.to_array(tensor))


def test_tensors_in_bodies_and_constants_are_mapped_too(tmp_path: Path) -> None:
    model = open_model(in_one_file(with_a_body(), tmp_path / "m.onnx"), large_bytes=1024).to_ir()
    constant, branch = model.graph[0], model.graph[1].attributes["then_branch"].as_graph()
    assert isinstance(constant.attributes["value"].value, FileTensor)
    np.testing.assert_array_equal(constant.attributes["value"].as_tensor().numpy(), np.ones(512))
    inner = branch.initializers["inner"].const_value
    assert isinstance(inner, FileTensor)
    np.testing.assert_array_equal(inner.numpy(), np.arange(512))


def test_changing_what_was_opened_leaves_the_source_alone() -> None:
    source = sums()
    model = open_model(source).to_ir()
    model.graph[0].name = "changed"
    model.graph.initializers["w0"].name = "renamed"
    assert source == sums()


@pytest.mark.parametrize("files", [1, 3])
def test_data_files_are_found_beside_the_model(files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_data_files(sums(), tmp_path / "m.onnx", files=files)
    monkeypatch.chdir(tmp_path)
    opened = open_model("m.onnx")
    assert opened.locations == tuple(f"m.{i}.bin" for i in range(files))
    assert opened.size_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    monkeypatch.chdir("/")  # what was opened does not depend on where one stands later
    for tensor in sums().graph.initializer:
        np.testing.assert_array_equal(weights(opened.to_ir())[tensor.name], numpy_helper.to_array(tensor))
    assert opened.proto == sums()
    assert open_model(tmp_path / "m.onnx").proto == sums()


def test_shards_say_which_file_a_weight_came_from(tmp_path: Path) -> None:
    opened = open_model(with_data_files(sums(), tmp_path / "m.onnx", files=2))
    assert opened.shards == {"w0": 0, "w1": 0, "w2": 1, "w3": 1}
    assert open_model(in_one_file(sums(), tmp_path / "n.onnx"), large_bytes=1024).shards == {}


def test_the_hash_covers_data_files_and_not_the_models_own_name(tmp_path: Path) -> None:
    path = with_data_files(sums(), tmp_path / "m.onnx", files=2)
    before = open_model(path).sha256
    lines = [f"{hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}  {name}\n" for name in ("m.0.bin", "m.1.bin")]
    model = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  model\n"
    assert before == hashlib.sha256("".join([model, *lines]).encode()).hexdigest()
    assert open_model(path.rename(tmp_path / "other.onnx")).sha256 == before
    data = bytearray((tmp_path / "m.1.bin").read_bytes())
    data[-1] ^= 1
    (tmp_path / "m.1.bin").write_bytes(data)
    assert open_model(tmp_path / "other.onnx").sha256 != before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "m.onnx is not an ONNX model or is damaged: it is empty"),
        (b"not a model", "m.onnx is not an ONNX model or is damaged"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer"),
        (serialize(sums())[:5000], r"m.onnx is not an ONNX model or is damaged: it breaks off"),
        (serialize(onnx.ModelProto(ir_version=8)), "m.onnx is not an ONNX model or is damaged: it has no graph"),
    ],
)
def test_files_that_are_no_models_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ExportError, match=message):
        open_model(tmp_path / "m.onnx")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cannot read the model .*none.onnx: No such file or directory"):
        open_model(tmp_path / "none.onnx")
    with pytest.raises(ExportError, match="cannot read the model .*: Is a directory; give the .onnx file in it"):
        open_model(tmp_path)


@pytest.fixture
def _as_nobody() -> Iterator[None]:
    """Root may read every file: as root, the test is somebody else."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)


@pytest.mark.usefixtures("_as_nobody")
def test_a_file_without_permission_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = in_one_file(sums(), Path(folder) / "m.onnx")
        path.chmod(0)
        with pytest.raises(ExportError, match="cannot read the model .*m.onnx: Permission denied"):
            open_model(path)


def test_a_data_file_that_is_gone_or_short_is_named_at_once(tmp_path: Path) -> None:
    path = with_data_files(sums(), tmp_path / "m.onnx")
    data = (tmp_path / "m.0.bin").read_bytes()
    (tmp_path / "m.0.bin").write_bytes(data[:-1])
    with pytest.raises(ExportError, match="m.onnx: the external data of tensor 'w3' ends at byte 8,192 of m.0.bin"):
        open_model(path)
    (tmp_path / "m.0.bin").unlink()
    with pytest.raises(
        ExportError, match="tensor 'w0' should be in .*m.0.bin: No such file .* put the model's data files beside"
    ):
        open_model(path)


def test_a_message_cannot_say_where_its_data_files_are(tmp_path: Path) -> None:
    path = with_data_files(sums(), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="the model keeps weights in 'm.0.bin'; give it as a path"):
        open_model(path.read_bytes())


def test_a_model_of_over_2_gib_opens_and_says_what_cannot_be_done_with_it(tmp_path: Path) -> None:
    model = sums(1, 1024)
    tensor = model.graph.initializer[0]
    tensor.dims[:] = [2**29 + 1]
    onnx.external_data_helper.set_external_data(tensor, "weights.bin", offset=0)
    tensor.ClearField("raw_data")
    (tmp_path / "m.onnx").write_bytes(serialize(model))
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(4 * (2**29 + 1))  # a hole: it takes no room on the disk
    opened = open_model(tmp_path / "m.onnx")
    values = opened.to_ir().graph.initializers["w0"].const_value
    assert values is not None
    assert values.numpy()[-1] == 0
    with pytest.raises(ExportError, match=r"m.onnx takes 2.0 GiB; at most 2 GiB fit in one message: give it as a path"):
        _ = opened.proto


def test_opening_models_does_not_import_torch() -> None:
    imports = "import sys, halfserve.export.onnx_files.model_file, halfserve.export.onnx_files.model_writer"
    program = f"{imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(("ir_version", "opset"), [(3, 8), (8, 18), (9, 20), (11, 23), (1000, onnx.defs.onnx_opset_version())])
def test_it_is_the_newest_that_the_format_had(ir_version: int, opset: int) -> None:
    assert format_opset(ir_version) == opset


Refer = Callable[..., onnx.TensorProto]


@pytest.fixture
def tensor(tmp_path: Path) -> Refer:
    """A tensor of 256 float32 values in `data.bin`, with entries changed as asked."""
    (tmp_path / "data.bin").write_bytes(np.arange(256, dtype=np.float32).tobytes())

    def referring(**entries: str) -> onnx.TensorProto:
        proto = onnx.TensorProto(name="w", data_type=1, dims=[256], data_location=onnx.TensorProto.EXTERNAL)
        for key, value in {"location": "data.bin", **entries}.items():
            proto.external_data.add(key=key, value=value)
        return proto

    return referring


def test_a_reference_says_where_the_bytes_lie(tensor: Refer, tmp_path: Path) -> None:
    stored = stored_at(tensor(), tmp_path, "m.onnx")
    assert (stored.location, stored.offset, stored.length) == ("data.bin", 0, 1024)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "none.bin"}, r"m.onnx: the external data of tensor 'w' should be in .*none.bin: No such file"),
        ({"location": "."}, "should be in .*, which is no file; export the model again"),
        ({"location": ""}, "has the location ''; expected a file in the model's folder"),
        ({"location": "../data.bin"}, "has the location '../data.bin'; expected a file in the model's folder"),
        ({"location": "a/../../data.bin"}, "expected a file in the model's folder"),
        ({"location": "/etc/passwd"}, "has the location '/etc/passwd'; expected"),
        ({"offset": "4"}, r"ends at byte 1,028 of data.bin, which has 1,024; the file is cut short or of another model"),
        ({"offset": str(2**70)}, "the file is cut short"),
        ({"offset": "-4"}, "says offset -4 and length 1024"),
        ({"length": "512"}, "says offset 0 and length 512; the tensor has 1024 bytes"),
        ({"length": "many"}, "has an offset or length that is no number"),
    ],
)
def test_references_that_lead_nowhere_are_refused(entries: dict[str, str], message: str, tensor: Refer, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        stored_at(tensor(**entries), tmp_path, "m.onnx")


def test_a_link_out_of_the_folder_is_refused(tensor: Refer, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "data.bin").symlink_to(tmp_path / "data.bin")
    with pytest.raises(ExportError, match="is a link out of the model's folder, to .*data.bin; copy the files instead"):
        stored_at(tensor(), folder, "m.onnx")


def test_links_within_the_folder_and_hard_links_are_fine(tensor: Refer, tmp_path: Path) -> None:
    (tmp_path / "soft.bin").symlink_to("data.bin")
    os.link(tmp_path / "data.bin", tmp_path / "hard.bin")
    assert stored_at(tensor(location="soft.bin"), tmp_path, "m.onnx").length == 1024
    assert stored_at(tensor(location="hard.bin"), tmp_path, "m.onnx").length == 1024


def test_data_files_are_listed_once_in_their_order(tmp_path: Path) -> None:
    path = with_data_files(sums(), tmp_path / "m.onnx", files=2)
    model = onnx.load(path, load_external_data=False)
    assert data_files(model) == ("m.0.bin", "m.1.bin")
    assert len(list(external_tensors(model))) == 4


def mapped(path: Path, values: np.ndarray, offset: int, dtype: onnx_ir.DataType | None = None) -> FileTensor:
    path.write_bytes(bytes(offset) + values.tobytes())
    kind = dtype or onnx_ir.DataType.from_numpy(values.dtype)
    return FileTensor(str(path), offset, values.nbytes, kind, shape=onnx_ir.Shape(values.shape), name="w")


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (70000,)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.bool_])
def test_a_file_tensor_holds_what_the_file_holds(shape: tuple[int, ...], dtype: type[np.generic], tmp_path: Path) -> None:
    values = np.ones(shape, dtype) * 3 if dtype is not np.bool_ else np.ones(shape, dtype)
    tensor = mapped(tmp_path / "data.bin", values.astype(dtype), 7)
    np.testing.assert_array_equal(tensor.numpy(), values)
    np.testing.assert_array_equal(np.asarray(tensor, np.float64), values.astype(np.float64))
    assert tensor.tobytes() == values.astype(dtype).tobytes()


def test_elements_smaller_than_a_byte_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"\x21\x43")
    shape = onnx_ir.Shape([4])
    tensor = FileTensor(str(tmp_path / "data.bin"), 0, 2, onnx_ir.DataType.INT4, shape=shape, name="w")
    assert tensor.numpy().tolist() == [1, 2, 3, 4]
    assert tensor.tobytes() == b"\x21\x43"


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    tensor = mapped(tmp_path / "data.bin", np.ones(4, np.float32), 0)
    (tmp_path / "data.bin").unlink()
    with pytest.raises(ExportError, match="cannot read tensor 'w' from .*data.bin"):
        tensor.numpy()


def test_bodies_are_walked_too() -> None:
    model = with_a_body()
    assert {node.name for node in all_nodes(model)} == {"constant", "if", "inner_add", "other"}
    assert {graph.name for graph in all_graphs(model)} == {"with_a_body", "then", "else"}
    assert {tensor.name for tensor in all_tensors(model)} == {"inner", "value"}


def test_bodies_within_bodies_are_walked_once() -> None:
    inner, outer = with_a_body(), with_a_body()
    outer.graph.node[1].attribute[0].g.node.append(inner.graph.node[1])
    names = [node.name for node in all_nodes(outer)]
    assert sorted(names) == ["constant", "if", "if", "inner_add", "inner_add", "other", "other"]
    assert len(list(all_graphs(outer))) == 5


def test_functions_are_walked() -> None:
    model = sums()
    value = numpy_helper.from_array(np.ones(2, np.float32), "in_function")
    body = [helper.make_node("Constant", [], ["c"], name="of_function", value=value)]
    model.functions.append(helper.make_function("own", "F", [], ["c"], body, list(model.opset_import)))
    assert "of_function" in {node.name for node in all_nodes(model)}
    assert "in_function" in {tensor.name for tensor in all_tensors(model)}
