"""Versions are published to object storage so that readers see whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import typer
from typer.testing import CliRunner

from halfserve.export.certificate.certificate import Certificate
from halfserve.export.cli.convert import EXIT_CODES, convert
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.repository.repository_target import RepositoryTarget
from halfserve.export.repository.stored_repository import StoredRepository
from halfserve.export.repository.version_writer import write_model_version
from tests.export.repository.test_version_writer import Certify
from tests.export.stored_models import chain, sums, with_data_files
from tests.models import save_mlp
from tests.s3_server import S3Server, s3_server

VERSION = ["certificate.json", "fp32/model.onnx", "model.onnx"]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as server:
        yield server


def published(repository: StoredRepository, model: onnx.ModelProto, certificate: Certificate) -> str | None:
    with repository.likeness("m") as folder:
        return repository.publish(write_model_version(folder, "m", model, certificate, fp32_twin=model))


def test_the_model_file_is_put_last(s3: S3Server, model: onnx.ModelProto, certify: Certify) -> None:
    repository = StoredRepository("s3://bucket/models")
    assert published(repository, model, certify(model)) == "s3://bucket/models/m/1"
    put = [path for method, path in s3.requests if method == "PUT"]
    assert put == [f"models/m/{name}" for name in ("1/certificate.json", "1/fp32/model.onnx", "config.pbtxt", "1/model.onnx")]
    s3.put("models/m/config.pbtxt", config := s3.get("models/m/config.pbtxt") + b"# ours\n")
    assert published(repository, model, certify(model)) == "s3://bucket/models/m/2"
    assert s3.get("models/m/config.pbtxt") == config
    versions = [f"models/m/{version}/{name}" for version in (1, 2) for name in VERSION]
    assert s3.keys() == [*versions, "models/m/config.pbtxt"]


def test_a_number_that_another_writer_takes_is_left_to_it(s3: S3Server, model: onnx.ModelProto, certify: Certify) -> None:
    repository = StoredRepository("s3://bucket/models")
    s3.put("models/m/1/model.onnx", b"theirs")
    with repository.likeness("m") as folder:
        ours = write_model_version(folder, "m", model, certify(model))
        s3.put("models/m/2/certificate.json", b"theirs")
        assert repository.publish(ours) is None
    assert s3.get("models/m/2/certificate.json") == b"theirs"
    assert published(repository, model, certify(model)) == "s3://bucket/models/m/3"


def test_a_store_that_knows_no_conditions_is_written_to(s3: S3Server, model: onnx.ModelProto, certify: Certify) -> None:
    s3.fault = lambda method, _: 501 if method == "PUT" and "If-None-Match" in s3.headers else None
    repository = StoredRepository("s3://bucket/models")
    assert published(repository, model, certify(model)) == "s3://bucket/models/m/1"
    assert published(repository, model, certify(model)) == "s3://bucket/models/m/2"


def test_a_failed_publication_leaves_nothing(s3: S3Server, model: onnx.ModelProto, certify: Certify) -> None:
    repository = StoredRepository("s3://bucket/models")
    s3.fault = lambda method, path: 403 if (method, path) == ("PUT", "models/m/1/model.onnx") else None
    with pytest.raises(ExportError, match=r"^s3://bucket/models/m/1/model.onnx: cannot be written: .*give credentials"):
        published(repository, model, certify(model))
    assert s3.keys() == []


def test_data_files_come_before_the_model(s3: S3Server, tmp_path: Path, certify: Certify) -> None:
    path = with_data_files(sums(2, 512), tmp_path / "sums.onnx")
    repository, opened = StoredRepository("s3://bucket/models"), open_model(path)
    certificate = certify(opened.proto)
    with repository.likeness("m") as folder:
        certificate = replace(certificate, onnx_sha256=opened.sha256)
        repository.publish(write_model_version(folder, "m", opened, certificate, max_batch_size=0))
    put = [path for method, path in s3.requests if method == "PUT"]
    assert put[-1] == "models/m/1/model.onnx"
    assert [path.rpartition("/")[2] for path in put[1:-2]] == sorted(opened.locations)


def test_another_network_is_no_next_version_of_a_default_name(
    s3: S3Server, model: onnx.ModelProto, certify: Certify, tmp_path: Path
) -> None:
    repository = "s3://bucket/models"
    target = RepositoryTarget(repository=repository, name="m", default_name=True)
    target.check(open_model(model))
    published(StoredRepository(repository), model, certify(model))
    target.check(open_model(model))
    with pytest.raises(ExportError, match="^s3://bucket/models/m holds another network"):
        target.check(open_model(save_mlp(tmp_path / "mlp.onnx")))
    with pytest.raises(ExportError, match="version 1 of 'm' exists and is never replaced"):
        RepositoryTarget(repository=repository, name="m", version=1).check(open_model(model))
    with pytest.raises(ExportError, match="is no model name"):
        RepositoryTarget(repository=repository, name="../m").check(open_model(model))


def test_convert_publishes_and_shows_the_url(s3: S3Server, tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    onnx.save(chain(["Mul"], 3.0), source)
    app = typer.Typer()
    app.command()(convert)
    done = CliRunner().invoke(app, [str(source), "--repository", "s3://bucket/models", "--name", "m"])
    assert done.exit_code == 0, done.output
    assert "written   s3://bucket/models/m/1" in done.output
    assert s3.keys()[:2] == ["models/m/1/certificate.json", "models/m/1/model.onnx"]
    s3.fault = lambda *_: 403
    failed = CliRunner().invoke(app, [str(source), "--repository", "s3://bucket/models"])
    assert type(failed.exception) in EXIT_CODES
    assert str(failed.exception).startswith("s3://bucket/models/m: cannot be read: ")
