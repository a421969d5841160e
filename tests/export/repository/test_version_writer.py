from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format

from halfserve.export.certificate.certificate import Certificate, read_certificate
from halfserve.export.certificate.embed import check_embedded
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.repository.version_files import FP32_TWIN
from halfserve.export.repository.version_writer import write_model_version
from halfserve.export.tasks.task import Task
from halfserve.export.to_onnx.export_onnx import serialize
from halfserve.protos.certificate_signature import VerifyingKey
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.repository.model_repository import find_models
from tests.export.stored_models import chain, in_one_file, sums, with_data_files
from tests.key_pairs import key_pair

Certify = Callable[[onnx.ModelProto], Certificate]


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_layout_is_tritons(tmp_path: Path, model: onnx.ModelProto, certify: Certify) -> None:
    repository = tmp_path / "not" / "there" / "yet"
    written = write_model_version(repository, "m", model, certify(model))
    assert written == repository / "m" / "1"
    assert tree(repository) == ["m", "m/1", "m/1/certificate.json", "m/1/model.onnx", "m/config.pbtxt"]
    assert (written / "model.onnx").read_bytes().startswith(serialize(model))
    certificate = read_certificate((written / "certificate.json").read_bytes())
    assert certificate.outputs == certify(model).outputs
    check_embedded(written / "model.onnx", certificate)


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
    assert (tmp_path / "m" / "1" / "model.onnx").read_bytes().startswith(serialize(model))


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
        assert (path / "model.onnx").read_bytes().startswith(serialize(model))
    assert not [name for name in tree(tmp_path) if "/." in name or name.startswith(".")]


@dataclass(frozen=True, kw_only=True)
class Overtaken(Certificate):
    """A certificate during whose writing something else happens, such as another writer's being faster."""

    meanwhile: list[Callable[[], object]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_json().items() if name != "meanwhile"}

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
        parts = {entry.name: getattr(certify(model), entry.name) for entry in fields(Certificate) if entry.init}
        return Overtaken(**parts, meanwhile=[lambda: write_model_version(tmp_path, "m", other, certify(other), version=2)])

    with pytest.raises(ExportError, match="version 2 of 'm' exists and is never replaced"):
        write_model_version(tmp_path, "m", model, overtaken(), version=2)
    assert (tmp_path / "m" / "2" / "model.onnx").read_bytes().startswith(serialize(other))
    assert write_model_version(tmp_path, "m", model, certify(model)).name == "3"


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def certify_file(certify: Certify) -> Callable[[Path], Certificate]:
    return lambda path: dataclasses.replace(certify(sums(1, 4)), onnx_sha256=open_model(path).sha256)


CertifyFile = Callable[[Path], Certificate]


def test_data_files_travel_along(tmp_path: Path, certify_file: CertifyFile) -> None:
    path = with_data_files(sums(dtype=np.float16, size=1024), tmp_path / "m.onnx", files=2)
    written = write_model_version(tmp_path / "models", "m", path, certify_file(path), max_batch_size=0)
    assert files_in(written) == ["certificate.json", "m.0.bin", "m.1.bin", "model.onnx"]
    assert open_model(written / "model.onnx").digests.content == open_model(path).digests.content
    x = np.ones(1024, np.float16)
    runs = [onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]) for file in (path, written / "model.onnx")]
    np.testing.assert_array_equal(*(run.run(None, {"x": x})[0] for run in runs))


def test_the_twin_has_a_folder_of_its_own_and_the_config_names_it(tmp_path: Path, certify_file: CertifyFile) -> None:
    (tmp_path / "half").mkdir()
    half = with_data_files(sums(dtype=np.float16, size=1024), tmp_path / "half" / "w.onnx")
    twin = with_data_files(sums(size=1024), tmp_path / "w.onnx")  # with a data file of the same name
    written = write_model_version(tmp_path / "models", "m", half, certify_file(half), fp32_twin=twin, max_batch_size=0)
    assert files_in(written) == ["certificate.json", "fp32/model.onnx", "fp32/w.0.bin", "model.onnx", "w.0.bin"]
    assert open_model(written / FP32_TWIN).proto == sums(size=1024)
    config = text_format.Parse((written.parent / "config.pbtxt").read_text(), ModelConfig())
    assert (written / config.parameters["halfserve.fp32_twin"].string_value).is_file()


def test_the_certificate_names_twin_labels_and_the_tasks_files(tmp_path: Path, certify_file: CertifyFile) -> None:
    (tmp_path / "half").mkdir()
    half = with_data_files(sums(dtype=np.float16, size=1024), tmp_path / "half" / "w.onnx")
    twin = with_data_files(sums(size=1024), tmp_path / "w.onnx")
    task = Task(name="text-classification", labels=("no", "yes"), files={"tokenizer.json": b"{}"})
    private, public = key_pair(tmp_path)
    written = write_model_version(
        tmp_path / "models",
        "m",
        half,
        certify_file(half),
        fp32_twin=twin,
        task=task,
        max_batch_size=0,
        certificate_key=private,
    )
    certificate = read_certificate((written / "certificate.json").read_bytes())
    names = ["../labels.txt", "fp32/model.onnx", "fp32/w.0.bin", "tokenizer.json"]
    assert certificate.files == {name: hashlib.sha256((written / name).read_bytes()).hexdigest() for name in names}
    check_embedded(written / "model.onnx", certificate)
    assert VerifyingKey(public).signed(certificate.to_json())
    assert certificate.onnx_sha256 == open_model(written / "model.onnx").sha256


def test_a_server_takes_the_fp16_model_and_minds_nothing_else(tmp_path: Path, certify: Certify) -> None:
    half = sums(dtype=np.float16)
    write_model_version(tmp_path, "m", half, certify(half), fp32_twin=sums(), max_batch_size=0)
    files = find_models(tmp_path)
    assert [(file.name, file.version, file.model) for file in files] == [("m", 1, tmp_path / "m" / "1" / "model.onnx")]


def test_a_config_that_does_not_name_the_twin_is_kept(tmp_path: Path, certify: Certify) -> None:
    half = sums(dtype=np.float16)
    write_model_version(tmp_path, "m", half, certify(half), max_batch_size=0)
    before = (tmp_path / "m" / "config.pbtxt").read_bytes()
    written = write_model_version(tmp_path, "m", half, certify(half), fp32_twin=sums(), max_batch_size=0)
    assert (tmp_path / "m" / "config.pbtxt").read_bytes() == before
    assert (written / FP32_TWIN).is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("name", "the float32 twin is of another model: its input 'x' is absent, the fp16 model's is floating"),
        ("type", "its output 'y' is INT64, the fp16 model's is floating"),
    ],
)
def test_a_twin_of_another_model_is_refused(change: str, message: str, tmp_path: Path, certify: Certify) -> None:
    twin, half = sums(), sums(dtype=np.float16)
    if change == "name":
        twin.graph.input[0].name = twin.graph.node[0].input[0] = "z"
    else:
        twin.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    with pytest.raises(ExportError, match=message):
        write_model_version(tmp_path, "m", half, certify(half), fp32_twin=twin, max_batch_size=0)
    assert files_in(tmp_path) == []


def test_a_certificate_without_the_data_files_does_not_do(tmp_path: Path, certify: Certify) -> None:
    path = with_data_files(sums(dtype=np.float16, size=1024), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="the certificate belongs to another model"):
        write_model_version(tmp_path / "models", "m", path, certify(onnx.load(path)), max_batch_size=0)


def test_a_model_that_changes_while_it_is_copied_is_found_out(tmp_path: Path, certify_file: CertifyFile) -> None:
    path = in_one_file(sums(dtype=np.float16), tmp_path / "m.onnx")
    opened, certificate = open_model(path), certify_file(path)
    assert opened.sha256 == certificate.onnx_sha256
    in_one_file(sums(2, dtype=np.float16), path)
    with pytest.raises(ExportError, match="m.onnx changed while it was copied; verify it again"):
        write_model_version(tmp_path / "models", "m", opened, certificate, max_batch_size=0)
    assert files_in(tmp_path / "models") == []


def test_a_data_file_with_a_name_that_the_layout_needs_is_refused(tmp_path: Path, certify_file: CertifyFile) -> None:
    model = sums(dtype=np.float16, size=1024)
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], "certificate.json")
    onnx.save_model(model, tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="keeps weights in 'certificate.json', a name that the repository needs"):
        write_model_version(tmp_path / "models", "m", tmp_path / "m.onnx", certify_file(tmp_path / "m.onnx"), max_batch_size=0)
    assert files_in(tmp_path / "models") == []


# Reads every version again and again until it has seen as many as it is told; prints each one that is not whole.
READER = textwrap.dedent("""
    import hashlib, json, pathlib, sys
    repository, wanted, seen = pathlib.Path(sys.argv[1]), int(sys.argv[2]), set()
    print("ready", flush=True)
    while len(seen) < wanted:
        for version in [path for path in repository.glob("[!.]*/[0-9]*") if path.name.isdigit()]:
            try:
                certificate = json.loads((version / "certificate.json").read_bytes())
                digest = hashlib.sha256((version / "model.onnx").read_bytes()).hexdigest()
                whole = digest == certificate["onnx_sha256"] and (version / "fp32" / "model.onnx").stat().st_size > 1000
                whole = whole and "onnxruntime_onnx" in (version.parent / "config.pbtxt").read_text()
            except (OSError, ValueError) as error:
                whole = repr(error)
            if whole is not True:
                print(version, whole, flush=True)
            seen.add(version)
""")


def test_a_reader_in_another_process_never_sees_half_a_version(tmp_path: Path, certify: Certify) -> None:
    half, twin = sums(2, 4096, dtype=np.float16), sums(2, 4096)
    certificate = certify(half)
    command = [sys.executable, "-c", READER, str(tmp_path), "40"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        for index in range(40):
            write_model_version(tmp_path, f"m{index % 4}", half, certificate, max_batch_size=0, fp32_twin=twin)
        rest, _ = reader.communicate(timeout=500)
    assert (rest, reader.returncode) == ("", 0)


def test_a_full_disk_leaves_nothing(tmp_path: Path, certify: Certify) -> None:
    (tmp_path / "certificate.json").write_bytes(certify(sums(2, 4096, dtype=np.float16)).to_bytes())
    program = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        import numpy as np
        from halfserve.export.certificate.certificate import read_certificate
        from halfserve.export.export_errors import ExportError
        from halfserve.export.repository.version_writer import write_model_version
        from tests.export.stored_models import sums
        certificate = read_certificate(Path(sys.argv[2]).read_bytes())
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # room for the fp16 model, not for its twin
        half, twin = sums(2, 4096, dtype=np.float16), sums(2, 4096)
        try:
            write_model_version(sys.argv[1], "m", half, certificate, max_batch_size=0, fp32_twin=twin)
        except ExportError as error:
            sys.exit(str(error))
    """)
    command = [sys.executable, "-c", program, str(tmp_path / "models"), str(tmp_path / "certificate.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == f"cannot write to the repository {tmp_path / 'models'}: File too large\n"
    assert list((tmp_path / "models").iterdir()) == []
