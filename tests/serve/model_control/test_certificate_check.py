"""Whether a model version, the files that its answers depend on, and the certificate beside it belong together."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from onnx import numpy_helper

from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.certificate import Certificate, OutputVerdict, Probe
from halfserve.export.certificate.embed import KEY, embed_in_file
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.repository.version_writer import write_model_version
from halfserve.export.tasks.task import Task
from halfserve.export.verification.metrics import compare
from halfserve.protos.certificate_signature import SigningKey, VerifyingKey
from halfserve.protos.certificates import BOUND_PARAMETERS, certificate_entry, certificate_inside, certificate_sha256
from halfserve.protos.model_config_pb2 import ModelConfig, ModelParameter
from halfserve.serve.engine.config.parameters import OWN_PARAMETERS
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.model_control.certificate_check import check_certificate
from tests.key_pairs import key_pair
from tests.models import save_mlp, save_thousandfold
from tests.serve.model_control.controlled import loader

STORED = Path(__file__).parents[2] / "export" / "certificate" / "versions"  # as earlier versions of halfserve wrote them
ONES = np.ones((4, 2))
PASSED = Certificate(
    model="m",
    onnx_sha256="",
    onnx_bytes=0,
    samples=4,
    budget=Budget(),
    outputs=(OutputVerdict(name="y", execution="rounded", figures=compare(ONES, ONES), violations=()),),
    probe=Probe(level="ORT_ENABLE_ALL"),
    created_utc="2026-01-01T00:00:00Z",
    notes=("π is not exact",),
)
TASK = Task(
    name="text-classification",
    labels=("no", "yes"),
    files={"tokenizer.json": b"{}"},
    settings={"halfserve.label_scores": "sigmoid"},
)


def certified(folder: Path, certificate: Certificate = PASSED) -> Path:
    """A model with the certificate beside it that export would have written."""
    model = save_mlp(folder / "model.onnx")
    (folder / "certificate.json").write_bytes(embed_in_file(model, certificate).to_bytes())
    return model


def exported(folder: Path, **options: Any) -> Path:
    """The folder of a version with an fp32 twin, a tokenizer and labels, in the repository `folder`."""
    half, wide = save_thousandfold(folder / "half.onnx", np.float16), save_thousandfold(folder / "wide.onnx", np.float32)
    certificate = replace(PASSED, onnx_sha256=open_model(half).sha256)
    return write_model_version(folder / "models", "m", half, certificate, fp32_twin=wide, task=TASK, **options)


def rewrite(model: Path, **values: Any) -> None:
    path = model.parent / "certificate.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def verdict(version: Path, key: Path | None = None) -> str:
    """What the server says about the certificate of a version that it has loaded."""
    (files,) = find_models(version.parent.parent)
    loading = replace(loader(), certificate_key=None if key is None else VerifyingKey(key))
    parameters = loading.load(files).config.parameters
    return parameters["halfserve.certificate"].string_value if "halfserve.certificate" in parameters else "none"


def edit_model(model: Path, change: Callable[[onnx.ModelProto], object]) -> None:
    message = onnx.load(model)
    change(message)
    model.write_bytes(message.SerializeToString())


def name_nothing(message: onnx.ModelProto) -> None:
    del message.metadata_props[:]


def name_certificate(content: dict[str, Any]) -> Callable[[onnx.ModelProto], object]:
    def change(message: onnx.ModelProto) -> None:
        (entry,) = (entry for entry in message.metadata_props if entry.key == KEY)
        entry.value = certificate_sha256(content)

    return change


def checked(model: Path, key: Path | None) -> str | None:
    return check_certificate(model, key=None if key is None else VerifyingKey(key))


def assert_refused(model: Path, match: str, key: Path | None = None) -> None:
    """Check that a model file is refused, or the version in a folder."""
    judge = verdict if model.is_dir() else checked
    with pytest.raises(ModelLoadError, match=match):
        judge(model, key)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return key_pair(tmp_path)


@pytest.fixture
def public(keys: tuple[Path, Path]) -> Path:
    return keys[1]


@pytest.fixture
def version(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    """A signed version; without a key its signature is not looked at."""
    return exported(tmp_path, certificate_key=keys[0])


def test_a_model_and_its_certificate_belong_together(tmp_path: Path) -> None:
    assert check_certificate(save_mlp(tmp_path / "bare" / "model.onnx")) is None
    model = certified(tmp_path / "good")
    assert check_certificate(model) == "passed"
    assert check_certificate(certified(tmp_path / "empty", replace(PASSED, outputs=()))) == "failed"  # nothing was compared
    model.write_bytes(model.read_bytes() + b"\x18\x00")
    assert_refused(model, r"model.onnx: is not the file that certificate.json was made for \(its SHA-256")


def test_a_certificate_that_was_changed_is_refused(tmp_path: Path) -> None:
    model = certified(tmp_path, replace(PASSED, outputs=()))
    rewrite(model, passed=True)
    assert_refused(model, "certificate.json: is not the certificate that the model names in its metadata")


def test_a_new_hash_in_the_certificate_does_not_vouch_for_another_model(tmp_path: Path) -> None:
    model = certified(tmp_path)

    def negate(message: onnx.ModelProto) -> None:
        weight = message.graph.initializer[0]
        weight.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weight), weight.name))

    edit_model(model, negate)
    rewrite(model, onnx_sha256=file_sha256(model))
    assert_refused(model, r"model.onnx: is not the file that certificate.json was made for \(its SHA-256")
    rewrite(model, content_sha256=open_model(model).digests.content)
    assert_refused(model, "certificate.json: is not the certificate that the model names in its metadata")


def test_a_model_that_names_no_certificate_has_no_verdict(version: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = version / "model.onnx"
    edit_model(model, name_nothing)
    rewrite(model, onnx_sha256=file_sha256(model), content_sha256=file_sha256(model))
    assert verdict(version) == "none"
    assert "model.onnx: its metadata names no certificate, so the one beside it is no proof" in caplog.text


@pytest.mark.parametrize("version", ["1", "2", "3", "4", "5", "5_later", "6"])
def test_a_certificate_of_each_earlier_version_holds(version: str) -> None:
    model, key = STORED / version / "model.onnx", VerifyingKey(STORED / "public.pem")
    assert check_certificate(model) == (None if version == "1" else "passed")  # models did not name theirs yet
    if version >= "4":
        assert check_certificate(model, key=key) == "passed"


def test_the_certificates_result_is_in_the_models_parameters(tmp_path: Path) -> None:
    assert verdict(exported(tmp_path)) == "passed"


def test_a_certificate_from_before_it_listed_files_still_holds(version: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, path = version / "model.onnx", version / "certificate.json"
    names = {"files", "settings", "content_sha256", "signature", "onnx_sha256"}
    content = {name: value for name, value in json.loads(path.read_text()).items() if name not in names}
    content["schema_version"] = 3
    edit_model(model, name_certificate(content))
    path.write_text(json.dumps({**content, "onnx_sha256": file_sha256(model)}))
    assert verdict(version) == "passed"
    assert "certificate.json: does not hold the hash of fp32/model.onnx, ../labels.txt, tokenizer.json" in caplog.text
    settings = "output[y].label_filename, parameters.halfserve.label_scores, parameters.halfserve.task"
    assert f"config.pbtxt, so nothing shows whether {settings} belong to the model" in caplog.text


def configure(version: Path, change: Callable[[ModelConfig], object]) -> None:
    path = version.parent / "config.pbtxt"
    config = text_format.Parse(path.read_text(), ModelConfig())
    change(config)
    path.write_text(text_format.MessageToString(config))


def parameter(key: str, value: str) -> Callable[[ModelConfig], object]:
    return lambda config: config.parameters[f"halfserve.{key}"].MergeFrom(ModelParameter(string_value=value))


def reshaped(config: ModelConfig) -> None:
    del config.input[0].dims[:]
    config.input[0].dims.extend([1, 4])
    config.input[0].reshape.shape.append(4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (parameter("task", "token-classification"), "parameters.halfserve.task is 'token-classification', certified was "),
        (parameter("label_scores", "softmax"), "parameters.halfserve.label_scores is 'softmax', certified was 'sigmoid'"),
        (parameter("token_ids", "own"), "parameters.halfserve.token_ids is 'own', certified was not set"),
        (
            lambda config: config.parameters.pop("halfserve.task"),
            "parameters.halfserve.task is not set, certified was 'text-classification'",
        ),
        (
            lambda config: config.output[0].ClearField("label_filename"),
            "output[y].label_filename is not set, certified was 'labels.txt'",
        ),
        (reshaped, "input[x] is 'TYPE_FP16 [-1, 4], [-1, 1, 4] for clients', certified was 'TYPE_FP16 [-1, 4]'"),
    ],
    ids=["task", "scores", "tokens", "no task", "no labels", "reshape"],
)
def test_a_setting_that_changes_the_meaning_of_answers_is_named(
    change: Callable[[ModelConfig], object], said: str, version: Path, public: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert verdict(version, public) == "passed"
    assert "is not what certificate.json was made for" not in caplog.text
    configure(version, change)
    (files,) = find_models(version.parent.parent)
    assert check_certificate(files.model, files.config) == "passed"
    assert f"config.pbtxt: is not what certificate.json was made for: {said}" in caplog.text
    assert_refused(version, re.escape(said) + ".*; change that back, or export the model again", public)


def test_a_new_version_is_certified_with_the_settings_that_are_there(
    version: Path, keys: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(version, parameter("token_ids", "own"))
    half = tmp_path / "half.onnx"
    certificate = replace(PASSED, onnx_sha256=open_model(half).sha256)
    again = write_model_version(version.parent.parent, "m", half, certificate, task=TASK, certificate_key=keys[0])
    assert again.name == "2"
    assert verdict(again, keys[1]) == "passed"
    assert "certificate" not in caplog.text


def tuned(config: ModelConfig) -> None:
    """Change everything that is about how fast, where and in which batches the model is computed."""
    config.max_batch_size = 7
    config.instance_group.add(count=2)
    config.dynamic_batching.max_queue_delay_microseconds = 10
    config.dynamic_batching.preferred_batch_size.append(4)
    config.optimization.graph.level = 1
    config.response_cache.enable = True
    for key, value in {
        "cpu_precision": "float32",
        "compute_weight": "2",
        "warm_up": "off",
        "shadow_rate": "0",
        "precision_guard": "count",
        "latency_target_ms": "50",
    }.items():
        parameter(key, value)(config)
    config.parameters["session.intra_op_thread_count"].string_value = "1"


def by_hand(config: ModelConfig) -> None:
    """Leave out what a server completes from the model file."""
    del config.input[:]
    for name in ("name", "platform", "max_batch_size", "dynamic_batching"):
        config.ClearField(name)


def shapes(config: ModelConfig) -> list[Any]:
    return [*(tensor.dims for tensor in config.input), *(tensor.dims for tensor in config.output)]


def whole_shapes(config: ModelConfig) -> None:
    config.ClearField("max_batch_size")
    config.ClearField("dynamic_batching")
    for dims in shapes(config):
        dims.insert(0, -1)


@pytest.mark.parametrize("change", [tuned, by_hand, whole_shapes])
def test_settings_that_tune_a_server_are_not_bound(
    change: Callable[[ModelConfig], object], version: Path, public: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(version, change)
    assert verdict(version, public) == "passed"
    assert "certificate" not in caplog.text


def test_rows_that_were_no_batch_must_not_become_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    version = exported(tmp_path, max_batch_size=0)
    assert verdict(version) == "passed"
    assert "certificate" not in caplog.text

    def batched(config: ModelConfig) -> None:
        config.max_batch_size = 8
        for dims in shapes(config):
            del dims[0]

    configure(version, batched)
    assert verdict(version) == "passed"
    assert "certificate.json was made for: max_batch_size is not set, certified was '0'" in caplog.text


def test_the_parameters_that_certificates_bind_exist() -> None:
    assert OWN_PARAMETERS.keys() > BOUND_PARAMETERS


def other_twin(path: Path) -> None:
    other = numpy_helper.from_array(np.array(999, np.float32), "thousand")
    edit_model(path, lambda message: message.graph.initializer[0].CopyFrom(other))


@pytest.mark.parametrize(
    ("name", "swap"),
    [
        ("fp32/model.onnx", other_twin),
        ("tokenizer.json", lambda path: path.write_bytes(b'{"other": 1}')),
        ("../labels.txt", lambda path: path.write_bytes(b"yes\nno\n")),
    ],
    ids=["twin", "tokenizer", "labels"],
)
def test_another_models_file_beside_a_model_is_refused(name: str, swap: Callable[[Path], object], version: Path) -> None:
    swap(version / name)
    assert_refused(version, rf"m/(1/)?{name.removeprefix('../')}: is not the file that .*; put that")
    rewrite(version / "model.onnx", files={})
    assert_refused(version, "certificate.json: is not the certificate that the model names in its metadata")


def test_a_file_that_the_user_removes_is_not_missed(version: Path, caplog: pytest.LogCaptureFixture) -> None:
    (version / "fp32" / "model.onnx").unlink()
    (version / "tokenizer.json").unlink()
    assert verdict(version) == "passed"
    assert "does not hold the hash" not in caplog.text


def test_files_that_the_user_adds_are_named_as_not_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = certified(tmp_path / "m" / "1")
    (model.parent / "tokenizer.json").write_bytes(b"{}")
    assert verdict(model.parent) == "passed"
    assert "certificate.json: does not hold the hash of tokenizer.json, so nothing shows whether they belong" in caplog.text


@pytest.mark.parametrize("files", [["model.onnx"], {"/etc/passwd": ""}, {"a/../../../b": ""}, {"../../b": ""}])
def test_a_list_of_files_elsewhere_is_refused(files: object, tmp_path: Path) -> None:
    model = certified(tmp_path)
    rewrite(model, files=files)
    edit_model(model, name_certificate(json.loads((tmp_path / "certificate.json").read_text())))
    rewrite(model, onnx_sha256=file_sha256(model))
    assert_refused(model, "is no certificate that halfserve wrote|expected one in the model's folder")


def test_with_a_key_only_a_certificate_that_it_signed_is_served(
    version: Path, public: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, other = key_pair(tmp_path / "other")
    assert verdict(version, public) == "passed"
    assert verdict(version) == "passed"
    assert_refused(version, "certificate.json: is signed with another key, or was changed since, expected a", other)
    model = version / "model.onnx"
    forged = embed_in_file(model, replace(PASSED, notes=("forged",)))
    signature = json.loads((version / "certificate.json").read_text())["signature"]
    (version / "certificate.json").write_bytes(replace(forged, signature=signature).to_bytes())
    assert verdict(version) == "passed"  # all hashes are right
    assert_refused(version, "certificate.json: is signed with another key, or was changed since, expected a", public)
    (version / "certificate.json").write_bytes(forged.to_bytes())
    assert_refused(version, "certificate.json: is not signed, expected a signature by the private key of", public)
    (version / "certificate.json").unlink()
    edit_model(model, name_nothing)
    assert verdict(version, public) == "none"
    assert "model.onnx: has no certificate that the certificate key could check" in caplog.text


def test_a_certificate_that_the_model_names_is_missed(version: Path, public: Path, caplog: pytest.LogCaptureFixture) -> None:
    (version / "certificate.json").unlink()
    assert verdict(version) == "none"
    (line,) = [record.getMessage() for record in caplog.records if "certificate.json: is missing" in record.getMessage()]
    assert "nothing shows whether the model was changed, and it is served without a verdict" in line
    assert_refused(version, r"certificate.json: is missing, .*; --certificate-key takes no such model", public)
    bare = find_models(version / "model.onnx")[0]
    caplog.clear()
    assert check_certificate(bare.model, bare.config) is None
    assert not caplog.records


@pytest.mark.parametrize("external", [False, True])
def test_a_single_file_carries_its_verdict(tmp_path: Path, external: bool) -> None:
    private, public = key_pair(tmp_path)
    model = save_mlp(tmp_path / "one.onnx")
    if external:
        onnx.save(onnx.load(model), model, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "certificate.json").write_text("another model's")
    plain = model.read_bytes()
    embed_in_file(model, PASSED, key=SigningKey(private), is_inside=True)
    assert check_certificate(model) == "passed"
    assert check_certificate(model, key=VerifyingKey(public)) == "passed"
    assert_refused(model, "the certificate inside .*one.onnx: is signed with another key", key_pair(tmp_path / "other")[1])
    changed = tmp_path / "weights.bin" if external else model
    content = bytearray(changed.read_bytes())
    content[-1 if external else len(plain) // 2] ^= 1
    changed.write_bytes(content)
    assert_refused(model, "one.onnx: is not the file that its certificate was made for")


def test_a_verdict_inside_that_was_changed_is_refused(tmp_path: Path) -> None:
    model = save_mlp(tmp_path / "one.onnx")
    embed_in_file(model, replace(PASSED, outputs=()), is_inside=True)
    assert check_certificate(model) == "failed"
    with model.open("rb") as file:
        inside = json.loads(certificate_inside(file, model.stat().st_size) or b"")
    with model.open("ab") as file:  # of two entries the last one counts
        file.write(certificate_entry({**inside, "passed": True}))
    assert_refused(model, "the certificate inside .*one.onnx: is not the certificate that the model names")


def test_data_files_count(tmp_path: Path) -> None:
    model = save_mlp(tmp_path / "model.onnx")
    onnx.save(onnx.load(model), model, save_as_external_data=True, location="weights.bin", size_threshold=0)
    data = tmp_path / "weights.bin"
    certificate = embed_in_file(model, PASSED)
    (tmp_path / "certificate.json").write_bytes(certificate.to_bytes())
    lines = f"{file_sha256(model)}  model\n{file_sha256(data)}  weights.bin\n"
    assert certificate.onnx_sha256 == hashlib.sha256(lines.encode()).hexdigest()
    assert check_certificate(model) == "passed"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    assert_refused(model, "its SHA-256 differs from the one there")
    data.unlink()
    assert_refused(model, "weights.bin: is missing; the model beside it keeps weights there")


def test_data_files_elsewhere_are_not_read(tmp_path: Path) -> None:
    model = certified(tmp_path / "model")

    def keep_elsewhere(message: onnx.ModelProto) -> None:
        tensor = message.graph.initializer[0]
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../../../../../../dev/zero")

    edit_model(model, keep_elsewhere)
    assert_refused(model, "keeps weights in '../../../../../../dev/zero', expected a file beside it")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "certificate.json: cannot be read: it is no JSON"),
        (b"[]", "certificate.json: is no certificate that halfserve wrote"),
        (b'{"schema": "other"}', "certificate.json: is no certificate that halfserve wrote"),
        (b"[" * 100_000, "certificate.json: cannot be read: it is no JSON"),
    ],
)
def test_a_file_that_is_not_a_certificate_is_refused(tmp_path: Path, content: bytes, text: str) -> None:
    model = save_mlp(tmp_path / "model.onnx")
    (tmp_path / "certificate.json").write_bytes(content)
    assert_refused(model, text)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux has it, and it cannot be read at 0")
@pytest.mark.parametrize("name", ["model.onnx", "certificate.json"])
def test_a_system_error_does_not_advise_to_export_again(tmp_path: Path, name: str) -> None:
    certified(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(ModelLoadError, match=f"{name}: cannot be read: Input/output error$"):
        check_certificate(tmp_path / "model.onnx")
