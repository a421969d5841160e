from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import onnx
import pytest

from export.certificate.certificate import Certificate, read_certificate
from export.errors import ExportError
from export.repository.model_version_writer import write_model_version
from export.to_onnx.export_onnx import serialize
from tests.export.chain import chain

Certify = Callable[[onnx.ModelProto], Certificate]


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_layout_is_tritons(tmp_path: Path, model: onnx.ModelProto, certify: Certify) -> None:
    repository = tmp_path / "not" / "there" / "yet"
    written = write_model_version(repository, "m", model, certify(model))
    assert written == repository / "m" / "1"
    assert tree(repository) == ["m", "m/1", "m/1/certificate.json", "m/1/model.onnx", "m/config.pbtxt"]
    assert (written / "model.onnx").read_bytes() == serialize(model)
    assert read_certificate((written / "certificate.json").read_bytes()) == certify(model)


def test_versions_count_up_and_the_config_stays(tmp_path: Path, model: onnx.ModelProto, certify: Certify) -> None:
    write_model_version(tmp_path, "m", model, certify(model), version=4)
    config = tmp_path / "m" / "config.pbtxt"
    config.write_text("max_batch_size: 5  # ours\n")
    assert write_model_version(tmp_path, "m", model, certify(model)) == tmp_path / "m" / "5"
    assert config.read_text() == "max_batch_size: 5  # ours\n"


def test_a_config_that_is_missing_is_written(tmp_path: Path, model: onnx.ModelProto, certify: Certify) -> None:
    (tmp_path / "m" / "notes").mkdir(parents=True)
    assert write_model_version(tmp_path, "m", model, certify(model)).name == "1"
    assert "onnxruntime_onnx" in (tmp_path / "m" / "config.pbtxt").read_text()


def test_a_version_is_never_replaced(tmp_path: Path, model: onnx.ModelProto, certify: Certify) -> None:
    write_model_version(tmp_path, "m", model, certify(model))
    other = chain(["Mul"], 3.0)
    with pytest.raises(ExportError, match="version 1 of 'm' exists and is never replaced"):
        write_model_version(tmp_path, "m", other, certify(other), version=1)
    assert (tmp_path / "m" / "1" / "model.onnx").read_bytes() == serialize(model)


@pytest.mark.parametrize("name", ["../m", "a/b", "", ".hidden", "a b", "x" * 129, "m\n"])
def test_names_that_leave_the_repository_are_refused(
    name: str, tmp_path: Path, model: onnx.ModelProto, certify: Certify
) -> None:
    with pytest.raises(ExportError, match="is no model name; use letters"):
        write_model_version(tmp_path / "repository", name, model, certify(model))
    assert tree(tmp_path) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version": 0}, "0 is no model version"),
        ({"version": 2**63}, "is no model version"),
        ({"max_batch_size": -1}, "max_batch_size is -1; expected 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path, model: onnx.ModelProto, certify: Certify
) -> None:
    with pytest.raises(ExportError, match=message):
        write_model_version(tmp_path, "m", model, certify(model), **settings)
    assert tree(tmp_path) == []


def test_a_certificate_of_another_model_is_refused(tmp_path: Path, model: onnx.ModelProto, certify: Certify) -> None:
    with pytest.raises(ExportError, match="the certificate belongs to another model"):
        write_model_version(tmp_path, "m", model, certify(chain(["Mul"], 3.0)))
    assert tree(tmp_path) == []


def test_a_contradicting_config_leaves_everything_as_it_was(tmp_path: Path, model: onnx.ModelProto, certify: Certify) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text('name: "other"')
    with pytest.raises(ExportError, match="says name 'other', this model needs 'm'"):
        write_model_version(tmp_path, "m", model, certify(model))
    assert tree(tmp_path) == ["m", "m/config.pbtxt"]


def test_a_file_in_the_way_is_named(tmp_path: Path, model: onnx.ModelProto, certify: Certify) -> None:
    (tmp_path / "m").write_text("in the way")
    with pytest.raises(ExportError, match=r"cannot write to the repository .*: Not a directory"):
        write_model_version(tmp_path, "m", model, certify(model))


@pytest.mark.parametrize("prepared", [False, True])
def test_writers_at_the_same_time_get_versions_of_their_own(prepared: bool, tmp_path: Path, certify: Certify) -> None:
    if prepared:
        (tmp_path / "m").mkdir()  # without a config.pbtxt: all of them write one
    models = [chain(["Mul"], float(factor)) for factor in range(1, 9)]
    with ThreadPoolExecutor(len(models)) as pool:
        written = list(pool.map(lambda model: write_model_version(tmp_path, "m", model, certify(model)), models))
    assert sorted(int(path.name) for path in written) == list(range(1, 9))
    for model, path in zip(models, written, strict=True):
        assert (path / "model.onnx").read_bytes() == serialize(model)
    assert not [name for name in tree(tmp_path) if "/." in name or name.startswith(".")]


@dataclass(frozen=True, kw_only=True)
class Overtaken(Certificate):
    """A certificate during whose writing something else happens, such as another writer's being faster."""

    meanwhile: list[Callable[[], object]] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        while self.meanwhile:
            self.meanwhile.pop()()
        return super().to_bytes()


@pytest.mark.parametrize("exists", [False, True])
def test_a_version_that_another_writer_takes_in_the_meantime_is_not_replaced(
    exists: bool, tmp_path: Path, model: onnx.ModelProto, certify: Certify
) -> None:
    first, other = chain(["Mul"], 3.0), chain(["Mul"], 5.0)
    if exists:
        write_model_version(tmp_path, "m", first, certify(first), version=1)

    def overtaken() -> Certificate:
        parts = {entry.name: getattr(certify(model), entry.name) for entry in fields(Certificate)}
        return Overtaken(**parts, meanwhile=[lambda: write_model_version(tmp_path, "m", other, certify(other), version=2)])

    with pytest.raises(ExportError, match="version 2 of 'm' exists and is never replaced"):
        write_model_version(tmp_path, "m", model, overtaken(), version=2)
    assert (tmp_path / "m" / "2" / "model.onnx").read_bytes() == serialize(other)
    assert write_model_version(tmp_path, "m", model, certify(model)).name == "3"
