from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.external_data import detached
from halfserve.export.onnx_files.model_file import open_model, serialize
from halfserve.export.onnx_files.model_writer import (
    staged_model,
    superseded_files,
    waiting_file,
    write_atomically,
    write_padded,
    write_tensor,
)
from halfserve.files.atomic_files import synced, write_and_sync
from tests.export.stored_models import in_one_file, sums, with_a_body, with_data_files

Tree = Callable[[], list[str]]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return lambda: sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))


def canonical(model: onnx.ModelProto) -> onnx.ModelProto:
    """As onnx_ir gives it back: the same model, with what it knows of its values written down."""
    return onnx_ir.to_proto(onnx_ir.from_proto(model))


@pytest.mark.parametrize("model", [sums(), with_a_body(), sums(2, 4)], ids=["initializers", "bodies", "small"])
def test_one_file_has_the_very_bytes_that_protobuf_would_write(model: onnx.ModelProto, tmp_path: Path) -> None:
    model.doc_string, model.graph.doc_string = "a model", "a graph"
    onnx.helper.set_model_props(model, {"key": "value"})
    opened = open_model(in_one_file(model, tmp_path / "in.onnx"), large_bytes=1024)
    with staged_model(opened.to_ir(), tmp_path / "out.onnx") as staged:
        staged.publish()
    assert (tmp_path / "out.onnx").read_bytes() == serialize(canonical(model))


def test_lazy_tensors_are_evaluated_once_and_the_model_stays_lazy(tmp_path: Path) -> None:
    calls = []

    def weight() -> onnx_ir.TensorProtocol:
        calls.append(1)
        return onnx_ir.Tensor(np.ones(512, np.float16), name="w0")

    model = onnx_ir.from_proto(sums(dtype=np.float16))
    lazy = onnx_ir.LazyTensor(weight, onnx_ir.DataType.FLOAT16, onnx_ir.Shape([512]), name="w0")
    model.graph.initializers["w0"].const_value = lazy
    with staged_model(model, tmp_path / "out.onnx", external_data="yes") as staged:
        staged.publish()
    assert len(calls) == 1
    assert model.graph.initializers["w0"].const_value is lazy
    values = open_model(tmp_path / "out.onnx").to_ir().graph.initializers["w0"].const_value
    assert values is not None
    np.testing.assert_array_equal(values.numpy(), np.ones(512))


@pytest.mark.parametrize("files", [1, 3])
def test_data_files_are_as_many_as_before_and_the_runtime_reads_them(files: int, tmp_path: Path, tree: Tree) -> None:
    source = open_model(with_data_files(sums(6), tmp_path / "in.onnx", files=files))
    with staged_model(source.to_ir(), tmp_path / "out.onnx", shards=source.shards) as staged:
        staged.publish()
    ours = [name for name in tree() if name.startswith("out-")]
    assert len(ours) == files
    assert all(name.endswith(".data") for name in ours)
    written = open_model(tmp_path / "out.onnx")
    assert written.shards == source.shards
    assert written.proto == canonical(sums(6))
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    runs = [
        onnxruntime.InferenceSession(tmp_path / name, providers=["CPUExecutionProvider"]) for name in ("in.onnx", "out.onnx")
    ]
    x = np.ones(512, np.float32)
    np.testing.assert_array_equal(*(run.run(None, {"x": x})[0] for run in runs))


def test_large_tensors_begin_at_pages_and_others_at_cache_lines(tmp_path: Path) -> None:
    model = onnx_ir.from_proto(sums(1, 1 << 18))
    model.graph.initializers["factor"].const_value = onnx_ir.Tensor(np.ones(300, np.float32), name="factor")
    with staged_model(model, tmp_path / "out.onnx", external_data="yes") as staged:
        proto = open_model(staged.path).outline
    offsets = [
        int(entry.value) for tensor in proto.graph.initializer for entry in tensor.external_data if entry.key == "offset"
    ]
    assert [offset % 4096 for offset in offsets[:1]] == [0]
    assert [offset % 64 for offset in offsets[1:]] == [0]


def test_the_same_model_gives_the_same_files(tmp_path: Path, tree: Tree) -> None:
    for _ in range(2):
        with staged_model(onnx_ir.from_proto(sums()), tmp_path / "out.onnx", external_data="yes") as staged:
            staged.publish()
    assert len(tree()) == 2


def test_another_model_leaves_the_old_ones_data_to_its_readers(tmp_path: Path, tree: Tree) -> None:
    with staged_model(onnx_ir.from_proto(sums()), tmp_path / "out.onnx", external_data="yes") as staged:
        staged.publish()
    old = open_model(tmp_path / "out.onnx")
    with staged_model(onnx_ir.from_proto(sums(3)), tmp_path / "out.onnx", external_data="yes") as staged:
        left = superseded_files(old, staged)
        staged.publish()
    assert left == old.locations
    assert old.proto == canonical(sums()), "who opened the old model can still read it"
    assert open_model(tmp_path / "out.onnx").proto == canonical(sums(3))
    assert len(tree()) == 3


def test_what_is_not_published_leaves_nothing(tmp_path: Path, tree: Tree) -> None:
    with staged_model(onnx_ir.from_proto(sums()), tmp_path / "out.onnx", external_data="yes") as staged:
        assert staged.path.exists()
    with pytest.raises(ZeroDivisionError), staged_model(onnx_ir.from_proto(sums()), tmp_path / "out.onnx"):
        raise ZeroDivisionError
    assert tree() == []


def test_a_tensor_that_fails_leaves_nothing(tmp_path: Path, tree: Tree) -> None:
    model = open_model(with_data_files(sums(), tmp_path / "in.onnx")).to_ir()
    (tmp_path / "in.0.bin").unlink()
    expected = pytest.raises(ExportError, match=r"cannot (read tensor 'w0' from|write) .*No such file")
    with expected, staged_model(model, tmp_path / "out.onnx"):
        pytest.fail("it was staged")
    assert tree() == ["in.onnx"]


def test_a_place_that_is_taken_at_the_last_moment_is_named_and_nothing_stays(tmp_path: Path, tree: Tree) -> None:
    with staged_model(onnx_ir.from_proto(sums()), tmp_path / "out.onnx", external_data="yes") as staged:
        (tmp_path / "out.onnx").mkdir()
        with pytest.raises(ExportError, match="cannot write .*out.onnx: Is a directory"):
            staged.publish()
    assert tree() == ["out.onnx"]


def test_what_fails_to_take_its_place_leaves_the_data_that_was_there(tmp_path: Path) -> None:
    for attempt in range(2):
        with staged_model(onnx_ir.from_proto(sums()), tmp_path / "out.onnx", external_data="yes") as staged:
            if attempt == 0:
                staged.publish()
                (tmp_path / "out.onnx").rename(tmp_path / "kept.onnx")
                (tmp_path / "out.onnx").mkdir()
            else:
                with pytest.raises(ExportError, match="cannot write .*out.onnx: Is a directory"):
                    staged.publish()
    assert open_model(tmp_path / "kept.onnx").proto == canonical(sums())


def test_a_model_that_has_its_place_keeps_its_data_where_the_disk_fails_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, sync = tmp_path / "out.onnx", os.fsync

    def broken(descriptor: int) -> None:
        if place.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    expected = pytest.raises(ExportError, match="cannot write .*out.onnx: Input/output error")
    with expected, staged_model(onnx_ir.from_proto(sums()), place, external_data="yes") as staged:
        staged.publish()
    assert open_model(place).proto == canonical(sums())


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    expected = pytest.raises(ExportError, match="cannot write .*none/out.onnx: No such file or directory")
    with expected, staged_model(onnx_ir.from_proto(sums()), tmp_path / "none" / "out.onnx"):
        pytest.fail("it was staged")


def test_what_one_file_cannot_hold_goes_to_data_files(tmp_path: Path) -> None:
    model = onnx_ir.from_proto(sums())
    with staged_model(model, tmp_path / "out.onnx", limit_bytes=6000) as staged:
        assert len(staged.data_files) == 1
    with (
        pytest.raises(
            ExportError, match=r"out.onnx would take .* GiB, and one ONNX file holds at most .*; allow external data"
        ),
        staged_model(model, tmp_path / "out.onnx", external_data="no", limit_bytes=6000),
    ):
        pytest.fail("it was staged")


def test_small_tensors_of_data_files_become_part_of_the_graph(tmp_path: Path) -> None:
    model = sums(2, 16)
    for tensor in model.graph.initializer:
        onnx.external_data_helper.set_external_data(tensor, "in.bin")
    onnx.save_model(model, tmp_path / "in.onnx")
    source = open_model(tmp_path / "in.onnx")
    assert source.locations == ("in.bin",)
    with staged_model(source.to_ir(), tmp_path / "out.onnx", shards=source.shards) as staged:
        assert staged.data_files == ()
        assert open_model(staged.path).proto == canonical(sums(2, 16))


def test_links_are_followed(tmp_path: Path, tree: Tree) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out.onnx").symlink_to("real/model.onnx")
    with staged_model(onnx_ir.from_proto(sums()), tmp_path / "out.onnx", external_data="yes") as staged:
        staged.publish()
    assert (tmp_path / "out.onnx").is_symlink()
    assert open_model(tmp_path / "real" / "model.onnx").proto == canonical(sums())


@pytest.mark.parametrize("external", ["yes", "no"])
def test_a_full_disk_is_one_line_and_leaves_nothing(external: str, tmp_path: Path, tree: Tree) -> None:
    in_one_file(sums(8, 1 << 16), tmp_path / "in.onnx")
    program = textwrap.dedent("""
        import resource, sys
        from halfserve.export.export_errors import ExportError
        from halfserve.export.onnx_files.model_file import open_model
        from halfserve.export.onnx_files.model_writer import staged_model
        model = open_model(sys.argv[1]).to_ir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # the largest file that may be written
        try:
            with staged_model(model, sys.argv[2], external_data=sys.argv[3]) as staged:
                staged.publish()
        except ExportError as error:
            sys.exit(str(error))
    """)
    command = [sys.executable, "-c", program, str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), external]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"cannot write {tmp_path / 'out.onnx'}: File too large\n"
    assert tree() == ["in.onnx"]


@pytest.mark.parametrize(
    "tensor",
    [
        onnx_ir.Tensor(np.arange(6, dtype=np.float16).reshape(2, 3)),
        onnx_ir.Tensor(np.array(3.0)),
        onnx_ir.Tensor(np.arange(12).reshape(3, 4).T),
        onnx_ir.Tensor(np.array([True, False])),
        onnx_ir.Tensor(np.array([1, -2, 3], np.int8).astype(onnx_ir.DataType.INT4.numpy()), dtype=onnx_ir.DataType.INT4),
        onnx_ir.Tensor(np.ones((0, 3), np.float32)),
        onnx_ir.LazyTensor(lambda: onnx_ir.Tensor(np.ones(4, np.float16)), onnx_ir.DataType.FLOAT16, onnx_ir.Shape([4])),
    ],
    ids=["half", "scalar", "transposed", "bool", "four bits", "empty", "lazy"],
)
def test_bytes_are_little_endian_and_in_order(tensor: onnx_ir.TensorProtocol, tmp_path: Path) -> None:
    with synced(tmp_path / "t") as file:
        write_tensor(file, tensor)
    assert (tmp_path / "t").read_bytes() == tensor.tobytes()


def test_a_tensor_that_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    wrong = onnx_ir.Tensor(np.ones(4, np.float32))
    lying = onnx_ir.LazyTensor(lambda: wrong, onnx_ir.DataType.FLOAT16, onnx_ir.Shape([4]), name="w")
    expected = pytest.raises(ExportError, match="tensor 'w' has 16 bytes, its type and shape say 8")
    with expected, synced(tmp_path / "t") as file:
        write_tensor(file, lying)


def test_padding_is_zeros(tmp_path: Path) -> None:
    with synced(tmp_path / "t") as file:
        file.write(b"x")
        assert write_padded(file, onnx_ir.Tensor(np.ones(3, np.uint8))) == 64
    assert (tmp_path / "t").read_bytes() == b"x" + bytes(63) + b"\1\1\1"


def test_an_outline_is_the_model_without_its_large_initializers() -> None:
    model = onnx_ir.from_proto(sums())
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    with detached(model) as outline:
        assert [tensor.name for tensor, _ in outline.tensors] == ["w0", "w1", "w2", "w3"]
        assert outline.proto.ByteSize() < 1024 < outline.size_bytes
        assert not any(tensor.HasField("data_location") for tensor in outline.proto.graph.initializer)
    assert {name: value.const_value for name, value in model.graph.initializers.items()} == before


def test_an_outline_knows_the_initializers_of_bodies() -> None:
    with detached(onnx_ir.from_proto(with_a_body())) as outline:
        assert [tensor.name for tensor, _ in outline.tensors] == ["inner"]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.mkdir()
    with pytest.raises(ExportError, match=r"cannot write .*file: Is a directory"):
        write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_no_file_can_have_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"cannot write .*: File name too long"):  # nor can the temporary one be removed
        write_atomically(tmp_path / ("n" * 250), b"new")


def test_what_is_not_put_there_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def fail() -> None:
        with waiting_file(tmp_path / "file", b"new"):
            assert len(list(tmp_path.iterdir())) == 2
            raise OSError("the model beside it")

    with pytest.raises(OSError, match="the model beside it"):
        fail()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_new_files_never_overwrite(tmp_path: Path) -> None:
    write_and_sync(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        write_and_sync(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
