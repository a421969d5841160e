from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from rich.console import Console

from export.certificate.certificate import Accuracy, Certificate, read_certificate
from export.certificate.table import certificate_table
from export.errors import ExportError
from export.verification.metrics import compare
from export.verification.sessions import Probe

Certify = Callable[[onnx.ModelProto], Certificate]


@pytest.fixture
def full(model: onnx.ModelProto, certify: Certify) -> Certificate:
    certificate = certify(model)
    verdict = replace(certificate.outputs[0], execution="runtime", violations=("max abs error 2 (limit 1)",))
    return replace(
        certificate,
        outputs=(*certificate.outputs, verdict),
        reference_bytes=10 * certificate.onnx_bytes,
        accuracy=Accuracy(reference=0.5, rounded=0.25, runtime=0.25),
        probe=Probe(level="ORT_ENABLE_EXTENDED", crashes=("ORT_ENABLE_ALL: killed by SIGSEGV",)),
        versions={"torch": "2"},
        conversion={"fp32_modules": ["norm"], "ledger": {"flushed": 3}, "tensors": []},
    )


def test_it_reads_back_what_it_wrote(full: Certificate) -> None:
    assert read_certificate(full.to_bytes()) == full


def test_nan_is_written_as_json_allows_and_reads_back(full: Certificate) -> None:
    figures = compare(np.array([np.nan]), np.array([1.0]))
    certificate = replace(full, outputs=(replace(full.outputs[0], figures=figures),))
    content = certificate.to_bytes()
    assert json.loads(content, parse_constant=pytest.fail)["outputs"][0]["figures"]["max_abs_error"] == "nan"
    assert np.isnan(read_certificate(content).outputs[0].figures.max_abs_error)


def test_the_verdict_is_the_outputs(full: Certificate) -> None:
    assert full.violations == ["output 'y' (runtime): max abs error 2 (limit 1)"]
    assert not full.passed
    assert replace(full, outputs=full.outputs[:1]).passed
    assert not replace(full, outputs=()).passed


def damaged(change: Callable[[dict[str, Any]], object]) -> Callable[[Certificate], bytes]:
    def content(certificate: Certificate) -> bytes:
        data = certificate.to_json()
        change(data)
        return json.dumps(data).encode()

    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda _: b"{", "the certificate is no JSON"),
        (lambda _: b"\xff\xfe\xff", "the certificate is no JSON"),
        (lambda _: b"[]", "no halfserve certificate"),
        (damaged(lambda data: data.pop("schema")), "no halfserve certificate"),
        (damaged(lambda data: data.update(schema_version=9)), "schema version 9, expected 1"),
        (damaged(lambda data: data.pop("outputs")), "incomplete or damaged: KeyError 'outputs'"),
        (damaged(lambda data: data["budget"].update(depth=1)), "incomplete or damaged: TypeError"),
        (damaged(lambda data: data.pop("onnx_sha256")), "incomplete or damaged: TypeError"),
    ],
)
def test_what_is_no_certificate_is_refused(full: Certificate, content: Callable[[Certificate], bytes], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        read_certificate(content(full))


def test_the_table_says_what_matters_in_eighty_columns(full: Certificate) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(certificate_table(full))
    text = console.export_text()
    assert "10% of float32's" in text
    assert "accuracy  25.00%, float32 50.00%" in text
    assert "runtime   ORT_ENABLE_ALL: killed by SIGSEGV" in text
    assert "verdict   over budget: output 'y' (runtime): max abs error 2 (limit 1)" in text
    assert "rounded" in text
    assert "…" not in text
