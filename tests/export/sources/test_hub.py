"""A model of a hub by its name: what is fetched, what the certificate says of it, and one line for what goes wrong."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file

from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.sources.opening import open_source
from halfserve.export.sources.source_options import SourceOptions
from tests.export.cli.commands import command
from tests.export.hugging_face_folders import sentence_folder
from tests.hub_server import HubServer, hub_server

NAME = "tests/encoder"
UNWANTED = ("README.md", "onnx/model.onnx", "openvino/openvino_model.bin", "tf_model.h5", "model.fp16.safetensors")
LAYERS = {"modules.json", "1_Pooling/config.json", "2_Dense/config.json"}
NEEDED = LAYERS | {"config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers folder with what repositories of the hub have besides."""
    folder = sentence_folder(tmp_path_factory.mktemp("hub") / "encoder", "mean_tokens", dense=True)
    for path in UNWANTED:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(b"not read")
    return folder


def changed(folder: Path, target: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(folder, target)
    change(target)
    return target


def as_pickles(folder: Path) -> None:
    for weights in (folder / "model.safetensors", folder / "2_Dense" / "model.safetensors"):
        torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
        weights.unlink()


def refused(argument: str = NAME, *, trusting: bool = False) -> str:
    with pytest.raises((ExportError, UsageError)) as error:
        open_source(argument, SourceOptions(trust_remote_code=trusting))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_name_is_exported_at_a_commit_that_the_certificate_names(
    hub: HubServer, encoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.push(NAME, sentence_folder(tmp_path / "older", "cls_token"), "v1")
    commit = hub.push(NAME, changed(encoder, tmp_path / "both", lambda folder: (folder / "pytorch_model.bin").touch()))
    assert command("export", NAME, "--repository", tmp_path / "models", "--json") == 0
    out, err = capfd.readouterr()
    answer = json.loads(out)
    assert Path(answer["path"]) == tmp_path / "models" / "encoder" / "1"
    assert answer["certificate"]["origin"] == {"hub": hub.url, "model": NAME, "revision": "main", "commit": commit}
    assert f"fetching 8 files of {NAME}@{commit}, 0 MiB" in err
    assert set(hub.fetched) == NEEDED | {"model.safetensors", "2_Dense/model.safetensors"}


def test_pickles_are_fetched_where_nothing_safer_is(hub: HubServer, encoder: Path, tmp_path: Path) -> None:
    commit = hub.push(NAME, changed(encoder, tmp_path / "pickled", as_pickles), "v2")
    source = open_source(f"hf://{NAME}@v2", SourceOptions())
    assert set(hub.fetched) == NEEDED | {"pytorch_model.bin", "2_Dense/pytorch_model.bin"}
    assert (source.name, source.origin["commit"]) == ("encoder", commit)


def test_a_folder_on_this_disk_comes_before_the_hub(
    hub: HubServer, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / NAME).symlink_to(encoder)
    monkeypatch.chdir(tmp_path)
    assert not open_source(NAME, SourceOptions()).origin
    assert not hub.fetched


def test_without_a_hub_the_cache_answers_and_the_samples_note_it(
    hub: HubServer, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.push(NAME, encoder)
    open_source(NAME, SourceOptions())
    hub.fault = lambda _method, _path: (503, "")
    source = open_source(NAME, SourceOptions())
    assert source.origin["commit"] == commit
    assert f"{hub.url} answered 503: main is commit {commit} as this machine's cache has it" in source.samples.note
    assert f"has no whole copy of {NAME}@v1; try again later" in refused(f"{NAME}@v1")
    hub.stop()
    assert f"{hub.url} cannot be reached" in open_source(NAME, SourceOptions()).samples.note
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids" in open_source(f"{NAME}@{commit}", SourceOptions()).samples.note
    text = refused("tests/other")
    assert "there is no file or folder tests/other, and as a model of the hub: HF_HUB_OFFLINE forbids requests" in text
    assert "leave HF_HUB_OFFLINE out once" in text


def test_a_broken_download_is_never_taken_for_a_whole_one(hub: HubServer, encoder: Path) -> None:
    hub.push(NAME, encoder)
    hub.fault = lambda method, path: (404, "EntryNotFound") if path.endswith(".safetensors") else None
    refused()
    hub.fault = lambda _method, _path: (500, "")
    assert "has no weights that are read" in refused()
    hub.fault = lambda _method, _path: None
    assert open_source(NAME, SourceOptions()).name == "encoder"


def test_a_model_with_a_token_is_read_with_it(hub: HubServer, encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push(NAME, encoder, token="hf_secret")  # noqa: S106  (of this test)
    assert f"{NAME} is gated; ask for access at {hub.url}/{NAME}" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert open_source(NAME, SourceOptions()).name == "encoder"


def test_what_the_hub_does_not_have_is_one_line_with_the_cure(hub: HubServer, encoder: Path) -> None:
    hub.push(NAME, encoder)
    text = refused("models/encodre")
    assert "there is no file or folder models/encodre, and as a model of the hub:" in text
    assert f"{hub.url} has no model models/encodre, or it is private; check the name, or give a token" in text
    assert f"{NAME} has no revision 'v9'; expected a branch, a tag or a commit" in refused(f"hf://{NAME}@v9")
    assert "is no name that a hub may have" in refused("a--b/c")
    hub.fault = lambda _method, _path: (403, "")
    assert f"{hub.url} refuses {NAME} with 403; check the token in HF_TOKEN" in refused()


def test_a_cache_that_cannot_be_written_is_named(
    hub: HubServer, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(NAME, encoder)
    (tmp_path / "file").touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    assert "file/hub" in refused()
    assert "cannot hold a copy: Not a directory; make room, or name another folder with HF_HOME" in refused()


def only(*kept: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            if path.relative_to(folder).as_posix() not in kept:
                path.unlink()

    return change


def one_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(("a", "b"))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def own_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling.Own"}}))
    (folder / "modeling.py").write_text("raise SystemExit('it ran')")


class RunsCode:
    """An object whose pickle raises when it is read."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return sys.exit, (0,)


def code_in_a_pickle(folder: Path) -> None:
    as_pickles(folder)
    torch.save({"weight": RunsCode()}, folder / "pytorch_model.bin")


UNUSABLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "other frameworks": (only("config.json", "tf_model.h5"), "expected model.safetensors .*, in config.json, tf_model.h5"),
    "ONNX alone": (only("onnx/model.onnx"), "has no config.json, .*halfserve convert FOLDER/onnx/model.onnx --repository"),
    "half of the shards": (one_shard, "index.json names model-00002-of-00002.safetensors, which is not beside it"),
    "code in a pickle": (code_in_a_pickle, "pytorch_model.bin"),
    "own code": (own_code, "brings code of its own .AutoModel., which is not run"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_repository_that_cannot_be_exported_is_refused(kind: str, hub: HubServer, encoder: Path, tmp_path: Path) -> None:
    change, text = UNUSABLE[kind]
    commit = hub.push(NAME, changed(encoder, tmp_path / "changed", change))
    with pytest.raises(ExportError, match=text):
        open_source(NAME, SourceOptions())
    assert not [path for path in hub.fetched if path.endswith(".py")]
    fetching = f"hf download {NAME} --revision {commit} --local-dir FOLDER, then halfserve export FOLDER"
    assert fetching in refused(trusting=True)
