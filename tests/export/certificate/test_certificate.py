from __future__ import annotations

import base64
import hashlib
import json
import math
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed448, ed25519
from onnx import numpy_helper

from halfserve.export.certificate.budget import Budget, ErrorFigures, adversarial_violations, violations
from halfserve.export.certificate.certificate import SCHEMA_VERSION, Certificate, read_certificate, signing_key
from halfserve.export.certificate.embed import KEY, certificate_of, check_embedded, embed, embed_in_file, graph_sha256
from halfserve.export.certificate.html import certificate_page
from halfserve.export.certificate.table import certificate_table
from halfserve.export.certificate.verdicts import Accuracy, AdversarialVerdict, LevelVerdict, Probe, Risk
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.onnx_files.model_file import open_model, serialize
from halfserve.export.verification.metrics import compare
from halfserve.export.verification.samples import Array
from halfserve.protos.certificate_signature import CertificateKeyError, SigningKey, VerifyingKey
from halfserve.protos.certificates import (
    INSIDE,
    MAX_CERTIFICATE_BYTES,
    certificate_inside,
    certificate_sha256,
    metadata_entry,
    unpacked_certificate,
)
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.model_control.certificate_check import check_certificate
from tests.export.stored_models import in_one_file, sums
from tests.key_pairs import key_pair
from tests.whole_words import broken_words, printed

Certify = Callable[[onnx.ModelProto], Certificate]
STORED = Path(__file__).parent / "versions"
ONES: Array = np.ones(4, np.float32)
BEYOND = "float32 itself answers 1e+05, which float16 cannot hold"


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
            AdversarialVerdict(case="ones", execution="", output="", note=BEYOND),
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


@pytest.mark.parametrize("folder", sorted(path.name for path in STORED.iterdir() if path.is_dir()))
def test_a_stored_certificate_of_each_version_still_holds(folder: str, tmp_path: Path) -> None:
    """Each pair was written by the halfserve of its time; those from version 4 on are signed, from 7 on each with its key."""
    model, content = STORED / folder / "model.onnx", (STORED / folder / "certificate.json").read_bytes()
    certificate = read_certificate(content)
    version = json.loads(content)["schema_version"]
    assert folder.startswith(str(version))
    assert certificate.passed
    assert certificate.notes == ()
    assert certificate.to_bytes() == content
    assert certificate.onnx_sha256 == open_model(model).sha256
    key = VerifyingKey((STORED / folder if version >= 7 else STORED) / "public.pem")
    assert key.signed(certificate.to_json()) == (version >= 4)
    if version == 1:  # models did not name their certificates yet
        with pytest.raises(ExportError, match="names no certificate in its metadata"):
            check_embedded(model, certificate)
    else:
        check_embedded(model, certificate)
        with pytest.raises(ExportError, match=r"names the certificate [0-9a-f]{12}\.\.\., this one is"):
            check_embedded(model, replace(certificate, samples=17))
    copy = shutil.copy(model, tmp_path)
    check_embedded(copy, embed_in_file(Path(copy), certificate))


def test_the_newest_version_has_stored_files() -> None:
    assert (STORED / str(SCHEMA_VERSION) / "certificate.json").exists()


def test_fields_of_a_newer_halfserve_are_ignored_with_a_note_and_hashed(
    full: Certificate, model: onnx.ModelProto, tmp_path: Path
) -> None:
    private, public = key_pair(tmp_path)
    data = full.to_json()
    data["colour"] = {"depth": 7}
    for output in data["outputs"]:
        output["figures"]["spread"] = "nan"
    read = read_certificate(json.dumps(data))
    assert read.outputs == full.outputs
    note = "this halfserve does not know these fields of the certificate, and ignores them: colour, outputs.figures.spread"
    assert read.notes == (*full.notes, note)
    assert note in printed(certificate_table(read), 300)
    assert read.to_json() == data
    assert read.sha256 == certificate_sha256(data) != full.sha256
    signed = read.signed(SigningKey(private))
    assert signed.to_json() == {**data, "signature": signed.signature}
    assert VerifyingKey(public).signed(signed.to_json())
    assert read_certificate(signed.to_bytes()).sha256 == signed.sha256 == read.sha256
    named, embedded = embed(model, read)
    check_embedded(named, read_certificate(embedded.to_bytes()))


def test_edge_cases_headroom_and_sums_count_where_the_budget_says_so(full: Certificate) -> None:
    sound = replace(full, outputs=full.outputs[:1])
    assert sound.passed
    broken = AdversarialVerdict(case="zeros", execution="rounded", output="y", violations=("1 of 2 values are NaN",))
    assert replace(sound, adversarial=(broken,)).violations == ["output 'y' on zeros (rounded): 1 of 2 values are NaN"]
    twice = tuple(replace(broken, execution=run) for run in ("rounded", "runtime"))
    assert replace(full, adversarial=twice, budget=Budget(min_headroom=4)).failures == [
        "output 'y' (runtime): max abs error 2 (limit 1); over budget too: on zeros",
        "headroom 1 (least 4)",
    ]
    assert replace(sound, budget=Budget(min_headroom=4)).violations == ["headroom 1 (least 4)"]
    (text,) = replace(sound, budget=Budget(min_headroom=4), headroom=None).violations
    assert text.startswith("headroom was not measured")
    assert replace(sound, headroom=None).passed
    (text,) = replace(sound, accumulators="float16").violations
    assert text == "ReduceMean 'n': its sum of squares reaches inf inside, over float16's 65504"


def test_its_hash_covers_all_but_the_files_own(full: Certificate) -> None:
    assert replace(full, onnx_sha256="other", onnx_bytes=7).sha256 == full.sha256
    assert replace(full, samples=5).sha256 != full.sha256
    assert replace(full, precision="bfloat16").sha256 != full.sha256
    assert read_certificate(full.to_bytes()).sha256 == full.sha256


def test_names_with_brackets_are_no_markup(full: Certificate) -> None:
    verdict = replace(full.outputs[0], name="a[/b] [red]x")
    text = printed(certificate_table(replace(full, model="m[/x]", outputs=(verdict,), notes=("[/y]",))), 200)
    assert all(part in text for part in ("m[/x]", "a[/b] [red]x", "note      [/y]"))


def test_kept_nodes_are_named_and_not_all_of_many(full: Certificate) -> None:
    kept = [{"name": f"node{number}"} for number in range(9)]
    shown = printed(certificate_table(replace(full, conversion={"kept": kept, "fp32_modules": [], "ledger": {}})), 200)
    assert "float32   node0, node1, node2, node3, node4 and 4 more" in shown


def test_the_verdict_is_the_outputs(full: Certificate) -> None:
    assert full.violations == ["output 'y' (runtime): max abs error 2 (limit 1)"]
    assert not full.passed
    assert replace(full, outputs=full.outputs[:1]).passed
    assert not replace(full, outputs=()).passed


def test_a_certificate_without_compared_elements_does_not_pass(full: Certificate) -> None:
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
        (lambda _: b"{", "the certificate is not JSON"),
        (lambda _: b"\xff\xfe\xff", "the certificate is not JSON"),
        (lambda _: b"[]", "not a halfserve certificate"),
        (damaged(lambda data: data.pop("schema")), "not a halfserve certificate"),
        (damaged(lambda data: data.update(schema_version=9)), "schema version 9, expected 1 to 7; read it with the halfserve"),
        (damaged(lambda data: data.update(schema_version=[])), r"schema version \[\], expected 1 to 7"),
        (damaged(lambda data: data.pop("outputs")), "incomplete or damaged: TypeError"),
        (damaged(lambda data: data.update(budget=[])), "incomplete or damaged: "),
        (damaged(lambda data: data["budget"].update(min_agreement=7)), "incomplete or damaged: min_agreement is 7; expected"),
        (damaged(lambda data: data.pop("onnx_sha256")), "incomplete or damaged: TypeError"),
    ],
)
def test_content_that_is_not_a_certificate_is_refused(
    full: Certificate, content: Callable[[Certificate], bytes], message: str
) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        read_certificate(content(full))
    assert not isinstance(caught.value, UsageError)


def test_the_table_says_what_matters_in_eighty_columns(full: Certificate) -> None:
    text = printed(certificate_table(full), 80)
    assert "10% of the float32 model's" in text
    assert "accuracy  25.00%, float32 50.00%" in text
    assert "runtime   ORT_ENABLE_ALL: killed by SIGSEGV" in text
    assert text.splitlines()[-1] == "verdict   over budget: output 'y' (runtime): max abs error 2 (limit 1)"
    assert f"left out  ones: {BEYOND}\n" in text
    assert "output (run)   error   scaled error   agreement   NaN or inf" in text, "the head is one row"
    assert "rounded   simulated: every node's result is rounded to float16, as a GPU does" in text
    for name in ("last_hidden_state", "/encoder/layer.11/attention/self_attention/projection/" * 2):
        named = replace(full, outputs=(replace(full.outputs[0], name=name),))
        assert broken_words(certificate_table(named)) == []
        assert name in printed(certificate_table(named), 80)
    broken = replace(full.outputs[0], violations=tuple(f"error {number}" for number in range(20)))
    assert "over budget in 12 more figures; --json lists all" in printed(
        certificate_table(replace(full, outputs=(broken,))), 80
    )


def test_kinds_of_columns_and_what_vanishes_read_back_and_are_shown(full: Certificate) -> None:
    reference = np.random.default_rng(0).random((32, 3)) * [500, 1, 1]
    figures = compare(reference, reference * [1, 1, 0])
    certificate = replace(full, outputs=(replace(full.outputs[0], figures=figures),))
    assert read_certificate(certificate.to_bytes()).outputs == certificate.outputs
    text = printed(certificate_table(certificate), 200)
    assert "columns   y (rounded): columns 0 on axis 1 reach" in text
    assert "columns 1-2 on axis 1 reach" in text
    assert "of 1, in column 2" in text
    assert "columns 1-2 on axis 1 reach" in certificate_page(certificate)


def test_agreement_without_evidence_is_shown_as_none(full: Certificate) -> None:
    reference = np.random.default_rng(0).random((32, 3)) + np.eye(3)[0]
    certificate = replace(full, outputs=(replace(full.outputs[0], figures=compare(reference, reference)),))
    for report in (printed(certificate_table(certificate), 200), certificate_page(certificate)):
        assert "none" in report
        assert "100.00%" not in report


@pytest.fixture
def big() -> onnx.ModelProto:
    return sums(3, 1000)


@pytest.fixture
def certificate(big: onnx.ModelProto, certify: Certify) -> Certificate:
    return replace(certify(big), graph_sha256=graph_sha256(big))


def with_data_file(model: onnx.ModelProto, folder: Path) -> Path:
    folder.mkdir()
    copied = onnx.load_from_string(serialize(model))
    onnx.save(copied, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=100)
    return folder / "model.onnx"


@pytest.fixture(params=["single", "external"])
def path(request: pytest.FixtureRequest, big: onnx.ModelProto, tmp_path: Path) -> Path:
    """The model's file, in one piece or with its weights beside it."""
    return with_data_file(big, tmp_path / "m") if request.param == "external" else in_one_file(big, tmp_path / "single.onnx")


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


def test_a_changed_weight_is_detected(big: onnx.ModelProto, certificate: Certificate) -> None:
    model, embedded = embed(big, certificate)
    values = numpy_helper.to_array(model.graph.initializer[1]).copy()
    values[77] += 1
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(values, model.graph.initializer[1].name))
    with pytest.raises(ExportError, match="belongs to another model: its graph_sha256 differs"):
        check_embedded(model, embedded)
    with pytest.raises(ExportError, match="belongs to another model"):
        embed(model, embedded)


def test_a_changed_figure_or_limit_is_detected(big: onnx.ModelProto, certificate: Certificate) -> None:
    model, embedded = embed(big, certificate)
    forged = json.loads(embedded.to_bytes())
    forged["budget"]["max_scaled_error"] = 0.5
    with pytest.raises(ExportError, match=r"names the certificate [0-9a-f]{12}\.\.\., this one is"):
        check_embedded(model, read_certificate(json.dumps(forged)))


def test_a_signature_covers_every_field(certificate: Certificate, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    signed = certificate.signed(SigningKey(private))
    assert read_certificate(signed.to_bytes()) == signed
    assert signed.sha256 == certificate.sha256
    content, key = json.loads(signed.to_bytes()), VerifyingKey(public)
    assert key.signed(content)
    assert not VerifyingKey(key_pair(tmp_path / "other")[1]).signed(content)
    for name in content.keys() - {"signature"}:
        assert not key.signed({**content, name: "changed"}), name
    for signature in ("", "?", "\u00e9", 7, None, signed.signature[:-8] + "AAAAAA=="):
        assert not key.signed({**content, "signature": signature}), signature


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"cannot read the certificate key .*/private.pem: No such file"),
        (
            "public",
            r"private.pem: holds no private key without a pass phrase; write one with: openssl genpkey",
        ),
        ("protected", r"private.pem: holds no private key without a pass phrase"),
        ("another kind", r"private.pem: holds a key of another kind than Ed25519; write one with: openssl genpkey"),
    ],
)
def test_a_file_that_is_no_signing_key_is_refused(kind: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "private.pem"
    if kind == "public":
        path.write_bytes(key_pair(tmp_path / "pair")[1].read_bytes())
    elif kind != "missing":
        key = ed25519.Ed25519PrivateKey.generate() if kind == "protected" else ed448.Ed448PrivateKey.generate()
        password = serialization.BestAvailableEncryption(b"pass") if kind == "protected" else serialization.NoEncryption()
        path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password))
    with pytest.raises(UsageError, match=message):
        signing_key(path)


def test_a_private_key_is_no_public_one(tmp_path: Path) -> None:
    with pytest.raises(CertificateKeyError, match=r"private.pem: holds no public key; write one with: openssl pkey -in"):
        VerifyingKey(key_pair(tmp_path)[0])


def test_a_model_without_a_certificate_is_refused(big: onnx.ModelProto, certificate: Certificate) -> None:
    with pytest.raises(ExportError, match="the model names no certificate in its metadata"):
        check_embedded(big, certificate)


def test_the_graphs_hash_does_not_depend_on_where_weights_are(big: onnx.ModelProto, tmp_path: Path) -> None:
    file = with_data_file(big, tmp_path / "external")
    assert graph_sha256(file) == graph_sha256(in_one_file(big, tmp_path / "single.onnx")) == graph_sha256(big)
    assert graph_sha256(sums(3, 1000, opset=19)) != graph_sha256(big)
    assert graph_sha256(sums(4, 1000)) != graph_sha256(big)


def test_a_file_of_any_size_is_appended_to(path: Path, big: onnx.ModelProto, certificate: Certificate) -> None:
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
    named = path.read_bytes()
    assert embed_in_file(path, embedded) == embedded
    assert path.read_bytes() == named
    other = embed_in_file(path, replace(embedded, notes=("another",)))
    assert path.read_bytes().startswith(before)
    assert len(path.read_bytes()) == len(named)
    check_embedded(path, other)
    assert not list(path.parent.glob(".*"))


def test_a_file_contains_its_certificate(path: Path, certificate: Certificate, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path / "keys")
    before = path.read_bytes()
    outside = embed_in_file(path, certificate, key=SigningKey(private), is_inside=True)
    assert path.read_bytes().startswith(before)
    onnx.checker.check_model(str(path), full_check=True)
    assert outside.onnx_sha256 == open_model(path).sha256
    assert VerifyingKey(public).signed(outside.to_json())
    check_embedded(path, outside)
    check_embedded(path)
    assert certificate_of(path) == replace(outside, signature="")
    with path.open("rb") as file:
        inside = certificate_inside(file, path.stat().st_size)
    assert inside is not None
    assert VerifyingKey(public).signed(json.loads(inside))
    assert read_certificate(inside).sha256 == outside.sha256
    again = embed_in_file(path, outside, key=SigningKey(private), is_inside=True)
    assert again == outside
    weights = path if path.name == "single.onnx" else path.parent / "weights.bin"
    content = bytearray(weights.read_bytes())
    content[300] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ExportError, match="belongs to another model: its graph_sha256 differs"):
        check_embedded(path)


def test_a_certificate_beside_the_model_replaces_the_one_inside(
    big: onnx.ModelProto, certificate: Certificate, tmp_path: Path
) -> None:
    path = in_one_file(big, tmp_path / "model.onnx")
    named = embed_in_file(path, certificate)
    size = path.stat().st_size
    embed_in_file(path, certificate, is_inside=True)
    assert path.stat().st_size > size
    assert embed_in_file(path, certificate) == named
    assert path.stat().st_size == size
    with pytest.raises(ExportError, match=r"model.onnx contains no certificate, and there is no certificate.json beside it"):
        check_embedded(path)
    (tmp_path / "certificate.json").write_bytes(named.to_bytes())
    assert certificate_of(path) == named


@pytest.mark.parametrize(
    "value", [b"?", b"e30=", b"", base64.b64encode(zlib.compress(b"{")), base64.b64encode(zlib.compress(b""))]
)
def test_a_certificate_inside_that_is_none_is_refused(value: bytes, big: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(serialize(big) + metadata_entry(INSIDE, value.decode()))
    with pytest.raises(ExportError, match="the certificate is not JSON"):
        certificate_of(path)
    with pytest.raises(ModelLoadError, match=r"the certificate inside .*model.onnx: cannot be read: it is no JSON"):
        check_certificate(path)


def test_a_certificate_that_inflates_without_end_is_refused() -> None:
    stream = zlib.compressobj()
    packed = b"".join(stream.compress(bytes(1 << 20)) for _ in range((MAX_CERTIFICATE_BYTES >> 20) + 1)) + stream.flush()
    assert unpacked_certificate(base64.b64encode(packed)) == base64.b64encode(packed)


def test_a_certificate_of_version_1_is_about_no_graph_and_still_embeds(big: onnx.ModelProto, certify: Certify) -> None:
    model, embedded = embed(big, certify(big))
    check_embedded(model, embedded)


@pytest.mark.parametrize(
    ("error", "budget", "found"),
    [
        (0.04, Budget(max_abs_error=0.01), []),
        (0.06, Budget(max_abs_error=0.01), ["max abs error 0.06 (limit 0.05)"]),
        (0.06, Budget(max_abs_error=0.01, adversarial_factor=10), []),
        (0.04, Budget(), []),
        (0.06, Budget(), ["max error 0.06 at the output's largest magnitude 1 (limit 0.05 of it)"]),
        (math.nan, Budget(max_abs_error=0.01), ["1 of 4 values are NaN or infinite (limit 0)"]),
    ],
)
def test_adversarial_errors_may_be_larger_by_the_budgets_factor(error: float, budget: Budget, found: list[str]) -> None:
    candidate = ONES + np.array([0, 0, error, 0], np.float64)
    assert adversarial_violations(compare(ONES, candidate), math.nan, budget) == found


def test_adversarial_integers_and_non_finite_outputs_are_not_judged() -> None:
    budget = Budget(max_abs_error=0.01)
    assert adversarial_violations(compare(np.array([1, 2]), np.array([2, 1])), math.nan, budget) == []
    assert adversarial_violations(compare(ONES * np.inf, ONES * np.inf), math.nan, budget) == []


def test_a_figure_at_its_limit_is_within_it() -> None:
    figures = compare(np.array([1.0, np.inf, 3.0]), np.array([1.25, 2.0, 3.0]))
    assert violations(figures, Budget(max_abs_error=0.25, max_non_finite=1)) == []
    assert violations(figures, Budget(max_abs_error=0.2, max_non_finite=0)) == [
        "1 of 3 values are NaN or infinite (limit 0)",
        "max abs error 0.25 (limit 0.2)",
    ]


def choices(rows: int, flipped: int, apart: float) -> ErrorFigures:
    """Rows of two classes; in the first ones the candidate prefers the class that the reference has a little below."""
    reference = np.tile([0.0, 1.0], (rows, 1))
    reference[:flipped, 0] = 1 - apart
    candidate = reference.copy()
    candidate[:flipped, 0] = 1 + 1e-3
    return compare(reference, candidate)


@pytest.mark.parametrize(
    ("rows", "flipped", "apart", "budget", "found"),
    [
        (108, 1, 0.004, Budget(), []),
        (10, 1, 0.004, Budget(), []),
        (9, 1, 0.004, Budget(), ["agreement 0.8889 (limit 0.9950): 1 of 9 rows differ"]),
        (108, 2, 0.004, Budget(), ["agreement 0.9815 (limit 0.9950): 2 of 108 rows differ"]),
        (108, 1, 0.02, Budget(max_scaled_error=0.03), []),
        (108, 1, 0.02, Budget(max_abs_error=0.03), []),
        (108, 1, 0.04, Budget(max_scaled_error=0.05, max_abs_error=0.042), []),
        (108, 1, 0.004, Budget(min_agreement=1), ["agreement 0.9907 (limit 1.0000): 1 of 108 rows differ"]),
        (400, 2, 0.004, Budget(), []),
        (400, 3, 0.004, Budget(), ["agreement 0.9925 (limit 0.9950): 3 of 400 rows differ"]),
        (400, 9, 0.004, Budget(judge_near_ties=False), []),  # on made-up samples
    ],
)
def test_one_near_tie_among_few_rows_is_allowed(
    rows: int, flipped: int, apart: float, budget: Budget, found: list[str]
) -> None:
    assert violations(choices(rows, flipped, apart), budget) == found


def test_a_clear_row_must_not_differ() -> None:
    reference = np.tile([0.0, 1.0], (108, 1))
    reference[0, 0] = 0.985
    candidate = reference.copy()
    candidate[0] = 0.994, 0.993  # each within the error that is allowed
    for budget in (Budget(), Budget(judge_near_ties=False)):
        assert violations(compare(reference, candidate), budget) == ["agreement 0.9907 (limit 0.9950): 1 of 108 rows differ"]


def test_among_few_integers_none_may_differ() -> None:
    numbers = np.arange(108)
    other = np.where(numbers == 7, 8, numbers)
    assert violations(compare(numbers, other), Budget()) == ["agreement 0.9907 (limit 0.9950): 1 of 108 values differ"]
