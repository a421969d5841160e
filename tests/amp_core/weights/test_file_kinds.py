from __future__ import annotations

import gzip
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from halfserve.amp_core.weights.file_kinds import FileKind, kind_of
from halfserve.export.to_onnx.export_onnx import export_onnx
from tests.export import models


def _program(path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(3, 2), (torch.rand(2, 3),)), path)


def _script(path: Path) -> None:
    torch.jit.trace(nn.Linear(3, 2), torch.rand(1, 3)).save(str(path))  # type: ignore[no-untyped-call]


def _truncated(path: Path) -> None:
    torch.save({"weight": torch.rand(100)}, path)
    path.write_bytes(path.read_bytes()[:-30])


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, "a.py")


def _arrays(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, x=np.ones(2))


def _array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones(2))


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")


MAKERS: dict[FileKind, list[Callable[[Path], object]]] = {
    FileKind.TORCH_ARCHIVE: [lambda path: torch.save({"weight": torch.rand(2)}, path)],
    FileKind.EXPORTED_PROGRAM: [_program],
    FileKind.TORCHSCRIPT: [_script],
    FileKind.SAFETENSORS: [lambda path: save_file({"weight": torch.rand(2)}, path)],
    FileKind.PICKLE: [lambda path: path.write_bytes(pickle.dumps({"a": 1}))],
    FileKind.ONNX: [lambda path: path.write_bytes(export_onnx(models.mlp(), torch.rand(2, 8)).SerializeToString())],
    FileKind.NUMPY: [_arrays, _array],
    FileKind.LFS_POINTER: [lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")],
    FileKind.HTML: [lambda path: path.write_text("\n<!DOCTYPE html><html></html>"), lambda path: path.write_text("<html>")],
    FileKind.GGUF: [lambda path: path.write_bytes(b"GGUF\x03\x00\x00\x00")],
    FileKind.HDF5: [lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(8))],
    FileKind.ARCHIVE: [lambda path: path.write_bytes(gzip.compress(b"a")), _tar, _zip],
    FileKind.EMPTY: [lambda path: path.write_bytes(b"")],
    FileKind.TRUNCATED: [_truncated],
    FileKind.UNKNOWN: [lambda path: path.write_bytes(b"not a model"), lambda path: path.write_bytes(b"\x08")],
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
@pytest.mark.parametrize("kind", FileKind)
def test_a_file_is_known_by_its_first_bytes_whatever_its_name(kind: FileKind, tmp_path: Path) -> None:
    for maker in MAKERS[kind]:
        maker(tmp_path / "file.pt2")
        assert kind_of(tmp_path / "file.pt2") is kind
