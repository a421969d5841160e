from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.sources.hugging_face_tasks import task_of
from halfserve.export.sources.opening import open_source
from halfserve.export.sources.source_options import SourceOptions
from tests.export import models
from tests.export.cli.commands import command

FACTORY = "tests.export.models:mlp"


def samples(folder: Path) -> Path:
    np.savez(folder / "samples.npz", x=np.ones((40, 8), np.float32))
    return folder / "samples.npz"


def array(folder: Path) -> Path:
    np.save(folder / "samples.npy", np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32))
    return folder / "samples.npy"


def program(folder: Path) -> Path:
    inputs = (torch.rand(40, 8),)
    torch.export.save(
        torch.export.export(models.mlp(), inputs, dynamic_shapes=({0: torch.export.Dim("batch")},)), folder / "net.pt2"
    )
    return folder / "net.pt2"


def test_a_factory_with_weights_is_exported_in_one_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = {f"module.{name}": 2 * tensor for name, tensor in models.mlp().state_dict().items()}
    save_file(weights, tmp_path / "w.safetensors")
    repository = ("--repository", tmp_path / "models", "--json")
    code = command("export", FACTORY, "--weights", tmp_path / "w.safetensors", "--samples", array(tmp_path), *repository)
    out, err = capfd.readouterr()
    assert code == 0, err
    answer = json.loads(out)
    assert answer["certificate"]["samples"] == 40
    assert Path(answer["path"], "model.onnx").is_file()


@pytest.mark.long
def test_a_program_is_exported_with_its_own_examples(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command("export", program(tmp_path), "--repository", tmp_path / "models", "--json") == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["certificate"]["samples"] == 40
    assert "the samples are the program's own example inputs" in answer["certificate"]["notes"][0]
    assert Path(answer["path"]).parent.name == "net"


@pytest.mark.long
def test_a_pickled_module_is_exported_where_it_is_trusted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save(models.mlp(), tmp_path / "net.pt")
    given = ("export", tmp_path / "net.pt", "--samples", array(tmp_path), "--repository", tmp_path / "models")
    assert command(*given) == 1
    assert "is a pickle with more than tensors" in capfd.readouterr().err
    assert not (tmp_path / "models").exists()
    assert command(*given, "--trust-pickle") == 0


def test_a_trusted_file_that_torch_save_did_not_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.pkl").write_bytes(pickle.dumps({"weight": [1.0]}))
    with pytest.raises(
        ExportError, match=r"net.pkl is no whole file of torch.save: .*; expected what torch.save\(module, FILE\)"
    ):
        open_source(str(tmp_path / "net.pkl"), SourceOptions(trust_pickle=True, samples=array(tmp_path)))


def _folder_with(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        inner = folder / "inner"
        inner.mkdir()
        save_file({"weight": torch.rand(2)}, inner / name)
        return inner

    return make


def _saved(content: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        torch.save(content, folder / "w.pt")
        return folder / "w.pt"

    return make


def _written(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


MODEL = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Neg(x) }')
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda folder: folder / "x.pt", "there is no file or folder .*x.pt, and it is no MODULE:FACTORY"),
    "a state dict": (
        _saved(models.mlp().state_dict()),
        "holds 4 tensors .*, and no module; .*halfserve export MODULE:FACTORY --weights .*w.pt --samples FILE.npz",
    ),
    "safetensors": (
        lambda folder: _folder_with("w.safetensors")(folder) / "w.safetensors",
        "holds 1 tensors \\(weight\\), and no module; .*halfserve export MODULE:FACTORY --weights",
    ),
    "a folder of weights": (_folder_with("model.safetensors"), "holds weights and no config.json"),
    "a folder of a run": (_folder_with("checkpoint.pt"), "expected the checkpoint in it: halfserve export .*checkpoint.pt"),
    "a folder of nothing": (lambda folder: folder, "holds no model: no config.json"),
    "ONNX": (
        _written("m.pt", MODEL.SerializeToString()),
        "is an ONNX model; convert it: halfserve convert .*m.pt",
    ),
    "an LFS pointer": (_written("m.pt", b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull --include m.pt"),
    "a web page": (_written("m.pt", b"<!doctype html>"), "is a web page; the download ended at a web page"),
    "an empty file": (_written("m.pt", b""), "is empty; write or download it again"),
    "samples": (samples, "is a file of numpy arrays; which --samples takes"),
    "text": (_written("m.pt", b"hello"), "is no file of a known kind; expected MODULE:FACTORY"),
    "a cut program": (
        lambda folder: _written("n.pt2", program(folder).read_bytes()[:-99])(folder),
        "is damaged|damaged archive",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_source_is_refused_with_the_command_that_works(kind: str, tmp_path: Path) -> None:
    make, text = REFUSED[kind]
    with pytest.raises(ExportError, match=text) as refused:
        open_source(str(make(tmp_path)), SourceOptions())
    assert "\n" not in str(refused.value)


def test_a_factory_without_samples_is_told_how_to_write_some() -> None:
    with pytest.raises(ExportError, match="brings no samples, .*--samples samples.npz"):
        open_source(FACTORY, SourceOptions())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (SourceOptions(task="embeddings"), "--task belongs to a Hugging Face folder"),
        (SourceOptions(weights=Path("w")), "--weights belongs to MODULE:FACTORY"),
    ],
)
def test_options_of_other_sources_are_refused(options: SourceOptions, text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        open_source(str(_saved(nn.Linear(2, 2).state_dict())(tmp_path)), options)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (
            {"x": np.ones((4, 8), np.float32), "y": np.ones((5, 8), np.float32)},
            "different numbers of samples: x 4, y 5",
        ),
        ({"x": np.ones((0, 8), np.float32)}, "holds no samples: each array is empty"),
        ({"x": np.array(3.0)}, "expected arrays whose first dimension counts the samples"),
        ({"x": np.array(["a", "b"])}, "expected floats, whole numbers or booleans"),
    ],
)
def test_samples_that_cannot_be_used_are_refused(arrays: dict[str, Any], text: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", **arrays)
    with pytest.raises(ExportError, match=text):
        open_source(FACTORY, SourceOptions(samples=tmp_path / "s.npz"))


def test_samples_of_numpys_own_type_become_the_models(tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", np.ones((4, 8)))
    source = open_source(FACTORY, SourceOptions(samples=tmp_path / "s.npy"))
    assert source.samples.inputs.dtype == torch.float32
    assert source.samples.note == "the samples are float64, and were rounded to the model's float32"


def test_the_first_cause_is_named_where_the_code_of_an_architecture_cannot_be_imported(tmp_path: Path) -> None:
    class Broken:
        __version__ = "5.0"

        def __getattr__(self, name: str) -> None:
            raise ModuleNotFoundError(f"Could not import module {name!r}.") from OSError("libcudart.so: cannot open")

    config = transformers.BertConfig(architectures=["BertModel"])
    with pytest.raises(ExportError, match=r"^transformers 5.0 cannot import BertModel: OSError: libcudart.so: cannot open$"):
        task_of(Broken(), config, tmp_path, None)
