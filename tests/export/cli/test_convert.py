from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer
from onnx import TensorProto
from typer.testing import CliRunner, Result

from halfserve.export.certificate.certificate import BudgetExceeded, read_certificate
from halfserve.export.certificate.embed import check_embedded
from halfserve.export.cli.convert import EXIT_CODES, convert
from halfserve.export.conversion_results import SearchFailed
from halfserve.export.export_errors import ExportError, NothingConvertedError
from halfserve.export.onnx_files.model_file import LARGE_BYTES, open_model
from halfserve.protos.certificate_signature import VerifyingKey
from tests.export.cli.commands import passed
from tests.export.stored_models import in_one_file, parse, sums, with_data_files
from tests.key_pairs import key_pair

Run = Callable[..., Result]
LONG = "a" * 300


def overflowing() -> onnx.ModelProto:
    """x [n, 4] -> relu(tanh(x) up) down: sums of 2e5 between two products, which no look at the graph tells."""
    text = """g (float[n, 4] x) => (float[n, 4] y) { [soft] t = Tanh (x) [up] a = MatMul (t, large) [relu] b = Relu (a)
        [down] y = MatMul (b, small) }"""
    return parse(text, ir=10, large=np.full((4, 4), 6e4), small=np.eye(4) * 1e-4)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in a folder with `in.onnx` (sums), `over.onnx` (overflowing) and samples for both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    in_one_file(overflowing(), tmp_path / "over.onnx")
    model = sums(2, 512)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim.insert(0, onnx.TensorShapeProto.Dimension(dim_param="n"))
    in_one_file(model, tmp_path / "in.onnx")
    rng = np.random.default_rng(0)
    np.savez("in.npz", x=rng.normal(size=(8, 512)).astype(np.float32))
    np.savez("over.npz", x=np.linspace(0.5, 1.5, 32, dtype=np.float32).reshape(8, 4))
    app = typer.Typer()
    app.command()(convert)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_file_becomes_a_verified_float16_file(run: Run) -> None:
    result = passed(run("in.onnx", "out.onnx", "--samples", "in.npz", "--certificate", "verdict.json"))
    for line in ("float16   3 of the 3 nodes", "weights   every number", "placement ", "within budget", "written   "):
        assert line in result.stdout
    written = open_model("out.onnx")
    assert {tensor.data_type for tensor in written.proto.graph.initializer} == {TensorProto.FLOAT16}
    certificate = read_certificate(Path("verdict.json").read_bytes())
    assert (certificate.model, certificate.passed) == ("out", True)
    assert certificate.samples >= 8
    assert certificate.reference_bytes == Path("in.onnx").stat().st_size
    assert certificate.onnx_sha256 == open_model("out.onnx").sha256
    assert certificate.placement is not None
    check_embedded("out.onnx", certificate)


@pytest.mark.parametrize("full", ["c.json", "c.html"])
def test_a_verdict_that_cannot_be_written_leaves_everything_as_it_was(full: str, run: Run) -> None:
    Path("out.onnx").write_bytes(b"the model before")
    Path("c.json").write_bytes(b"its certificate")
    Path(full).unlink(missing_ok=True)
    Path(full).symlink_to("/dev/full")
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    result = run("in.onnx", "out.onnx", "--overwrite", "--samples", "in.npz", "--certificate", "c.json", "--html", "c.html")
    assert result.exit_code == 1
    assert str(result.exception) == f"cannot write {full}: No space left on device"
    assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before


@pytest.mark.long
def test_a_converted_model_can_be_converted_and_certified_again(run: Run) -> None:
    for source, target in (("in.onnx", "out.onnx"), ("out.onnx", "again.onnx")):
        result = run(source, target, "--samples", "in.npz", "--certificate", f"{target}.json")
        assert result.exit_code == 0, result.output
    check_embedded("again.onnx", read_certificate(Path("again.onnx.json").read_bytes()))
    assert open_model("again.onnx").proto.graph == open_model("out.onnx").proto.graph


def test_json_is_one_object_and_nothing_else(run: Run) -> None:
    result = run(
        *("in.onnx", "out.onnx", "--samples", "in.npz", "--json"),
        *("--float16-io", "--keep-fp32-nodes", "add[0]", "--no-adversarial"),
    )
    answer = json.loads(result.stdout)
    assert Path(answer["path"]).samefile("out.onnx")
    assert answer["certificate"]["passed"] is True
    assert [node["name"] for node in answer["conversion"]["kept"]] == ["add0"]
    assert answer["placement"]["islands"][0]["nodes"] == ["add0"]
    assert answer["size_bytes"] == Path("out.onnx").stat().st_size
    assert open_model("out.onnx").outline.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16


def test_without_samples_inputs_are_made_up(run: Run) -> None:
    result = passed(run("in.onnx", "out.onnx", "--json", "--dim", "n=3"))
    certificate = json.loads(result.stdout)["certificate"]
    assert certificate["samples"] == 33  # the least multiple of 3 that is 32 or more
    (note,) = (note for note in certificate["notes"] if "made-up" in note)
    assert note.startswith("the inputs are 33 made-up rows: random numbers")
    assert "cannot show how large numbers become inside the model on real data" in note


def test_a_model_that_fails_on_made_up_inputs_asks_for_samples(run: Run, tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n, m] x) => (float[n, k] y) {
        s = Constant <value_ints = [-1, 7]> () y = Reshape (x, s) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "sevens.onnx")
    result = run("sevens.onnx", "out.onnx")
    assert isinstance(result.exception, ExportError)
    assert "fails on the samples" in str(result.exception)
    assert str(result.exception).endswith("the inputs were made up: give --samples, or sizes with --dim NAME=SIZE")
    assert run("sevens.onnx", "out.onnx", "--dim", "m=14").exit_code == 0


def test_without_verification_nothing_is_run(run: Run) -> None:
    result = passed(run("over.onnx", "out.onnx", "--no-verify", "--placement"))
    assert "verdict   none: not verified" in result.stdout
    assert "placement by ONNX Runtime" in result.stdout
    assert Path("out.onnx").exists()


@pytest.mark.parametrize("target", [("out.onnx", "--certificate", "verdict.json"), ("--repository", "models")])
def test_over_budget_explains_and_writes_nothing(target: tuple[str, ...], run: Run) -> None:
    result = run("over.onnx", *target, "--samples", "over.npz", "--no-search")
    assert isinstance(result.exception, BudgetExceeded)
    assert EXIT_CODES[BudgetExceeded] == 3
    assert "are NaN or infinite" in result.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["in.npz", "in.onnx", "over.npz", "over.onnx"]


def test_what_must_stay_float32_is_found(run: Run) -> None:
    result = passed(run("over.onnx", "out.onnx", "--samples", "over.npz", "--json", "--no-adversarial"))
    answer = json.loads(result.stdout)
    assert answer["search"]["passed"] is True
    kept = {node["name"] for node in answer["conversion"]["kept"]}
    assert kept == set(answer["search"]["keep_fp32_nodes"]) == {"up", "relu", "down"}
    assert answer["certificate"]["passed"] is True


@pytest.mark.parametrize("how", [("--keep-fp32-nodes", "*"), ("--keep-fp32-nodes", "*", "--no-verify")])
def test_a_model_without_a_float16_node_is_refused(run: Run, how: tuple[str, ...]) -> None:
    result = run("in.onnx", "out.onnx", *how)
    assert isinstance(result.exception, NothingConvertedError)
    assert EXIT_CODES[NothingConvertedError] == 3
    assert "nothing can become float16" in str(result.exception)
    assert "add0 (Add: matches '*' in keep_fp32_nodes)" in str(result.exception)
    assert "try --dtype bfloat16" in str(result.exception)
    assert not Path("out.onnx").exists()


@pytest.mark.long
def test_a_search_that_leaves_no_float16_node_is_refused(run: Run) -> None:
    result = run("over.onnx", "out.onnx", "--samples", "over.npz", "--keep-fp32-nodes", "soft")
    assert isinstance(result.exception, SearchFailed)
    assert "nothing can become float16" in str(result.exception)
    assert not Path("out.onnx").exists()
    assert run("over.onnx", "out.onnx", "--samples", "over.npz", "--dtype", "auto").exit_code == 0


@pytest.mark.long
def test_a_search_says_when_it_begins_and_what_ended_it(run: Run) -> None:
    result = passed(run("over.onnx", "out.onnx", "--samples", "over.npz", "--max-runs", "5", "--no-adversarial"))
    assert result.stderr.startswith(
        "searching for what must stay float32; Ctrl-C ends the search and keeps the best set found\n"
    )
    assert "in 5 runs, 0.0 min: 3 in float32 are enough, perhaps fewer" in result.stdout
    assert "note      the limit of 5 runs ended the search: allow more with --max-runs" in result.stdout
    assert "within budget" in result.stdout


@pytest.mark.long
def test_where_no_float32_node_helps_that_is_explained(run: Run) -> None:
    result = run("in.onnx", "out.onnx", "--samples", "in.npz", "--max-abs-error", "0", "--float16-io")
    assert isinstance(result.exception, SearchFailed)
    assert "the search for nodes to keep in float32 found no set that is enough" in str(result.exception)
    assert "searched  " in result.stderr
    assert not Path("out.onnx").exists()


@pytest.mark.long
def test_what_a_user_keeps_in_float32_mends_it_and_is_listed(run: Run) -> None:
    kept = ("--keep-fp32-nodes", "*p", "--keep-fp32-nodes", "down", "--keep-fp32-ops", "Relu")
    result = passed(run("over.onnx", "out.onnx", "--samples", "over.npz", *kept))
    assert "3 nodes in float32" in result.stdout
    assert all(name in result.stdout for name in ("up", "relu", "down", "within budget"))


def test_data_files_stay_data_files_and_old_ones_are_named(run: Run, tmp_path: Path) -> None:
    with_data_files(sums(), tmp_path / "data.onnx", files=2)
    assert run("data.onnx", "out.onnx", "--no-verify").exit_code == 0
    first = open_model("out.onnx").locations
    assert len(first) == 2
    result = passed(run("data.onnx", "out.onnx", "--no-verify", "--overwrite", "--keep-fp32-nodes", "add0"))
    assert f"left over {first[0]}: only the model before used it" in result.stdout
    assert run("data.onnx", "one.onnx", "--no-verify", "--external-data", "no").exit_code == 0
    assert open_model("one.onnx").locations == ()


@pytest.mark.long
@pytest.mark.parametrize("source", ["large.onnx", "out.onnx"])
def test_a_model_that_is_overwritten_in_one_file_leaves_nothing_over(run: Run, tmp_path: Path, source: str) -> None:
    in_one_file(sums(size=LARGE_BYTES), tmp_path / "large.onnx")
    assert run("large.onnx", "out.onnx", "--no-verify").exit_code == 0
    result = passed(run(source, "out.onnx", "--no-verify", "--overwrite", "--json"))
    assert json.loads(result.stdout)["superseded"] == []


def normed() -> onnx.ModelProto:
    """The overflowing model at opset 14, with a LayerNormalization in parts behind it."""
    text = """g (float[n,4] x) => (float[n,4] y) { t = Tanh (x) a = MatMul (t, large) b = Relu (a) c = MatMul (b, small)
        m = ReduceMean <axes = [-1]> (c) d = Sub (c, m) q = Pow (d, two) v = ReduceMean <axes = [-1]> (q) e = Add (v, epsilon)
        r = Sqrt (e) y = Div (d, r) }"""
    mixing = np.random.default_rng(0).uniform(0.5, 1, (4, 4))
    return parse(text, opset=14, ir=8, large=mixing * 6e4, small=np.eye(4) * 1e-4, two=2.0, epsilon=1e-5)


@pytest.mark.long
def test_an_opset_is_raised_where_that_is_asked_for_and_searched_then(run: Run, tmp_path: Path) -> None:
    in_one_file(normed(), tmp_path / "normed.onnx")
    arguments = ("normed.onnx", "out.onnx", "--samples", "over.npz", "--json", "--overwrite")
    plain, raised = (json.loads(run(*arguments, *more).stdout) for more in ((), ("--upgrade-opset",)))
    assert any("the model has 14: --upgrade-opset" in node["reason"] for node in plain["conversion"]["kept"])
    assert raised["conversion"]["repairs"][0]["text"] == "opset 14 became 17"
    assert raised["certificate"]["passed"] is True
    assert raised["search"]["keep_fp32_nodes"]
    assert "LayerNormalization" in [node.op_type for node in onnx.load("out.onnx").graph.node]


def test_a_file_becomes_a_version_in_a_repository_with_its_twin(run: Run) -> None:
    arguments = ("in.onnx", "--repository", "models", "--name", "sums", "--samples", "in.npz", "--fp32-twin", "--json")
    result = passed(run(*arguments, "--max-batch-size", 8))
    written = Path(json.loads(result.stdout)["path"])
    assert written == Path("models/sums/1")
    certificate = read_certificate((written / "certificate.json").read_bytes())
    assert certificate.model == "sums"
    check_embedded(written / "model.onnx", certificate)
    assert open_model(written / "fp32" / "model.onnx").sha256 == open_model("in.onnx").sha256
    config = (written.parent / "config.pbtxt").read_text()
    assert "max_batch_size: 8" in config
    assert "halfserve.fp32_twin" in config
    twin = hashlib.sha256((written / "fp32" / "model.onnx").read_bytes()).hexdigest()
    assert certificate.files.keys() == {"fp32/model.onnx", "samples.npz"}
    assert certificate.files["fp32/model.onnx"] == twin
    second = run(*arguments)
    assert Path(json.loads(second.stdout)["path"]) == Path("models/sums/2")
    assert "some lie in samples.npz beside the model" in run(*arguments[:-1]).stdout


def test_a_key_signs_the_certificates_that_are_written(run: Run, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    key = ("--samples", "in.npz", "--certificate-key", private)
    assert run("in.onnx", "--repository", "models", "--name", "sums", "--fp32-twin", *key).exit_code == 0
    assert run("in.onnx", "out.onnx", "--certificate", "out.json", *key).exit_code == 0
    for path in (Path("models/sums/1/certificate.json"), Path("out.json")):
        assert VerifyingKey(public).signed(json.loads(path.read_bytes()))


def test_a_key_without_a_certificate_to_sign_is_wrong_usage(run: Run, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    result = run("in.onnx", "out.onnx", "--certificate-key", private, "--no-verify")
    assert str(result.exception) == "--certificate-key needs verification; leave --no-verify out"
    result = run("in.onnx", "--repository", "models", "--certificate-key", public)
    assert "public.pem: holds no private key without a pass phrase" in str(result.exception)
    assert not Path("models").exists()


@pytest.mark.long
def test_another_network_of_the_same_file_name_is_no_next_version(run: Run, tmp_path: Path) -> None:
    for name, seed in (("first", 1), ("trained", 2), ("other", 3)):
        (tmp_path / name).mkdir()
        tensor = np.random.default_rng(seed).normal(size=(4, 4) if name != "other" else (4, 8))
        text = "g (float[n,4] x) => (float[n,4] y) { a = MatMul (x, w) b = Relu (a) y = Slice (b, start, to, axis) }"
        model = parse(text, w=tensor, start=np.array([0]), to=np.array([4]), axis=np.array([1]))
        in_one_file(model, tmp_path / name / "model.onnx")
    for name, version in (("first", "1"), ("trained", "2")):
        result = run(f"{name}/model.onnx", "--repository", "models", "--json")
        assert json.loads(result.stdout)["path"] == f"models/model/{version}"
    result = run("other/model.onnx", "--repository", "models")
    assert isinstance(result.exception, ExportError)
    assert str(result.exception).startswith("models/model holds another network, and 'model' is only this one's default name;")
    assert not Path("models/model/3").exists()
    assert run("other/model.onnx", "--repository", "models", "--name", "model").exit_code == 0


@pytest.mark.long
def test_a_verified_model_keeps_its_data_files(run: Run, tmp_path: Path) -> None:
    with_data_files(onnx.load("in.onnx"), tmp_path / "data.onnx", files=2)
    passed(run("data.onnx", "out.onnx", "--samples", "in.npz", "--certificate", "c.json", "--html", "c.html"))
    certificate = read_certificate(Path("c.json").read_bytes())
    assert certificate.onnx_sha256 == open_model("out.onnx").sha256
    check_embedded("out.onnx", certificate)
    assert len(open_model("out.onnx").locations) == 2
    assert "<html" in Path("c.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("in.onnx",), "give either the file to write or --repository, one of the two"),
        (("in.onnx", "out.onnx", "--repository", "models"), "give either the file to write or --repository"),
        (("in.onnx", "out.onnx", "--fp32-twin"), "--fp32-twin belong to --repository; leave the file to write out"),
        (("in.onnx", "out.onnx", "--max-batch-size", "4"), "--fp32-twin belong to --repository; leave the file to write out"),
        (("in.onnx", "--repository", "models", "--overwrite"), "a version in a repository is never replaced"),
        (("in.onnx", "--repository", "models", "--no-verify"), "--repository needs verification; leave --no-verify out"),
        (("in.onnx", "--repository", "models", "--name", "../x"), "'../x' is no model name"),
        (("in.onnx", "--repository", "models", "--version", "0"), "0 is no model version"),
        (("in.onnx", "--repository", "in.npz"), "cannot write to the repository in.npz"),
        (("none.onnx", "out.onnx"), "cannot read the model none.onnx: No such file or directory"),
        (("in.npz", "out.onnx"), "in.npz is not an ONNX model or is damaged: it is a zip archive"),
        ((".", "out.onnx"), "cannot read the model .: Is a directory; give the .onnx file in it"),
        (("in.onnx", "none/out.onnx"), "cannot write none/out.onnx: there is no folder"),
        (("in.onnx", "in.onnx"), "in.onnx is the model to convert itself; give another name, or --overwrite"),
        (("in.onnx", "over.onnx"), "over.onnx exists; give another name, or --overwrite to replace it"),
        (("in.onnx", "out.onnx", "--samples", "over.npz"), r"over.npz: 'x' has shape \[8, 4\], the model takes \[n, 512\]"),
        (("in.onnx", "out.onnx", "--samples", "none.npz"), "cannot read the samples none.npz: No such file"),
        (("in.onnx", "out.onnx", "--samples", "in.npz", "--no-verify"), "--samples needs verification; leave --no-verify out"),
        (("in.onnx", "out.onnx", "--certificate", "c.json", "--no-verify"), "--certificate needs verification"),
        (("in.onnx", "out.onnx", "--html", "c.html", "--no-verify"), "--html needs verification"),
        (("in.onnx", "out.onnx", "--dim", "n"), "--dim 'n' is not of the form NAME=SIZE"),
        (("in.onnx", "out.onnx", "--dim", "n=²"), "--dim 'n=²' is not of the form NAME=SIZE"),
        (("in.onnx", "out.onnx", "--dim", "n=0"), "--dim 'n=0' is not of the form NAME=SIZE"),
        (
            ("in.onnx", "out.onnx", "--no-verify", "--keep-fp32-nodes", "ad0"),
            "'ad0' matches no node of the model; did you mean 'add0'",
        ),
        (("in.onnx", "out.onnx", "--no-verify", "--keep-fp32-ops", "MatMull"), "MatMull"),
        (("in.onnx", "out.onnx", "--min-agreement", "2"), "min_agreement is 2.0; expected a share from 0 to 1"),
        (
            ("in.onnx", "out.onnx", "--samples", "in.npz", "--certificate", "none/c.json"),
            "cannot write the certificate none/c.json: expected a file",
        ),
        (("in.onnx", "out.onnx", "--certificate", "in.onnx"), "cannot write the certificate to in.onnx: that is another file"),
        (("in.onnx", "out.onnx", "--certificate", "./out.onnx"), "cannot write the certificate to out.onnx: that is another"),
        (
            ("in.onnx", "out.onnx", "--samples", "in.npz", "--certificate", "in.npz"),
            "cannot write the certificate to in.npz: that is another file of this command; give it a name of its own",
        ),
        (("in.onnx", "out.html", "--html", "out.html"), "cannot write the page to out.html: that is another"),
        ((f"{LONG}.onnx", "out.onnx"), "cannot read the model a+.onnx: File name too long"),
        (("in.onnx", "out.onnx", "--max-runs", "1"), "max_runs is 1; expected at least 2"),
        (("in.onnx", "out.onnx", "--max-minutes", "-1"), "max_minutes is -1.0; expected a number above 0"),
        (("in.onnx", f"{LONG}.onnx"), "cannot write a+.onnx: File name too long"),
        (("in.onnx", "--repository", LONG), "cannot write to the repository a+: File name too long"),
        (("in.onnx", "--repository", LONG, "--version", "1"), "cannot write to the repository a+: File name too long"),
        (("in.onnx", "out.onnx", "--certificate", LONG), "cannot write the certificate a+: File name too long"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(arguments: tuple[str, ...], message: str, run: Run) -> None:
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    result = run(*arguments)
    assert isinstance(result.exception, ExportError), result.output
    with pytest.raises(ExportError, match=message):
        raise result.exception
    assert "\n" not in str(result.exception)
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_a_pipe_is_refused_and_not_waited_for(run: Run) -> None:
    os.mkfifo("pipe.onnx")
    result = run("pipe.onnx", "out.onnx")
    assert isinstance(result.exception, ExportError)
    assert str(result.exception) == "cannot read the model pipe.onnx: it is a pipe; expected a file"


def test_a_circle_of_links_is_no_place_to_write_to(run: Run) -> None:
    Path("circle.onnx").symlink_to("circle.onnx")
    result = run("in.onnx", "circle.onnx")
    assert isinstance(result.exception, ExportError)
    assert "cannot write circle.onnx: Symlink loop" in str(result.exception)


def test_converting_without_verification_does_not_import_torch(run: Run) -> None:
    program = (
        "import sys; from halfserve.cli import main\n"
        "try: main(['convert', 'in.onnx', 'out.onnx', '--no-verify'])\n"
        "except SystemExit as end: sys.exit(end.code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
