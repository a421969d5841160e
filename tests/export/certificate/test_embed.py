from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from export.certificate.certificate import Certificate, read_certificate
from export.certificate.embed import KEY, check_embedded, embed, embed_in_file, graph_sha256
from export.errors import ExportError
from export.files.model_file import open_model, serialize
from tests.export.onnx_files import sums

Certify = Callable[[onnx.ModelProto], Certificate]


@pytest.fixture
def big() -> onnx.ModelProto:
    return sums(3, 1000)


@pytest.fixture
def certificate(big: onnx.ModelProto, certify: Certify) -> Certificate:
    return replace(certify(big), graph_sha256=graph_sha256(big))


def with_data_file(model: onnx.ModelProto, folder: Path) -> Path:
    folder.mkdir()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=100)
    return folder / "model.onnx"


def test_each_side_names_the_other(big: onnx.ModelProto, certificate: Certificate) -> None:
    before = serialize(big)
    model, embedded = embed(big, certificate)
    assert serialize(big) == before
    assert embedded.onnx_sha256 == hashlib.sha256(serialize(model)).hexdigest()
    assert embedded.onnx_bytes == len(serialize(model))
    assert [entry.value for entry in model.metadata_props if entry.key == KEY] == [embedded.sha256]
    check_embedded(model, embedded)
    check_embedded(serialize(model), read_certificate(embedded.to_bytes()))


def test_embedding_again_changes_nothing(big: onnx.ModelProto, certificate: Certificate) -> None:
    once = embed(big, certificate)
    twice = embed(*once)
    assert serialize(twice[0]) == serialize(once[0])
    assert twice[1] == once[1]


def test_a_changed_weight_is_found_out(big: onnx.ModelProto, certificate: Certificate) -> None:
    model, embedded = embed(big, certificate)
    values = numpy_helper.to_array(model.graph.initializer[1]).copy()
    values[77] += 1
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(values, model.graph.initializer[1].name))
    with pytest.raises(ExportError, match="belongs to another model: its graph_sha256 differs"):
        check_embedded(model, embedded)
    with pytest.raises(ExportError, match="belongs to another model"):
        embed(model, embedded)


def test_a_changed_figure_or_limit_is_found_out(big: onnx.ModelProto, certificate: Certificate) -> None:
    model, embedded = embed(big, certificate)
    forged = json.loads(embedded.to_bytes())
    forged["budget"]["max_scaled_error"] = 0.5
    with pytest.raises(ExportError, match=r"names the certificate [0-9a-f]{12}\.\.\., this one is"):
        check_embedded(model, read_certificate(json.dumps(forged)))


def test_a_model_that_names_none_is_told_so(big: onnx.ModelProto, certificate: Certificate) -> None:
    with pytest.raises(ExportError, match="the model names no certificate in its metadata"):
        check_embedded(big, certificate)


def test_the_graphs_hash_does_not_depend_on_where_weights_are(big: onnx.ModelProto, tmp_path: Path) -> None:
    file = with_data_file(onnx.load_from_string(serialize(big)), tmp_path / "external")
    (tmp_path / "single.onnx").write_bytes(serialize(big))
    assert graph_sha256(file) == graph_sha256(tmp_path / "single.onnx") == graph_sha256(big)
    assert graph_sha256(sums(3, 1000, opset=19)) != graph_sha256(big)
    assert graph_sha256(sums(4, 1000)) != graph_sha256(big)


@pytest.mark.parametrize("external", [False, True])
def test_a_file_of_any_size_is_appended_to(
    big: onnx.ModelProto, certificate: Certificate, tmp_path: Path, external: bool
) -> None:
    path = tmp_path / "single.onnx"
    path.write_bytes(serialize(big))
    if external:
        path = with_data_file(onnx.load_from_string(serialize(big)), tmp_path / "external")
    before = path.read_bytes()
    embedded = embed_in_file(path, certificate)
    assert path.read_bytes().startswith(before)
    assert len(path.read_bytes()) < len(before) + 200
    assert embedded.onnx_sha256 == open_model(path).sha256
    check_embedded(path, embedded)
    onnx.checker.check_model(str(path), full_check=True)
    assert np.array_equal(
        numpy_helper.to_array(onnx.load(path).graph.initializer[0]), numpy_helper.to_array(big.graph.initializer[0])
    )
    with pytest.raises(ExportError, match="names a certificate already"):
        embed_in_file(path, embedded)
    assert not list(path.parent.glob(".*"))


def test_a_certificate_of_version_1_is_about_no_graph_and_still_embeds(big: onnx.ModelProto, certify: Certify) -> None:
    model, embedded = embed(big, certify(big))
    check_embedded(model, embedded)
