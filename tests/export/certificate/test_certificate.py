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

from export.certificate.budget import Budget
from export.certificate.certificate import Accuracy, Certificate, read_certificate
from export.certificate.html import certificate_page
from export.certificate.probe import Probe
from export.certificate.risk import Risk
from export.certificate.table import certificate_table
from export.certificate.verdicts import AdversarialVerdict, LevelVerdict
from export.errors import ExportError, UsageError
from export.verification.metrics import compare

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
        levels=(LevelVerdict(provider="CPU", level="ORT_ENABLE_ALL", max_scaled_error=float("inf")),),
        adversarial=(
            AdversarialVerdict(case="zeros", execution="rounded", output="y", figures=certificate.outputs[0].figures),
            AdversarialVerdict(case="ones", execution="", output="", note="the reference fails on it"),
            AdversarialVerdict(case="4 times larger", execution="rounded", output="y", violations=("NaN",), factor=4.0),
        ),
        headroom=1.0,
        risks=(Risk(node="n", op_type="ReduceMean", what="sum of squares", reach=float("inf")),),
        notes=("output 'z' was not compared",),
        placement={"nodes": {"CPU": 3}},
    )


def test_it_reads_back_what_it_wrote(full: Certificate) -> None:
    assert read_certificate(full.to_bytes()) == full


def test_nan_is_written_as_json_allows_and_reads_back(full: Certificate) -> None:
    figures = compare(np.array([np.nan]), np.array([1.0]))
    certificate = replace(full, outputs=(replace(full.outputs[0], figures=figures),))
    content = certificate.to_bytes()
    assert json.loads(content, parse_constant=pytest.fail)["outputs"][0]["figures"]["max_abs_error"] == "nan"
    assert np.isnan(read_certificate(content).outputs[0].figures.max_abs_error)


def test_certificates_of_version_1_are_read(full: Certificate) -> None:
    data = full.to_json()
    added = ("graph_sha256", "levels", "adversarial", "headroom", "accumulators", "risks", "notes", "placement")
    old = {name: value for name, value in data.items() if name not in added} | {"schema_version": 1}
    for output in old["outputs"]:
        del output["plot"], output["figures"]["floating"]
    for limit in ("adversarial_factor", "min_headroom"):
        del old["budget"][limit]
    read = read_certificate(json.dumps(old))
    assert read.outputs == full.outputs
    assert read.adversarial == ()
    assert read.violations == ["output 'y' (runtime): max abs error 2 (limit 1)"]


def test_edge_cases_headroom_and_sums_count_where_the_budget_says_so(full: Certificate) -> None:
    sound = replace(full, outputs=full.outputs[:1])
    assert sound.passed
    broken = AdversarialVerdict(case="zeros", execution="rounded", output="y", violations=("1 of 2 values are NaN",))
    assert replace(sound, adversarial=(broken,)).violations == ["output 'y' on zeros (rounded): 1 of 2 values are NaN"]
    assert replace(sound, budget=Budget(min_headroom=4)).violations == ["headroom 1 (least 4)"]
    (text,) = replace(sound, budget=Budget(min_headroom=4), headroom=None).violations
    assert text.startswith("headroom was not measured")
    assert replace(sound, headroom=None).passed
    (text,) = replace(sound, accumulators="float16").violations
    assert text == "ReduceMean 'n': its sum of squares reaches inf inside, over float16's 65504"


def test_its_hash_covers_all_but_the_files_own(full: Certificate) -> None:
    assert replace(full, onnx_sha256="other", onnx_bytes=7).sha256 == full.sha256
    assert replace(full, samples=5).sha256 != full.sha256
    assert read_certificate(full.to_bytes()).sha256 == full.sha256


def test_names_with_brackets_are_no_markup(full: Certificate) -> None:
    verdict = replace(full.outputs[0], name="a[/b] [red]x")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(certificate_table(replace(full, model="m[/x]", outputs=(verdict,), notes=("[/y]",))))
    text = console.export_text()
    assert all(part in text for part in ("m[/x]", "a[/b] [red]x", "note      [/y]"))


def test_kept_nodes_are_named_and_not_all_of_many(full: Certificate) -> None:
    kept = [{"name": f"node{number}"} for number in range(9)]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(certificate_table(replace(full, conversion={"kept": kept, "fp32_modules": [], "ledger": {}})))
    assert "kept fp32 node0, node1, node2, node3, node4 and 4 more" in console.export_text()


def test_the_verdict_is_the_outputs(full: Certificate) -> None:
    assert full.violations == ["output 'y' (runtime): max abs error 2 (limit 1)"]
    assert not full.passed
    assert replace(full, outputs=full.outputs[:1]).passed
    assert not replace(full, outputs=()).passed


def test_what_compared_nothing_does_not_pass(full: Certificate) -> None:
    number = full.outputs[0]
    nothing = replace(number, figures=compare(np.zeros((0, 4)), np.zeros((0, 4))))
    count = replace(number, figures=compare(np.zeros(1, int), np.zeros(1, int)))
    assert not replace(full, outputs=(nothing,)).passed
    assert not replace(full, outputs=(nothing, count)).passed  # no number that float16 could have changed
    assert replace(full, outputs=(nothing, number)).passed
    assert replace(full, outputs=(count,)).passed


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
        (damaged(lambda data: data.update(schema_version=9)), "schema version 9, expected 1 to 3"),
        (damaged(lambda data: data.pop("outputs")), "incomplete or damaged: KeyError 'outputs'"),
        (damaged(lambda data: data["budget"].update(depth=1)), "incomplete or damaged: TypeError"),
        (damaged(lambda data: data["budget"].update(min_agreement=7)), "incomplete or damaged: min_agreement is 7; expected"),
        (damaged(lambda data: data.pop("onnx_sha256")), "incomplete or damaged: TypeError"),
    ],
)
def test_what_is_no_certificate_is_refused(full: Certificate, content: Callable[[Certificate], bytes], message: str) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        read_certificate(content(full))
    assert not isinstance(caught.value, UsageError), "nobody has used it wrongly"


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


def test_kinds_of_columns_and_what_vanishes_read_back_and_are_shown(full: Certificate) -> None:
    reference = np.random.default_rng(0).random((32, 3)) * [500, 1, 1]
    figures = compare(reference, reference * [1, 1, 0])
    certificate = replace(full, outputs=(replace(full.outputs[0], figures=figures),))
    assert read_certificate(certificate.to_bytes()).outputs == certificate.outputs
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(certificate_table(certificate))
    text = console.export_text()
    assert "kinds     y (rounded): columns 0 on axis 1 reach" in text
    assert "columns 1-2 on axis 1 reach" in text
    assert "of 1, in column 2" in text
    assert "columns 1-2 on axis 1 reach" in certificate_page(certificate)
    alike = replace(full.outputs[0], figures=compare(np.ones((2, 2)), np.ones((2, 2))))
    console.print(certificate_table(replace(full, outputs=(alike,))))
    assert " none" in console.export_text()
